//! `replay`

use tidemark_bus::replay::{ReplayRequest, Selector};

use super::databases;
use crate::cli::{ReplayArgs, ReplayUnit};
use crate::exit::{self, Usage};
use crate::replays::{self, Replays};
use crate::roles::Shop;

/// Runs it.
pub async fn run(args: ReplayArgs) -> anyhow::Result<u8> {
    if args.part.is_some() && args.unit != ReplayUnit::Number {
        return Err(Usage("--part goes with --unit number".into()).into());
    }
    if args.network.is_some() && args.unit != ReplayUnit::Height {
        return Err(Usage("--network goes with --unit height".into()).into());
    }
    let (from, to) = (args.from.as_str(), args.to.as_str());
    let mut selector =
        replays::selector(args.unit, args.part, (from, to), ("--from", "--to")).map_err(Usage)?;
    let ctx = databases::open(&args.database)?;
    if let (Selector::Heights { network_id, .. }, Some(named)) = (&mut selector, &args.network) {
        *network_id = Some(databases::network(&ctx, named).await?.id.0.into());
    }
    let shop = Shop::open(&ctx).await?;
    let request = ReplayRequest {
        handler: args.handler,
        selector,
        by: args.actor.by,
        reason: args.reason,
        dry_run: args.dry_run,
        per_second: args.per_second,
    };
    let replays = Replays::new(&shop, ctx.app.clone());
    let id = replays.begin(&request).await?;
    let done = replays.run(&request, id).await?;
    match request.dry_run {
        true => println!("Would replay {} events to {}.", done.events, request.handler),
        false => println!("Replayed {} events to {} (replay {}).", done.events, request.handler, done.id),
    }
    Ok(exit::OK)
}
