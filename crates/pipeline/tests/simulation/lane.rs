//! One network's way through the ledger: messages delivered, history applied in bulk, read models rebuilt.
//! Each step is one transaction and may be ended anywhere.

use tidemark_model::chain::{ChainAdapter, ParsedBlock, RawBlock};
use tidemark_model::envelope::*;
use tidemark_model::ids::{Height, HeightRange};
use tidemark_pipeline::history::{HistoryError, Writers, apply_blocks, build, show};
use tidemark_pipeline::projectors::{self, Beside, rebuild_keys, touched};
use tidemark_pipeline::workers::{
    BlockInput, BlockOutcome, Cause, Openings, WorkError, advance_finality, handle_reorg, prepare,
    process_block, take_back_above_head,
};
use tidemark_store::projection::built_last;
use tidemark_store::{Conn, Db, Tx, bulk, ledger};
use time::OffsetDateTime;

use crate::chain::Chain;
use crate::feed::{Feed, Message};
use crate::ground::{Ground, killed_at, set_fuse, set_last_breath};

/// Where a step ends before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kill {
    Never,
    /// After so many writing statements.
    Statement(u32),
    /// All is written, nothing committed.
    BeforeCommit,
    /// It is committed, and nobody knows.
    AfterCommit,
}

/// What became of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Done,
    /// Not yet: something else must happen first.
    Waits,
    /// It ended before its time; nothing of it may be left.
    Died,
    /// It was committed, and looks as if it had died.
    DoneUnknown,
}

/// Why a run fails.
pub(crate) type Failed = String;

pub(crate) struct Lane {
    pub(crate) chain: Chain,
    pub(crate) feed: Feed,
    /// Messages before this one are delivered.
    pub(crate) position: usize,
    /// What the ledger emitted, in order.
    pub(crate) emitted: Vec<Envelope>,
    /// What the projector has taken of it.
    pub(crate) projected: usize,
}

impl Lane {
    pub(crate) fn new(chain: Chain) -> Self {
        Self { chain, feed: Feed::default(), position: 0, emitted: Vec::new(), projected: 0 }
    }

    /// Delivers these messages in one transaction.
    pub(crate) async fn deliver(
        &mut self,
        ground: &Ground,
        messages: &[Message],
        kill: Kill,
    ) -> Result<Step, Failed> {
        let network = &self.chain.network;
        let mut answers = Vec::new();
        for message in messages {
            let parsed = match message {
                Message::Block { block, .. } => self.chain.parse(block),
                _ => ParsedBlock::default(),
            };
            match prepare(&ground.db, &self.chain, network, &parsed.events, 1_000).await {
                Ok(openings) => answers.push((parsed, openings)),
                Err(WorkError::Chain(_)) => return Ok(Step::Waits),
                Err(error) => return Err(error.to_string()),
            }
        }
        let (chain, feed, answers) = (&self.chain, &self.feed, &answers);
        let (step, drafts) = attempt(ground, kill, async |tx| {
            let mut drafts = Vec::new();
            for (message, (parsed, openings)) in messages.iter().zip(answers) {
                match apply(tx, chain, feed, message, parsed, openings).await? {
                    Some(more) => drafts.extend(more),
                    None => return Ok(None),
                }
            }
            Ok::<_, WorkError>(Some(drafts))
        })
        .await
        .map_err(|error| format!("{}: {error}", messages[0].name()))?;
        self.emitted.extend(drafts.into_iter().map(envelope));
        Ok(step)
    }

