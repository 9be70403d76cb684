//! Network status: what the raw side and the ledger say of each network, brought together into the one row
//! that every answer's `meta` is made from. Both sides may be different databases, so it is read here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tidemark_model::OffsetDateTime;
use tidemark_model::chain::Network;
use tidemark_model::ids::NetworkId;
use tidemark_store::cursor::{self, Mark};
use tidemark_store::projection::{self, NetworkStatusInput};
use tidemark_store::{Db, StoreError, raw, status};
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

/// The newest raw block of a network, and where its cursors were when it was read.
type Newest = BTreeMap<NetworkId, (Mark, Option<(i64, OffsetDateTime)>)>;

impl StatusProjector {
    /// For these networks.
    pub fn new(networks: Vec<Network>, raw: Db, app: Db) -> Self {
        Self { networks, raw, app }
    }

    /// Runs until told to stop.
    pub async fn run(&self, stop: CancellationToken) -> Result<(), StoreError> {
        let mut seen = BTreeMap::new();
        let mut newest = Newest::new();
        // Networks whose lags may be other than what was last shown.
        let mut due = BTreeSet::new();
        let mut looks = 0_u64;
        loop {
            let now = self.read(&mut newest).await?;
            let changed: Vec<NetworkStatusInput> =
                now.iter().filter(|one| seen.get(&one.network_id) != Some(*one)).cloned().collect();
            if !changed.is_empty() {
                let mut conn = self.app.conn().await?;
                let tx = conn.tx().await?;
                projection::refresh_network_status(&tx, &changed).await?;
                tx.commit().await?;
                due.extend(changed.iter().map(|one| one.network_id));
                seen.extend(changed.into_iter().map(|one| (one.network_id, one)));
            }
            if looks.is_multiple_of(MEASURE_EVERY) {
                self.measure(&seen, &mut due).await?;
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
    /// A network that stands still and lags nowhere is not asked again until it moves.
    async fn measure(
        &self,
        seen: &BTreeMap<NetworkId, NetworkStatusInput>,
        due: &mut BTreeSet<NetworkId>,
    ) -> Result<(), StoreError> {
        let (raw, app) = (self.raw.conn().await?, self.app.conn().await?);
        for network in
            seen.values().filter(|network| due.contains(&network.network_id)).cloned().collect::<Vec<_>>()
        {
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
            let seconds = lags.seconds(&times);
            if seconds.iter().all(|(_, seconds)| *seconds == 0.0) {
                due.remove(&id);
            }
            for (name, seconds) in seconds {
                metrics::gauge!(name, "network" => network.slug.clone()).set(seconds);
            }
        }
        Ok(())
    }

    /// One refresh, for commands that do not run roles.
    pub async fn once(&self) -> Result<(), StoreError> {
        let now = self.read(&mut Newest::new()).await?;
        let mut conn = self.app.conn().await?;
        let tx = conn.tx().await?;
        projection::refresh_network_status(&tx, &now).await?;
        tx.commit().await
    }

    /// Three questions for all networks, and one more for each whose cursor moved since the last look.
    async fn read(&self, newest: &mut Newest) -> Result<Vec<NetworkStatusInput>, StoreError> {
        let ids: Vec<NetworkId> = self.networks.iter().map(|network| network.id).collect();
        let conn = self.raw.conn().await?;
        let mut heads = cursor::heads(&conn, &ids).await?;
        for (network, mark) in cursor::marks(&conn, &ids).await? {
            if newest.get(&network).is_none_or(|(known, _)| *known != mark) {
                let block = raw::newest_block(&conn, network).await?;
                newest.insert(network, (mark, block));
            }
        }
        drop(conn);
        let ledgers = status::ledger_heights(&self.app.conn().await?, &ids).await?;
        let known = |height: i64| (height >= 0).then_some(height);
        let status_of = |network: &Network| {
            let head = heads.remove(&network.id);
            let ingested = newest.get(&network.id).and_then(|(_, block)| *block);
            let ledger = ledgers.get(&network.id).copied();
            NetworkStatusInput {
                network_id: network.id,
                slug: network.slug.clone(),
                family: network.family.as_str().to_owned(),
                start_block: network.start_block.as_i64(),
                confirmations: i64::try_from(network.confirmations).unwrap_or(i64::MAX),
                head_height: head.as_ref().and_then(|head| head.latest).map(|height| height.as_i64()),
                head_time: ingested.map(|(_, time)| time),
                ingested_height: ingested.map(|(height, _)| height),
                normalized_height: ledger.and_then(|(head, _)| known(head)),
                finalized_height: ledger.and_then(|(_, finalized)| known(finalized)),
                projected_height: None, // The projector moves it in the transaction of its effect.
                halted_reason: head.and_then(|head| head.halted),
                events_total: None,
                reorgs_total: None,
            }
        };
        Ok(self.networks.iter().map(status_of).collect())
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
