//! The one ordered consumer of stream `chain`: blocks are normalized, branches taken back, finality applied,
//! in the order in which the ingester committed them (ADR 0007).

use std::collections::{HashMap, HashSet};
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
    Accepts { subject: BLOCK, versions: &[1] },
    Accepts { subject: "chain.reorg.detected", versions: &[1] },
    Accepts { subject: LINE, versions: &[1] },
];

/// A block read and parsed before the transaction.
struct Ready {
    block: RawBlock,
    parsed: ParsedBlock,
    openings: Openings,
}

/// What `prepare` found out about a batch.
#[derive(Default)]
struct Prepared {
    /// Blocks that were read; `None`: the block had left the chain.
    blocks: HashMap<Uuid, Option<Ready>>,
    /// Lines of finality whose work a later one does.
    overtaken: HashSet<Uuid>,
}

/// Applies chain events to the ledger.
pub struct LedgerHandler {
    adapters: HashMap<NetworkId, Arc<dyn ChainAdapter>>,
    raw: Db,
    app: Db,
    reader: RawReader,
    emitter: Arc<Emitter>,
    /// Made by `prepare`, taken by `apply`: of each lane its newest batch, because lanes go on beside each other.
    prepared: Mutex<HashMap<u16, Prepared>>,
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
        Self { adapters, raw, app, reader, emitter, prepared: Mutex::default() }
    }

    fn adapter(&self, network: NetworkId) -> Result<&Arc<dyn ChainAdapter>, HandleError> {
        self.adapters.get(&network).ok_or_else(|| {
            HandleError::poison(format!(
                "network {network} is not configured here; add it to tidemark.toml and release"
            ))
        })
    }

    /// Asks what was prepared for the lane of an event.
    fn prepared<T>(&self, of: &Delivered, ask: impl FnOnce(&mut Prepared, Uuid) -> T) -> Option<T> {
        let mut lanes = self.prepared.lock().expect("no holder panics");
        lanes.get_mut(&of.part).map(|lane| ask(lane, of.event_id()))
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
        let first = batch.iter().find(|one| is_block(one));
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
        let ready = self.prepared(delivered, |lane, event| lane.blocks.remove(&event)).flatten();
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
    /// Blocks are committed before a line of finality that comes behind them is applied: whoever waits for a block
    /// waits for its owners, not for older ones to become final, and the projector goes on with it meanwhile. Of many
    /// networks each line would end a transaction of its own: they share theirs.
    fn first_of(&self, waiting: &[Delivered]) -> usize {
        before_line(waiting)
    }
    async fn prepare(&self, batch: &[Delivered], later: &[Delivered]) -> Result<(), HandleError> {
        self.wait_for_history(batch).await?;
        let mut prepared = Prepared::default();
        for (place, delivered) in batch.iter().enumerate() {
            let event = delivered.event_id();
            if is_block(delivered) {
                prepared.blocks.insert(event, self.load(&payload(delivered)?).await?);
            } else if is_overtaken(delivered, batch[place + 1..].iter().chain(later)) {
                prepared.overtaken.insert(event);
            }
        }
        if let Some(first) = batch.first() {
            self.prepared.lock().expect("no holder panics").insert(first.part, prepared);
        }
        Ok(())
    }
    async fn apply(&self, tx: &Tx<'_>, batch: &[Delivered]) -> Result<(), HandleError> {
        tx.look_up_by_key().await?;
        for delivered in batch {
            let is_overtaken = || self.prepared(delivered, |lane, event| lane.overtaken.contains(&event));
            let done = match delivered.envelope.event_type.as_str() {
                BLOCK => self.block(tx, delivered).await,
                "chain.reorg.detected" => self.reorg(tx, delivered).await,
                _ if is_overtaken() == Some(true) => Ok(()),
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

const BLOCK: &str = "chain.block.ingested";
const LINE: &str = "chain.finality.advanced";

fn is_block(delivered: &Delivered) -> bool {
    delivered.envelope.event_type == BLOCK
}

/// Does a line of the same network come `later` that is as high or higher, with nothing but blocks in between? Then that
/// one does the work of both, once. It is in the log, so it comes, whatever happens to us.
fn is_overtaken<'a>(line: &Delivered, later: impl IntoIterator<Item = &'a Delivered>) -> bool {
    let next = later
        .into_iter()
        .filter(|one| one.envelope.partition_key == line.envelope.partition_key)
        .find(|one| !is_block(one));
    let is_line = |one: &Delivered| one.envelope.event_type == LINE;
    let Some(next) = next.filter(|next| is_line(next) && is_line(line)) else { return false };
    let height = |of: &Delivered| payload::<FinalityAdvanced>(of).map(|event| event.finalized_height);
    matches!((height(line), height(next)), (Ok(line), Ok(next)) if next >= line)
}

/// How many come before the first line that has work to do and stands behind a block; all of them where several
/// networks are waiting.
fn before_line(waiting: &[Delivered]) -> usize {
    if waiting.windows(2).any(|pair| pair[0].envelope.partition_key != pair[1].envelope.partition_key) {
        return waiting.len();
    }
    let first_block = waiting.iter().position(is_block).unwrap_or(waiting.len());
    let line =
        waiting.iter().enumerate().skip(first_block).find(|(place, one)| {
            one.envelope.event_type == LINE && !is_overtaken(one, &waiting[place + 1..])
        });
    line.map_or(waiting.len(), |(place, _)| place)
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
        delivered(LINE, network, payload)
    }
    fn block(network: i32) -> Delivered {
        delivered(BLOCK, network, json!({}))
    }
    fn reorg() -> Delivered {
        delivered("chain.reorg.detected", 1, json!({}))
    }

    #[test]
    fn blocks_do_not_wait_for_a_line_behind_them() {
        assert_eq!(before_line(&[block(1), line(1, 5)]), 1);
        assert_eq!(before_line(&[line(1, 4), block(1), line(1, 5)]), 2, "the first line is overtaken anyway");
        assert_eq!(before_line(&[line(1, 4), block(1)]), 2);
        assert_eq!(
            before_line(&[block(1), line(1, 5), block(1), line(1, 6)]),
            3,
            "one line does the work of both"
        );
        assert_eq!(
            before_line(&[block(1), line(1, 5), reorg(), block(1)]),
            1,
            "not overtaken: its turn comes first"
        );
        assert_eq!(before_line(&[line(1, 4), line(1, 5)]), 2, "nobody waits");
        assert_eq!(before_line(&[block(1), block(1)]), 2);
        assert_eq!(
            before_line(&[block(1), line(1, 5), block(2), line(2, 5)]),
            4,
            "networks share a transaction"
        );
    }

    #[test]
    fn a_line_gives_way_to_the_next_of_its_network_unless_that_is_lower_or_behind_a_reorg() {
        let block = || block(1);
        assert!(is_overtaken(&line(1, 5), &[block(), line(1, 6)]));
        assert!(is_overtaken(&line(1, 5), &[line(2, 9), line(1, 5)]));
        assert!(!is_overtaken(&line(1, 5), &[]));
        assert!(!is_overtaken(&line(1, 5), &[block()]));
        assert!(!is_overtaken(&line(1, 5), &[line(2, 6)]));
        assert!(!is_overtaken(&line(1, 5), &[line(1, 4)]), "an older report must not hide a newer one");
        assert!(!is_overtaken(&line(1, 5), &[block(), reorg(), line(1, 6)]));
        assert!(!is_overtaken(&reorg(), &[line(1, 6)]), "a reorg has work of its own");
        let broken = delivered(LINE, 1, json!({}));
        assert!(!is_overtaken(&broken, &[line(1, 6)]), "what cannot be read is said, not passed over");
    }
}