    /// What the history worker does with what is final and stored: first finality up to the ledger's head,
    /// then at most `most` blocks in bulk.
    pub(crate) async fn history(
        &mut self,
        ground: &Ground,
        most: u64,
        kill: Kill,
    ) -> Result<(Step, String), Failed> {
        let network = self.chain.network.id;
        let conn = ground.db.conn().await.map_err(text)?;
        let progress = bulk::read_progress(&conn, network).await.map_err(text)?.ok_or("no progress")?;
        let available =
            self.feed.finalized.map_or(-1, |height| i64::try_from(height).expect("a small height"));
        if progress.finalized != progress.head {
            drop(conn);
            return self.finish_live(ground, &progress, available, kill).await;
        }
        let next = Height::from_i64(progress.head + 1);
        let last = available.min(next.as_i64() + i64::try_from(most).expect("few") - 1);
        if last < next.as_i64() || self.projected < self.emitted.len() {
            if progress.read_models_due && self.projected == self.emitted.len() {
                return self.show(ground, conn, most, kill).await;
            }
            return Ok((Step::Waits, "nothing for history".to_owned()));
        }
        let mut conn = conn;
        if self.is_blocked(&mut conn, progress.head).await? {
            drop(conn);
            // Messages may be on their way that clear it; or not.
            return match most % 3 {
                0 => Ok((Step::Waits, "history waits for messages".to_owned())),
                _ => self.take_back(ground, kill).await,
            };
        }
        // Now and then what follows is shown at its end, on top of what is shown already.
        if most.is_multiple_of(4) {
            let before_start = self.chain.network.start_block.as_i64() - 1;
            built_last::put_off(&mut conn, network, progress.head, before_start).await.map_err(text)?;
        }
        let range = HeightRange::inclusive(next, Height::from_i64(last)).expect("not empty");
        let blocks = self.segment(range);
        light(&conn, kill).await?;
        let what = format!("history {range}");
        // Short segments with one connection, long ones with two.
        let log = if range.from() < range.last() { ground.db.spare_conn().await } else { None };
        let mut writers = Writers { state: conn, log };
        let step = match apply_blocks(&mut writers, &self.chain, range, &blocks).await {
            Ok(_) => Step::Done,
            Err(HistoryError::Chain(_)) => Step::Waits,
            Err(error) => match killed_at(&error) {
                Some(place) => {
                    ground.note_kill(&format!("history: {place}"));
                    Step::Died
                }
                None => return Err(format!("{what}: {error}")),
            },
        };
        put_out(&writers.state, kill).await?;
        Ok((step, what))
    }

    async fn is_blocked(&self, conn: &mut Conn, head: i64) -> Result<bool, Failed> {
        let tx = conn.tx().await.map_err(text)?;
        Ok(!ledger::open_above(&tx, self.chain.network.id, head).await.map_err(text)?.is_empty())
    }

    /// Blocks above the head that history is about to pass.
    async fn take_back(&mut self, ground: &Ground, kill: Kill) -> Result<(Step, String), Failed> {
        let network = &self.chain.network;
        let cause = Cause { id: format!("way:{}", self.emitted.len()), at: OffsetDateTime::UNIX_EPOCH };
        let (step, drafts) = attempt(ground, kill, async |tx| {
            Ok::<_, WorkError>(Some(take_back_above_head(tx, network, &cause).await?.drafts))
        })
        .await?;
        self.emitted.extend(drafts.into_iter().map(envelope));
        Ok((step, "history clears the way".to_owned()))
    }

    /// History is through: what was put off is built, with one connection or with two.
    async fn show(
        &self,
        ground: &Ground,
        mut conn: Conn,
        most: u64,
        kill: Kill,
    ) -> Result<(Step, String), Failed> {
        light(&conn, kill).await?;
        let second = if most.is_multiple_of(2) { ground.db.spare_conn().await } else { None };
        // The worker builds, makes indexes and then shows; who shows at once builds as well.
        let network = self.chain.network.id;
        let built = match most % 3 {
            1 => build(&mut conn, ground.db.spare_conn().await, network).await,
            _ => Ok(true),
        };
        let shown = match built {
            Ok(_) => show(&mut conn, second, network).await,
            Err(error) => Err(error),
        };
        let step = match shown {
            Ok(true) => Step::Done,
            Ok(false) => Step::Waits,
            Err(error) => {
                ground.note_kill(&format!("read models: {}", killed_at(&error).ok_or_else(|| text(error))?));
                Step::Died
            }
        };
        put_out(&conn, kill).await?;
        Ok((step, "the read models are built".to_owned()))
    }

    /// The blocks of a range that hold records, parsed: history stores no others.
    fn segment(&self, range: HeightRange) -> Vec<(RawBlock, ParsedBlock)> {
        self.feed
            .stored
            .range(range.from().0..=range.last().0)
            .filter(|(_, block)| !block.records.is_empty())
            .map(|(_, block)| (RawBlock::clone(block), self.chain.parse(block)))
            .collect()
    }

