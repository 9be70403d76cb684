//! The one ordered consumer of stream `ledger`: rebuilds the touched keys of the read models and emits what
//! the live stream shows.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use serde::Deserialize;
use tidemark_bus::dispatch::{Accepts, Delivered, HandleError, Handler};
use tidemark_model::envelope::Envelope;
use tidemark_model::ids::{Height, HeightRange, NetworkId};
use tidemark_store::outbox::Emitter;
use tidemark_store::partitions::{Partitions, Table};
use tidemark_store::{Db, Tx, bulk};

use super::payload;
use crate::projectors::{self, Addresses, Beside, rebuild_and_emit, touched};

pub(super) const KIND: &str = "projector";
pub(super) const ACCEPTS: &[Accepts] = &[
    Accepts { subject: "ledger.event.normalized", versions: &[1] },
    Accepts { subject: "ledger.event.reverted", versions: &[1, 2] },
    Accepts { subject: "ledger.ownership.changed", versions: &[1] },
    Accepts { subject: "ledger.block.normalized", versions: &[1] },
    Accepts { subject: "ledger.finality.advanced", versions: &[1] },
];

/// Applies ledger events to the read models.
pub struct ProjectorHandler {
    app: Db,
    partitions: Arc<Partitions>,
    emitter: Arc<Emitter>,
    addresses: Addresses,
    beside: Beside,
}

impl ProjectorHandler {
    /// A handler for all networks.
    pub fn new(app: Db, partitions: Arc<Partitions>, emitter: Arc<Emitter>) -> Self {
        let beside = Beside::live(app.clone());
        Self { app, partitions, emitter, addresses: Addresses::default(), beside }
    }
}

#[derive(Deserialize)]
struct BlockNormalized {
    network_id: NetworkId,
    events: usize,
}

#[derive(Deserialize)]
struct At {
    network_id: NetworkId,
    block_number: Height,
}

#[async_trait]
impl Handler for ProjectorHandler {
    fn kind(&self) -> &'static str {
        KIND
    }
    fn accepts(&self) -> &'static [Accepts] {
        ACCEPTS
    }
    /// The partitions of projection.transfers that the batch needs, with their indexes: readers are there.
    async fn prepare(&self, batch: &[Delivered], _later: &[Delivered]) -> Result<(), HandleError> {
        let mut conn = None;
        let mut last = None;
        for delivered in batch.iter().filter(|one| one.envelope.event_type == "ledger.event.normalized") {
            let at: At = payload(delivered)?;
            if last.replace((at.network_id, at.block_number)) == Some((at.network_id, at.block_number)) {
                continue;
            }
            let conn = match &mut conn {
                Some(conn) => conn,
                none => none.insert(self.app.conn().await?),
            };
            self.partitions.ensure_transfers(conn, at.network_id, HeightRange::one(at.block_number)).await?;
            self.partitions.ensure_indexed(conn, &[Table::Transfers], at.network_id, at.block_number).await?;
        }
        Ok(())
    }
    async fn apply(&self, tx: &Tx<'_>, batch: &[Delivered]) -> Result<(), HandleError> {
        let envelopes: Vec<&Envelope> = batch.iter().map(|delivered| &delivered.envelope).collect();
        for (network, keys) in touched(&envelopes).map_err(refused)? {
            rebuild_and_emit(tx, network, &keys, &self.addresses, &self.emitter, &self.beside)
                .await
                .map_err(refused)?;
        }
        for (network, events) in counted(batch)? {
            bulk::count_events(tx, network, events).await?;
        }
        Ok(())
    }
}

/// Events of the blocks in a batch, by network. What is handed out again was counted before.
fn counted(batch: &[Delivered]) -> Result<BTreeMap<NetworkId, usize>, HandleError> {
    let mut counted = BTreeMap::new();
    let blocks = batch.iter().filter(|one| one.envelope.event_type == "ledger.block.normalized");
    for delivered in blocks.filter(|one| !one.replay) {
        let block: BlockNormalized = payload(delivered)?;
        *counted.entry(block.network_id).or_default() += block.events;
    }
    Ok(counted)
}

fn refused(error: projectors::WorkError) -> HandleError {
    match error {
        projectors::WorkError::Store(error) => HandleError::Store(error),
        projectors::WorkError::Emit(error) => error.into(),
        other => HandleError::Retry { reason: other.to_string(), source: None },
    }
}
