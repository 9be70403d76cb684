//! Replays as operators ask for them, on the command line and over HTTP. A replay of the projector builds every
//! read model anew beside the live one and swaps them: readers never see a half of it, and no subscriber hears of
//! an old event again. Every other handler gets its events again, marked as replayed.

use anyhow::ensure;
use tidemark_bus::BusError;
use tidemark_bus::dlq::Desk;
use tidemark_bus::replay::{self, ReplayRequest, Replayed, Selector};
use tidemark_pipeline::projectors::{ProjectionName, rebuild_projection};
use tidemark_store::{Db, dlq};

use crate::cli::{ReplayUnit, time_of};
use crate::roles::Shop;

/// The handler whose tables are rebuilt instead.
const PROJECTOR: &str = "projector";

/// What replays need.
#[derive(Clone)]
pub struct Replays {
    app: Db,
    desk: Desk,
    one_database: bool,
}

impl Replays {
    /// With the handlers of `shop`.
    pub fn new(shop: &Shop, app: Db) -> Self {
        Self { app, desk: shop.desk(), one_database: shop.one_database() }
    }

    /// The database in which replays are recorded.
    pub fn db(&self) -> &Db {
        &self.app
    }

    /// Refuses what cannot be replayed; records that the rest begins, with an audit row. Gives its id.
    pub async fn begin(&self, request: &ReplayRequest) -> anyhow::Result<String> {
        ensure!(
            self.one_database || request.handler != "ledger",
            "the ledger's events lie in the raw database, which is another one here: replay the projector, or \
             use `tidemark rewind`"
        );
        Ok(replay::begin(&self.desk, request).await?)
    }

    /// Does what was begun and records how it ended.
    pub async fn run(&self, request: &ReplayRequest, id: String) -> anyhow::Result<Replayed> {
        if request.handler != PROJECTOR || request.dry_run {
            return Ok(replay::run(&self.desk, request, id).await?);
        }
        let counted = ReplayRequest { dry_run: true, ..request.clone() };
        let events = replay::run(&self.desk, &counted, String::new()).await?.events;
        let rebuilt = self.rebuild().await;
        let (status, events) = if rebuilt.is_ok() { ("done", events) } else { ("failed", 0) };
        dlq::end_replay(&self.app.conn().await?, &id, status, events).await?;
        rebuilt.map(|()| Replayed { id, events })
    }

    async fn rebuild(&self) -> anyhow::Result<()> {
        for name in ProjectionName::ALL {
            let report = rebuild_projection(&self.app, name, &|_| ()).await?;
            tracing::info!(
                projection = %name,
                rows = report.rows,
                differing = report.differing.count,
                action = "replay_projection",
                "Built a read model beside the live one and swapped them."
            );
        }
        Ok(())
    }
}

/// Was the request at fault, and not we?
pub fn is_refusal(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<BusError>(), Some(BusError::Misuse { .. }))
        || error.downcast_ref::<BusError>().is_none()
}

/// The events between `from` and `to`; `names` are how the asker calls them.
pub fn selector(
    unit: ReplayUnit,
    part: Option<u16>,
    (from, to): (&str, &str),
    names: (&str, &str),
) -> Result<Selector, String> {
    let number = |name: &str, text: &str| {
        let number = text.parse::<i64>().ok().filter(|number| *number >= 0);
        number.ok_or_else(|| format!("{name} {text} is not a number"))
    };
    let time = |name: &str, text: &str| {
        time_of(text).ok_or_else(|| format!("{name} {text} is not a time as 2026-05-03T10:00:00Z"))
    };
    let selector = match unit {
        ReplayUnit::Number => {
            Selector::Numbers { part, from: number(names.0, from)?, to: number(names.1, to)? }
        }
        ReplayUnit::Height => {
            Selector::Heights { network_id: None, from: number(names.0, from)?, to: number(names.1, to)? }
        }
        ReplayUnit::Time => Selector::Time { from: time(names.0, from)?, to: time(names.1, to)? },
    };
    let backwards = match &selector {
        Selector::Numbers { from, to, .. } | Selector::Heights { from, to, .. } => from > to,
        Selector::Time { from, to } => from >= to,
    };
    if backwards {
        return Err(format!("{} {from} is not before {} {to}", names.0, names.1));
    }
    Ok(selector)
}
