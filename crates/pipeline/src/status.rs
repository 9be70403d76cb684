//! Network status: what the raw side and the ledger say of each network, brought together into the one row
//! that every answer's `meta` is made from. Both sides may be different databases, so it is read here.

use std::time::Duration;

use tidemark_model::chain::Network;
use tidemark_store::projection::{self, NetworkStatusInput};
use tidemark_store::{Conn, Db, StoreError, bulk, cursor, raw, status};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

/// Pause between two looks.
const EVERY: Duration = Duration::from_millis(300);

/// Lags are measured at every tenth look.
const MEASURE_EVERY: u64 = 10;

/// Keeps projection.network_status fresh.
pub struct StatusProjector {
    networks: Vec<Network>,
    raw: Db,
    app: Db,
}

impl StatusProjector {
    /// For these networks.
    pub fn new(networks: Vec<Network>, raw: Db, app: Db) -> Self {
        Self { networks, raw, app }
    }

    /// Runs until told to stop.
    pub async fn run(&self, stop: CancellationToken) -> Result<(), StoreError> {
        let mut seen = Vec::new();
        let mut looks = 0_u64;
        loop {
            let now = self.read().await?;
            if now != seen {
                let mut conn = self.app.conn().await?;
                let tx = conn.tx().await?;
                projection::refresh_network_status(&tx, &now).await?;
                tx.commit().await?;
                seen = now;
            }
            if looks % MEASURE_EVERY == 0 {
                self.measure(&seen).await?;
            }
            looks += 1;
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                () = tokio::time::sleep(EVERY) => {}
            }
        }
    }

    /// S0 §17.2: how old the newest state of each stage is, in chain time. Zero where a stage has all it can have.
    async fn measure(&self, networks: &[NetworkStatusInput]) -> Result<(), StoreError> {
        let (raw, app) = (self.raw.conn().await?, self.app.conn().await?);
        for network in networks {
            let id = network.network_id;
            let projected = status::projected_height(&app, id.0).await?.unwrap_or(-1);
            let reported = cursor::head(&raw, id).await?.and_then(|head| head.finalized);
            let lags = Lags {
                ingested: network.ingested_height.unwrap_or(-1),
                ingested_at: network.head_time,
                normalized: network.normalized_height.unwrap_or(-1),
                projected,
                finalized: network.finalized_height.unwrap_or(-1),
                reported: reported.map_or(-1, |block| block.height.as_i64()),
            };
            let heights = [lags.normalized, lags.projected, lags.finalized, lags.reported];
            let times = status::block_times(&app, id.0, &heights).await?;
            for (name, seconds) in lags.seconds(&times) {
                metrics::gauge!(name, "network" => network.slug.clone()).set(seconds);
            }
        }
        Ok(())
    }

    /// One refresh, for commands that do not run roles.
    pub async fn once(&self) -> Result<(), StoreError> {
        let now = self.read().await?;
        let mut conn = self.app.conn().await?;
        let tx = conn.tx().await?;
        projection::refresh_network_status(&tx, &now).await?;
        tx.commit().await
    }

    async fn read(&self) -> Result<Vec<NetworkStatusInput>, StoreError> {
        let (raw, app) = (self.raw.conn().await?, self.app.conn().await?);
        let mut all = Vec::with_capacity(self.networks.len());
        for network in &self.networks {
            all.push(status_of(&raw, &app, network).await?);
        }
        Ok(all)
    }
}

/// Where the stages of a network stand.
struct Lags {
    ingested: i64,
    ingested_at: Option<OffsetDateTime>,
    normalized: i64,
    projected: i64,
    finalized: i64,
    reported: i64,
}

impl Lags {
    /// Gauges by name. `times`: of normalized, projected, finalized and reported.
    fn seconds(&self, times: &[Option<OffsetDateTime>]) -> [(&'static str, f64); 3] {
        let time = |at: usize| times.get(at).copied().flatten();
        let behind =
            |done: bool, newer: Option<OffsetDateTime>, older: Option<OffsetDateTime>| match (newer, older) {
                _ if done => 0.0,
                (Some(newer), Some(older)) => (newer - older).as_seconds_f64().max(0.0),
                // Nothing is there yet: as old as what waits.
                (Some(newer), None) => (OffsetDateTime::now_utc() - newer).as_seconds_f64().max(0.0),
                (None, _) => 0.0,
            };
        // The ledger has no card of a block it has not read.
        let reported_at = if self.reported > self.normalized { self.ingested_at } else { time(3) };
        [
            (
                "state_updater_lag_seconds",
                behind(self.normalized >= self.ingested, self.ingested_at, time(0)),
            ),
            ("projection_lag_seconds", behind(self.projected >= self.ingested, self.ingested_at, time(1))),
            ("finality_lag_seconds", behind(self.finalized >= self.reported, reported_at, time(2))),
        ]
    }
}

async fn status_of(raw: &Conn, app: &Conn, network: &Network) -> Result<NetworkStatusInput, StoreError> {
    let head = cursor::head(raw, network.id).await?;
    let ingested = raw::newest_block(raw, network.id).await?;
    let ledger = bulk::read_progress(app, network.id).await?;
    let known = |height: i64| (height >= 0).then_some(height);
    Ok(NetworkStatusInput {
        network_id: network.id,
        slug: network.slug.clone(),
        family: network.family.as_str().to_owned(),
        start_block: network.start_block.as_i64(),
        confirmations: i64::try_from(network.confirmations).unwrap_or(i64::MAX),
        head_height: head.as_ref().and_then(|head| head.latest).map(|height| height.as_i64()),
        head_time: ingested.map(|(_, time)| time),
        ingested_height: ingested.map(|(height, _)| height),
        normalized_height: ledger.and_then(|ledger| known(ledger.head)),
        finalized_height: ledger.and_then(|ledger| known(ledger.finalized)),
        projected_height: None, // The projector moves it in the transaction of its effect.
        halted_reason: head.and_then(|head| head.halted),
        events_total: None,
        reorgs_total: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_that_has_all_it_can_have_does_not_lag() {
        let at = |seconds: i64| OffsetDateTime::from_unix_timestamp(1_700_000_000 + seconds).ok();
        let lags = Lags {
            ingested: 100,
            ingested_at: at(1000),
            normalized: 100,
            projected: 90,
            finalized: 60,
            reported: 70,
        };
        let times = [at(1000), at(880), at(400), at(520)];
        assert_eq!(
            lags.seconds(&times),
            [
                ("state_updater_lag_seconds", 0.0),
                ("projection_lag_seconds", 120.0),
                ("finality_lag_seconds", 120.0),
            ]
        );
        let empty = Lags {
            ingested: -1,
            ingested_at: None,
            normalized: -1,
            projected: -1,
            finalized: -1,
            reported: -1,
        };
        assert!(empty.seconds(&[None; 4]).iter().all(|(_, seconds)| *seconds == 0.0));
    }
}
