//! The one ordered consumer of stream `chain`: blocks are normalized, branches taken back, finality applied,
//! in the order in which the ingester committed them (ADR 0007).

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use serde::Deserialize;
use tidemark_bus::dispatch::{Accepts, Delivered, HandleError, Handler};
use tidemark_model::chain::{BlockRef, ChainAdapter, ParsedBlock, RawBlock};
use tidemark_model::ids::{BlockHash, Height, NetworkId};
use tidemark_store::outbox::Emitter;
use tidemark_store::projection::{self, BlockCard};
use tidemark_store::raw::{self, RawError, RawReader};
use tidemark_store::{Db, Tx, bulk, cursor};
use uuid::Uuid;

use super::payload;
use crate::workers::{
    BlockInput, BlockOutcome, Cause, Openings, WorkError, advance_finality, handle_reorg, prepare,
    process_block,
};

/// Balances older than the start block asked for on behalf of one block.
const OPENINGS_PER_BLOCK_MAX: usize = 2_000;
/// How long to wait for the history worker to fill a gap.
const GAP_WAIT: Duration = Duration::from_millis(100);

pub(super) const KIND: &str = "ledger";
pub(super) const ACCEPTS: &[Accepts] = &[
    Accepts { subject: "chain.block.ingested", versions: &[1] },
    Accepts { subject: "chain.reorg.detected", versions: &[1] },
    Accepts { subject: "chain.finality.advanced", versions: &[1] },
];

/// A block read and parsed before the transaction.
struct Ready {
    block: RawBlock,
    parsed: ParsedBlock,
    openings: Openings,
}

/// Applies chain events to the ledger.
pub struct LedgerHandler {
    adapters: HashMap<NetworkId, Arc<dyn ChainAdapter>>,
    raw: Db,
    app: Db,
    reader: RawReader,
    emitter: Arc<Emitter>,
    /// Blocks made ready by `prepare`, taken by `apply`: of each lane its newest batch, because lanes go on beside
    /// each other. `None`: the block had left the chain.
    ready: Mutex<HashMap<u16, HashMap<Uuid, Option<Ready>>>>,
}

impl LedgerHandler {
    /// A handler for these networks.
    pub fn new(
        adapters: impl IntoIterator<Item = Arc<dyn ChainAdapter>>,
        raw: Db,
        app: Db,
        reader: RawReader,
        emitter: Arc<Emitter>,
    ) -> Self {
        let adapters = adapters.into_iter().map(|adapter| (adapter.network().id, adapter)).collect();
        Self { adapters, raw, app, reader, emitter, ready: Mutex::default() }
    }

    fn adapter(&self, network: NetworkId) -> Result<&Arc<dyn ChainAdapter>, HandleError> {
        self.adapters.get(&network).ok_or_else(|| {
            HandleError::poison(format!(
                "network {network} is not configured here; add it to tidemark.toml and release"
            ))
        })
    }

    /// Reads the block an event is about; `None` when that block has left the chain meanwhile.
    async fn load(&self, event: &BlockIngested) -> Result<Option<Ready>, HandleError> {
        let adapter = self.adapter(event.network_id)?;
        let conn = self.raw.conn().await?;
        let block = self.reader.read_block(&conn, event.network_id, event.height).await.map_err(raw_error)?;
        drop(conn);
        let Some(block) = block.filter(|block| block.hash == event.hash) else { return Ok(None) };
        let parsed = adapter.parse(&block);
        let openings =
            prepare(&self.app, &**adapter, adapter.network(), &parsed.events, OPENINGS_PER_BLOCK_MAX)
                .await
                .map_err(|error| self.refused(error))?;
        Ok(Some(Ready { block, parsed, openings }))
    }

    /// Defers without holding anything while the history worker still has to fill the gap below, or to show what
    /// filled it.
    async fn wait_for_history(&self, batch: &[Delivered]) -> Result<(), HandleError> {
        let first = batch.iter().find(|one| one.envelope.event_type == "chain.block.ingested");
        let Some(first) = first else { return Ok(()) };
        let event: BlockIngested = payload(first)?;
        let progress = bulk::read_progress(&self.app.conn().await?, event.network_id).await?;
        match progress {
            Some(progress) if event.height.as_i64() <= progress.finalized => Ok(()),
            Some(progress) if progress.read_models_due => Err(HandleError::Defer(GAP_WAIT)),
            Some(progress) if event.height.as_i64() <= progress.head + 1 => Ok(()),
            _ => Err(HandleError::Defer(GAP_WAIT)),
        }
    }