    async fn finish_live(
        &mut self,
        ground: &Ground,
        progress: &bulk::Progress,
        available: i64,
        kill: Kill,
    ) -> Result<(Step, String), Failed> {
        if available < progress.head {
            return Ok((Step::Waits, "live is ahead of finality".to_owned()));
        }
        let what = format!("history makes {} final", progress.head);
        let cause = Cause { id: what.clone(), at: OffsetDateTime::UNIX_EPOCH };
        let (network, feed) = (&self.chain.network, &self.feed);
        let (step, drafts) = attempt(ground, kill, async |tx| {
            let open = ledger::recent_above(tx, network.id, progress.finalized).await?;
            let stored = |height: u64| feed.stored.get(&height).map(|block| block.hash);
            if open.iter().any(|block| stored(block.height.0) != Some(block.hash)) {
                return Ok(None); // The message of a reorg is on its way.
            }
            let head = Height::from_i64(progress.head);
            let done = advance_finality(tx, network, head, None, &cause).await?;
            Ok::<_, WorkError>(Some(done.drafts))
        })
        .await?;
        self.emitted.extend(drafts.into_iter().map(envelope));
        Ok((step, what))
    }

    /// Gives the projector a batch of what was emitted.
    pub(crate) async fn project(&mut self, ground: &Ground, most: usize, kill: Kill) -> Result<Step, Failed> {
        let last = self.emitted.len().min(self.projected + most);
        let batch: Vec<&Envelope> = self.emitted[self.projected..last].iter().collect();
        if batch.is_empty() {
            return Ok(Step::Waits);
        }
        let keys = touched(&batch).map_err(text)?;
        // Every second batch as live does it with large ones: owners on a connection of their own.
        let beside = Beside { db: ground.db.clone(), pairs_min: 1 };
        let beside = self.projected.is_multiple_of(2).then_some(&beside);
        let (step, _) = attempt(ground, kill, async |tx| {
            for (network, keys) in &keys {
                rebuild_keys(tx, *network, keys, beside).await?;
            }
            Ok::<_, projectors::WorkError>(Some(Vec::new()))
        })
        .await?;
        if step == Step::Done {
            self.projected = last;
        }
        Ok(step)
    }
}

