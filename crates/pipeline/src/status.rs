//! Network status: what the raw side and the ledger say of each network, brought together into the one row
//! that every answer's `meta` is made from. Both sides may be different databases, so it is read here.

use std::time::Duration;

use tidemark_model::chain::Network;
use tidemark_store::projection::{self, NetworkStatusInput};
use tidemark_store::{Conn, Db, StoreError, bulk, cursor, raw};
use tokio_util::sync::CancellationToken;

/// Pause between two looks.
const EVERY: Duration = Duration::from_millis(300);

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
        loop {
            let now = self.read().await?;
            if now != seen {
                let mut conn = self.app.conn().await?;
                let tx = conn.tx().await?;
                projection::refresh_network_status(&tx, &now).await?;
                tx.commit().await?;
                seen = now;
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