    async fn block(&self, tx: &Tx<'_>, delivered: &Delivered) -> Result<(), HandleError> {
        let event: BlockIngested = payload(delivered)?;
        let adapter = self.adapter(event.network_id)?;
        let network = adapter.network();
        let ready = {
            let mut lanes = self.ready.lock().expect("no holder panics");
            lanes.get_mut(&delivered.part).and_then(|lane| lane.remove(&delivered.event_id()))
        };
        let ready = match ready {
            Some(ready) => ready,
            None => self.load(&event).await?,
        };
        // Its block was replaced before we came to it: the message of that reorg follows in this stream.
        let Some(ready) = ready else { return Ok(()) };
        let input = BlockInput {
            block: ready.block.block_ref(),
            time: ready.block.time,
            parsed: &ready.parsed,
            chain_head: event.head_height.max(event.height),
            openings: &ready.openings,
        };
        let outcome = process_block(tx, network, &input, &cause(delivered)).await;
        match outcome.map_err(|error| self.refused(error))? {
            BlockOutcome::Skipped => return Ok(()),
            BlockOutcome::Gap { .. } => return Err(HandleError::Defer(GAP_WAIT)),
            BlockOutcome::Done(drafts) => self.emitter.append(tx, &drafts).await?,
        }
        let events = ready.parsed.events.len();
        projection::upsert_block_cards(tx, &[card(network.id, &ready.block, events)]).await?;
        Ok(())
    }

    async fn reorg(&self, tx: &Tx<'_>, delivered: &Delivered) -> Result<(), HandleError> {
        let event: ReorgDetected = payload(delivered)?;
        let network = self.adapter(event.network_id)?.network();
        match handle_reorg(tx, network, &event.orphaned, &event.canonical, &cause(delivered)).await {
            Ok(done) => {
                let orphaned: Vec<BlockHash> = event.orphaned.iter().map(|block| block.hash).collect();
                projection::remove_block_cards(tx, network.id, &orphaned).await?;
                metrics::counter!("ledger_reorgs_total", "network_id" => network.id.to_string()).increment(1);
                Ok(self.emitter.append(tx, &done.drafts).await?)
            }
            // The chain went there and back while we were away, and history made final what it came back to.
            Err(WorkError::FinalizedReverted { block, .. }) if self.stands(network.id, &block).await? => {
                tracing::warn!(
                    network_id = network.id.0,
                    height = block.height.0,
                    action = "skip_old_reorg",
                    "A reorg that was itself taken back is passed over: its block is on the chain, and final."
                );
                Ok(())
            }
            Err(error) => Err(self.refused(error)),
        }
    }

    /// Is this block on the chain as the raw store has it now?
    async fn stands(&self, network: NetworkId, block: &BlockRef) -> Result<bool, HandleError> {
        let stored = raw::block_at(&self.raw.conn().await?, network, block.height).await?;
        Ok(stored.is_some_and(|link| link.block.hash == block.hash))
    }

    async fn finality(&self, tx: &Tx<'_>, delivered: &Delivered) -> Result<(), HandleError> {
        let event: FinalityAdvanced = payload(delivered)?;
        let network = self.adapter(event.network_id)?.network();
        let done = advance_finality(
            tx,
            network,
            event.finalized_height,
            Some(event.finalized_hash),
            &cause(delivered),
        )
        .await;
        let done = done.map_err(|error| self.refused(error))?;
        if !done.quarantined.is_empty() {
            tracing::error!(
                network_id = network.id.0,
                events = done.quarantined.len(),
                action = "quarantine",
                "Events that would make a balance negative were set aside."
            );
        }
        Ok(self.emitter.append(tx, &done.drafts).await?)
    }

    fn refused(&self, error: WorkError) -> HandleError {
        match error {
            WorkError::Store(error) => HandleError::Store(error),
            WorkError::Chain(error) => HandleError::Retry {
                reason: "the chain could not be asked".into(),
                source: Some(Box::new(error)),
            },
            error @ WorkError::ReorgExpected { .. } => {
                HandleError::Retry { reason: error.to_string(), source: None }
            }
            // The network's key is parked: its later events wait, all other networks go on.
            error @ WorkError::FinalizedReverted { .. } => HandleError::poison(error.to_string()),
        }
    }

    async fn halt_if_final(&self, delivered: &Delivered, error: &HandleError) {
        if !matches!(error, HandleError::Poison { .. })
            || delivered.envelope.event_type != "chain.reorg.detected"
        {
            return;
        }
        let Ok(event) = payload::<ReorgDetected>(delivered) else { return };
        let halted =
            async { cursor::halt(&self.raw.conn().await?, event.network_id, &error.to_string()).await };
        if let Err(error) = halted.await {
            tracing::error!(network_id = event.network_id.0, %error, action = "halt", "The halt could not be recorded.");
        }
    }
}