/// One transaction around `work`, which gives what it emits, or nothing when it has to wait.
async fn attempt<E: std::error::Error>(
    ground: &Ground,
    kill: Kill,
    work: impl AsyncFnOnce(&Tx<'_>) -> Result<Option<Vec<Draft>>, E>,
) -> Result<(Step, Vec<Draft>), Failed> {
    let mut conn = ground.db.conn().await.map_err(text)?;
    light(&conn, kill).await?;
    let tx = conn.tx().await.map_err(text)?;
    let (step, drafts) = match work(&tx).await {
        Ok(Some(_)) if kill == Kill::BeforeCommit => {
            ground.note_kill("before commit");
            drop(tx);
            (Step::Died, Vec::new())
        }
        Ok(Some(drafts)) => {
            tx.commit().await.map_err(text)?;
            if kill == Kill::AfterCommit {
                ground.note_kill("after commit");
                (Step::DoneUnknown, drafts)
            } else {
                (Step::Done, drafts)
            }
        }
        Ok(None) => {
            drop(tx);
            (Step::Waits, Vec::new())
        }
        Err(error) => {
            drop(tx);
            ground.note_kill(&killed_at(&error).ok_or_else(|| error.to_string())?);
            (Step::Died, Vec::new())
        }
    };
    put_out(&conn, kill).await?;
    Ok((step, drafts))
}

/// The canonical chain through `last`, once, in order: in bulk, or block by block with finality at the end.
pub(crate) async fn replay(db: &Db, lane: &Lane, last: u64, in_bulk: bool) -> Result<(), Failed> {
    let chain = &lane.chain;
    let network = &chain.network;
    let first = network.start_block;
    let blocks: Vec<RawBlock> =
        (first.0..=last).map(|height| chain.raw_block(height).expect("canonical")).collect();
    let mut writers = Writers { state: db.conn().await.map_err(text)?, log: db.spare_conn().await };
    if in_bulk {
        let blocks: Vec<_> = blocks
            .into_iter()
            .map(|block| (chain.parse(&block), block))
            .map(|(parsed, block)| (block, parsed))
            .collect();
        let range = HeightRange::inclusive(first, Height(last)).expect("not empty");
        apply_blocks(&mut writers, chain, range, &blocks).await.map_err(text)?;
        return Ok(());
    }
    let mut conn = writers.state;
    let cause = Cause { id: "replay".to_owned(), at: OffsetDateTime::UNIX_EPOCH };
    for block in &blocks {
        let parsed = chain.parse(block);
        let openings = prepare(db, chain, network, &parsed.events, 1_000).await.map_err(text)?;
        let tx = conn.tx().await.map_err(text)?;
        let input = BlockInput {
            block: block.block_ref(),
            time: block.time,
            parsed: &parsed,
            chain_head: block.height,
            openings: &openings,
        };
        process_block(&tx, network, &input, &cause).await.map_err(text)?;
        tx.commit().await.map_err(text)?;
    }
    let tx = conn.tx().await.map_err(text)?;
    advance_finality(&tx, network, Height(last), None, &cause).await.map_err(text)?;
    tx.commit().await.map_err(text)
}

/// Applies one message; `None` when it has to wait.
async fn apply(
    tx: &Tx<'_>,
    chain: &Chain,
    feed: &Feed,
    message: &Message,
    parsed: &ParsedBlock,
    openings: &Openings,
) -> Result<Option<Vec<Draft>>, WorkError> {
    let network = &chain.network;
    let cause = Cause { id: message.name(), at: OffsetDateTime::UNIX_EPOCH };
    match message {
        Message::Block { block, head } => {
            let input = BlockInput {
                block: block.block_ref(),
                time: block.time,
                parsed,
                chain_head: (*head).max(block.height),
                openings,
            };
            match process_block(tx, network, &input, &cause).await? {
                BlockOutcome::Done(drafts) => Ok(Some(drafts)),
                BlockOutcome::Skipped => Ok(Some(Vec::new())),
                BlockOutcome::Gap { .. } => Ok(None),
            }
        }
        Message::Reorg { orphaned, canonical, .. } => {
            let stored = |height: u64| feed.stored.get(&height).map(|block| block.hash);
            match handle_reorg(tx, network, orphaned, canonical, &cause).await {
                // The chain has come back to it since.
                Err(WorkError::FinalizedReverted { block, .. })
                    if stored(block.height.0) == Some(block.hash) =>
                {
                    Ok(Some(Vec::new()))
                }
                done => Ok(Some(done?.drafts)),
            }
        }
        Message::Final { block } => {
            let done = advance_finality(tx, network, block.height, Some(block.hash), &cause).await;
            match done {
                Err(WorkError::ReorgExpected { .. }) => Ok(None),
                done => Ok(Some(done?.drafts)),
            }
        }
    }
}

fn envelope(draft: Draft) -> Envelope {
    Envelope {
        event_id: draft.event_id,
        event_type: draft.subject.event_type(),
        event_version: draft.subject.version(),
        schema_uri: "schemas://simulation".into(),
        source: Source { service: "ledger".into(), instance: "simulation".into(), commit: "none".into() },
        occurred_at: draft.occurred_at,
        ingested_at: draft.occurred_at,
        causation_id: None,
        correlation_id: draft.event_id,
        traceparent: None,
        tenant_id: "simulation".into(),
        actor: Actor { kind: ActorKind::System, id: "ledger".into() },
        payload: draft.payload,
        partition_key: draft.partition_key,
        outbox: None,
        retention_class: RetentionClass::Operational,
        data_residency: DataResidency::Eu,
    }
}

async fn light(conn: &Conn, kill: Kill) -> Result<(), Failed> {
    match kill {
        Kill::Statement(after) => set_fuse(conn, Some(after)).await.map_err(text),
        Kill::BeforeCommit => set_last_breath(conn, true).await.map_err(text),
        _ => Ok(()),
    }
}

async fn put_out(conn: &Conn, kill: Kill) -> Result<(), Failed> {
    match kill {
        Kill::Statement(_) => set_fuse(conn, None).await.map_err(text),
        Kill::BeforeCommit => set_last_breath(conn, false).await.map_err(text),
        _ => Ok(()),
    }
}

pub(crate) fn text(error: impl std::error::Error) -> Failed {
    error.to_string()
}
