//! Network status: what the raw side and the ledger say of each network, brought together into the one row
//! that every answer's `meta` is made from. Both sides may be different databases, so it is read here.

use std::collections::BTreeMap;
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
        loop {
            let now = self.read(&mut newest).await?;
            let changed: Vec<NetworkStatusInput> =
                now.iter().filter(|one| seen.get(&one.network_id) != Some(*one)).cloned().collect();
            if !changed.is_empty() {
                let mut conn = self.app.conn().await?;
                let tx = conn.tx().await?;
                projection::refresh_network_status(&tx, &changed).await?;
                tx.commit().await?;
                seen.extend(changed.into_iter().map(|one| (one.network_id, one)));
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                () = tokio::time::sleep(EVERY) => {}
            }
        }
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