#[async_trait]
impl Handler for LedgerHandler {
    fn kind(&self) -> &'static str {
        KIND
    }
    fn accepts(&self) -> &'static [Accepts] {
        ACCEPTS
    }
    async fn prepare(&self, batch: &[Delivered]) -> Result<(), HandleError> {
        self.wait_for_history(batch).await?;
        let mut all = HashMap::new();
        for delivered in batch.iter().filter(|one| one.envelope.event_type == "chain.block.ingested") {
            let event: BlockIngested = payload(delivered)?;
            all.insert(delivered.event_id(), self.load(&event).await?);
        }
        if let Some(first) = batch.first() {
            self.ready.lock().expect("no holder panics").insert(first.part, all);
        }
        Ok(())
    }
    async fn apply(&self, tx: &Tx<'_>, batch: &[Delivered]) -> Result<(), HandleError> {
        tx.look_up_by_key().await?;
        for (place, delivered) in batch.iter().enumerate() {
            let done = match delivered.envelope.event_type.as_str() {
                "chain.block.ingested" => self.block(tx, delivered).await,
                "chain.reorg.detected" => self.reorg(tx, delivered).await,
                _ if is_overtaken(delivered, &batch[place + 1..]) => Ok(()),
                _ => self.finality(tx, delivered).await,
            };
            if let Err(error) = done {
                self.halt_if_final(delivered, &error).await;
                return Err(error);
            }
        }
        // Last of all: the row is the projector's too, which must not wait for the rest of this.
        let reorgs = batch.iter().filter(|one| one.envelope.event_type == "chain.reorg.detected");
        for delivered in reorgs.filter(|one| !one.replay) {
            let event: ReorgDetected = payload(delivered)?;
            bulk::count_reorg(tx, event.network_id).await?;
        }
        Ok(tx.look_up_as_usual().await?)
    }
}

/// Does the batch bring a line of the same network that is as high or higher, with nothing but blocks in between? Then
/// that one does the work of both, once.
fn is_overtaken(line: &Delivered, later: &[Delivered]) -> bool {
    let next = later
        .iter()
        .filter(|one| one.envelope.partition_key == line.envelope.partition_key)
        .find(|one| one.envelope.event_type != "chain.block.ingested");
    let Some(next) = next.filter(|next| next.envelope.event_type == line.envelope.event_type) else {
        return false;
    };
    let height = |of: &Delivered| payload::<FinalityAdvanced>(of).map(|event| event.finalized_height);
    matches!((height(line), height(next)), (Ok(line), Ok(next)) if next >= line)
}

#[derive(Deserialize)]
struct BlockIngested {
    network_id: NetworkId,
    height: Height,
    hash: BlockHash,
    head_height: Height,
}
#[derive(Deserialize)]
struct ReorgDetected {
    network_id: NetworkId,
    orphaned: Vec<BlockRef>,
    canonical: Vec<BlockRef>,
}
#[derive(Deserialize)]
struct FinalityAdvanced {
    network_id: NetworkId,
    finalized_height: Height,
    finalized_hash: BlockHash,
}

fn cause(delivered: &Delivered) -> Cause {
    Cause { id: delivered.envelope.event_id.to_string(), at: delivered.envelope.occurred_at }
}

fn card(network: NetworkId, block: &RawBlock, events: usize) -> BlockCard {
    BlockCard {
        network_id: network,
        height: block.height,
        hash: block.hash,
        parent_hash: block.parent,
        block_time: block.time,
        tx_count: block.tx_count.and_then(|count| i32::try_from(count).ok()),
        event_count: i32::try_from(events).unwrap_or(i32::MAX),
    }
}

fn raw_error(error: RawError) -> HandleError {
    match error {
        RawError::Store(error) => HandleError::Store(error),
        error @ RawError::Blob(_) => HandleError::Retry {
            reason: "a body could not be read from object storage".into(),
            source: Some(Box::new(error)),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::sample::envelope;

    fn delivered(event_type: &str, network: i32, payload: Value) -> Delivered {
        let envelope = envelope(event_type, &network.to_string(), payload);
        Delivered { envelope, stream: "chain".into(), part: 0, pseq: 1, replay: false }
    }
    fn line(network: i32, height: u64) -> Delivered {
        let hash = format!("0x{}", "11".repeat(32));
        let payload = json!({ "network_id": network, "finalized_height": height, "finalized_hash": hash });
        delivered("chain.finality.advanced", network, payload)
    }

    #[test]
    fn a_line_gives_way_to_the_next_of_its_network_unless_that_is_lower_or_behind_a_reorg() {
        let block = || delivered("chain.block.ingested", 1, json!({}));
        let reorg = || delivered("chain.reorg.detected", 1, json!({}));
        assert!(is_overtaken(&line(1, 5), &[block(), line(1, 6)]));
        assert!(is_overtaken(&line(1, 5), &[line(2, 9), line(1, 5)]));
        assert!(!is_overtaken(&line(1, 5), &[]));
        assert!(!is_overtaken(&line(1, 5), &[block()]));
        assert!(!is_overtaken(&line(1, 5), &[line(2, 6)]));
        assert!(!is_overtaken(&line(1, 5), &[line(1, 4)]), "an older report must not hide a newer one");
        assert!(!is_overtaken(&line(1, 5), &[block(), reorg(), line(1, 6)]));
        let broken = delivered("chain.finality.advanced", 1, json!({}));
        assert!(!is_overtaken(&broken, &[line(1, 6)]), "what cannot be read is said, not passed over");
    }
}
