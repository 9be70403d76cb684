//! `replay`

use tidemark_bus::replay::{ReplayRequest, Selector, replay};

use super::databases;
use crate::cli::{ReplayArgs, ReplayUnit, time_of};
use crate::exit::{self, Usage};
use crate::roles::Shop;

/// Runs it.
pub async fn run(args: ReplayArgs) -> anyhow::Result<u8> {
    if args.part.is_some() && args.unit != ReplayUnit::Number {
        return Err(Usage("--part goes with --unit number".into()).into());
    }
    if args.network.is_some() && args.unit != ReplayUnit::Height {
        return Err(Usage("--network goes with --unit height".into()).into());
    }
    let mut selector = selector(&args)?;
    let ctx = databases::open(&args.database)?;
    if let (Selector::Heights { network_id, .. }, Some(named)) = (&mut selector, &args.network) {
        *network_id = Some(databases::network(&ctx, named).await?.id.0.into());
    }
    let shop = Shop::open(&ctx).await?;
    anyhow::ensure!(
        shop.one_database() || args.handler != "ledger",
        "the ledger's events lie in the raw database, which is another one here: replay the projector, or use \
         `tidemark rewind`"
    );
    let request = ReplayRequest {
        handler: args.handler,
        selector,
        by: args.actor.by,
        reason: args.reason,
        dry_run: args.dry_run,
        per_second: args.per_second,
    };
    let done = replay(&shop.desk(), &request).await?;
    match request.dry_run {
        true => println!("Would replay {} events to {}.", done.events, request.handler),
        false => println!("Replayed {} events to {} (replay {}).", done.events, request.handler, done.id),
    }
    Ok(exit::OK)
}

fn selector(args: &ReplayArgs) -> Result<Selector, Usage> {
    let number = |flag: &str, text: &str| {
        let number = text.parse::<i64>().ok().filter(|number| *number >= 0);
        number.ok_or_else(|| Usage(format!("{flag} {text} is not a number")))
    };
    let time = |flag: &str, text: &str| {
        time_of(text).ok_or_else(|| Usage(format!("{flag} {text} is not a time as 2026-05-03T10:00:00Z")))
    };
    let (from, to) = (args.from.as_str(), args.to.as_str());
    let selector = match args.unit {
        ReplayUnit::Number => {
            Selector::Numbers { part: args.part, from: number("--from", from)?, to: number("--to", to)? }
        }
        ReplayUnit::Height => {
            Selector::Heights { network_id: None, from: number("--from", from)?, to: number("--to", to)? }
        }
        ReplayUnit::Time => Selector::Time { from: time("--from", from)?, to: time("--to", to)? },
    };
    let backwards = match &selector {
        Selector::Numbers { from, to, .. } | Selector::Heights { from, to, .. } => from > to,
        Selector::Time { from, to } => from >= to,
    };
    if backwards {
        return Err(Usage(format!("--from {from} is not before --to {to}")));
    }
    Ok(selector)
}
