//! A segment applied: one transaction, from the fence to the checkpoint; or two that run side by side and are
//! committed one right after the other (ADR 0015).

use std::borrow::Cow;
use std::collections::BTreeMap;

use alloy_primitives::U256;
use alloy_primitives::map::HashMap;
use tidemark_model::chain::{
    BalanceAsk, ChainAdapter, ChainError, Network, ParsedBlock, Quarantined, RawBlock, Standard,
};
use tidemark_model::ids::{AccountId, AssetId, EventId, Height, HeightRange, SourceEventId};
use tidemark_store::bulk::{self, BelowZero, Log, Merge, Progress, QuarantineRow};
use tidemark_store::copy::CopyBuffer;
use tidemark_store::ledger::{self, OpeningRow, OpeningState, Pair};
use tidemark_store::raw::RawReader;
use tidemark_store::{Conn, Db, StoreError, Tx, log_height, projection};

use super::HistoryError;
use super::segment::{Before, Builder, Refused, Segment, SegmentAsset};
use crate::stage_time;
use crate::workers::openings::is_partial;

/// Tries to make a segment's balances whole before giving up: each try learns of new pairs.
const TRIES_MAX: usize = 50;

/// Questions in one call to the adapter, which batches them further.
const ASKS_MAX: usize = 5_000;

/// The connections a segment is written with. With two, its log is appended beside the merge of its state.
pub struct Writers {
    /// Takes the fence, merges, moves the checkpoint.
    pub state: Conn,
    /// Appends the log.
    pub log: Option<Conn>,
}

/// A segment with its merge rows: everything that can be done before the segment below it is applied.
pub(super) struct Built {
    segment: Segment,
    merge: Merge,
}

impl Built {
    /// The segment that `builder` holds.
    pub(super) fn of(network: &Network, builder: Builder) -> Self {
        let segment = builder.finish();
        let merge = merge_rows(network, &segment);
        Self { segment, merge }
    }

    fn knowing(network: &Network, range: HeightRange, blocks: &Blocks, before: Before) -> Self {
        let started = std::time::Instant::now();
        let mut builder = Builder::new(network, range.from(), before);
        builder.add(range, blocks);
        let built = Self::of(network, builder);
        stage_time::count("build segment", started);
        built
    }
}

/// Blocks of a segment, parsed.
pub(super) type Blocks = [(RawBlock, ParsedBlock)];

/// Where the blocks of a segment are when it has to be built again.
pub(super) enum Source<'a> {
    /// At hand.
    Held(&'a Blocks),
    /// In the raw store.
    Raw(&'a RawReader, &'a Db),
}

impl<'a> Source<'a> {
    async fn blocks(
        &self,
        adapter: &dyn ChainAdapter,
        range: HeightRange,
    ) -> Result<Cow<'a, Blocks>, HistoryError> {
        match self {
            Self::Held(blocks) => Ok(Cow::Borrowed(blocks)),
            Self::Raw(reader, raw) => {
                let conn = raw.conn().await?;
                let blocks = reader.read_range(&conn, adapter.network().id, range).await?;
                Ok(Cow::Owned(super::parse(adapter, blocks)))
            }
        }
    }
}

/// Builds and applies the segment of `blocks`, asking the chain for balances older than the start block
/// where they are needed. Gives the number of canonical events.
pub async fn apply_blocks(
    writers: &mut Writers,
    adapter: &dyn ChainAdapter,
    range: HeightRange,
    blocks: &[(RawBlock, ParsedBlock)],
) -> Result<u64, HistoryError> {
    let built = Built::knowing(adapter.network(), range, blocks, Before::default());
    apply_built(writers, adapter, built, &Source::Held(blocks), &mut Caution::default()).await
}

/// Segments whose read models come later are merged at once, without a look at what is there ([`bulk::merge_at_once`]).
/// One with a balance that cannot be has to be looked at, which costs it twice; so are those that follow, because where one
/// contract breaks its standard, or a history begins in the middle, the next segment has such balances, too.
#[derive(Debug, Default)]
pub(super) struct Caution {
    /// Segments that are still looked at.
    segments: u32,
}

impl Caution {
    const SEGMENTS: u32 = 20;

    fn raise(&mut self) {
        self.segments = Self::SEGMENTS;
    }
    fn segment_done(&mut self) {
        self.segments = self.segments.saturating_sub(1);
    }
}

/// The same for a segment that is built. Its blocks are needed only if it has to be built again.
pub(super) async fn apply_built(
    writers: &mut Writers,
    adapter: &dyn ChainAdapter,
    mut built: Built,
    source: &Source<'_>,
    caution: &mut Caution,
) -> Result<u64, HistoryError> {
    let network = adapter.network();
    let range = built.segment.range;
    let mut before = Before::default();
    let answers = ask_openings(&mut writers.state, adapter, &built.segment).await?;
    if !answers.given.is_empty() {
        let given = answers.given.iter();
        before.openings =
            given.filter_map(|(asset, account, qty)| Some(((*asset, *account), (*qty)?))).collect();
        built = Built::knowing(network, range, &source.blocks(adapter, range).await?, before.clone());
    }
    for _ in 0..TRIES_MAX {
        let events = built.segment.events;
        match apply(writers, network, built, &answers, caution.segments > 0).await? {
            Applied::Done => {
                caution.segment_done();
                return Ok(events);
            }
            Applied::Settled(same) => {
                built = *same;
                continue;
            }
            Applied::BelowZero(refused, pairs) => {
                learn(network, &refused, pairs, &answers.known, &mut before);
            }
            Applied::Overfull(supplies) => before.supplies.extend(supplies),
            Applied::Impossible => caution.raise(),
        }
        built = Built::knowing(network, range, &source.blocks(adapter, range).await?, before.clone());
    }
    Err(HistoryError::NeverWhole { network: network.slug.clone(), range })
}

/// What is known of the openings of the classes' pairs that move in a segment.
#[derive(Default)]
struct Answers {
    /// Asked now, or known and to be written again because the block it stood in has gone.
    given: Vec<(AssetId, AccountId, Option<U256>)>,
    /// What was known before.
    known: BTreeMap<Pair, OpeningRow>,
}

/// Starting in the middle, an account may hold units of a class since before: the chain is asked once for
/// every pair that moves. Single tokens need no question (see [`learn`]).
async fn ask_openings(
    conn: &mut Conn,
    adapter: &dyn ChainAdapter,
    segment: &Segment,
) -> Result<Answers, HistoryError> {
    let network = adapter.network();
    if network.start_block.0 == 0 {
        return Ok(Answers::default());
    }
    let classes: Vec<_> = segment
        .balances
        .iter()
        .filter(|change| segment.asset(change.asset).standard.is_fungible_class())
        .collect();
    let pairs: Vec<_> = classes
        .iter()
        .map(|change| (segment.asset(change.asset).id, segment.account(change.account).id))
        .collect();
    let (known, standing) = {
        let tx = conn.tx().await?;
        let known = ledger::read_openings(&tx, &pairs.iter().copied().collect()).await?;
        let events: Vec<EventId> = known.keys().map(|pair| opening_id(network, *pair)).collect();
        let standing = ledger::live_among(&tx, &events).await?;
        tx.rollback().await?;
        (known, standing)
    };
    let new: Vec<usize> = (0..pairs.len()).filter(|at| !known.contains_key(&pairs[*at])).collect();
    // Live may have asked for it in a block that is gone: it is as true as it was, and has to be written again.
    let mut given: Vec<_> = known
        .iter()
        .filter(|(pair, row)| {
            row.state == OpeningState::Known
                && !row.qty.is_zero()
                && !standing.contains(&opening_id(network, **pair))
        })
        .map(|(pair, row)| (pair.0, pair.1, Some(row.qty)))
        .collect();
    for chunk in new.chunks(ASKS_MAX) {
        let asks: Vec<BalanceAsk> = chunk
            .iter()
            .map(|at| BalanceAsk {
                asset: segment.asset_ref(segment.asset(classes[*at].asset)),
                account: segment.account(classes[*at].account).address.clone(),
                at: network.start_block.minus(1),
            })
            .collect();
        let found = match adapter.balances(&asks).await {
            Ok(found) => found,
            // No node keeps that height, and none will: what turns out to be missing is implied.
            Err(ChainError::Pruned { .. }) => vec![None; asks.len()],
            Err(error) => return Err(error.into()),
        };
        given.extend(chunk.iter().zip(found).map(|(at, qty)| (pairs[*at].0, pairs[*at].1, qty)));
    }
    Ok(Answers { given, known })
}

/// The first opening event of a pair.
fn opening_id(network: &Network, (asset, account): Pair) -> EventId {
    EventId::of(&SourceEventId::opening(network.id, asset, account), 0)
}

enum Applied {
    Done,
    /// Nothing yet, but what somebody left who died between his two commits is gone now.
    Settled(Box<Built>),
    /// Rolled back; the segment comes back with the pairs that went below zero.
    BelowZero(Box<Segment>, Vec<BelowZero>),
    /// Rolled back: more was made of these than there can be. Their supplies before the segment.
    Overfull(Vec<(AssetId, U256)>),
    /// Rolled back: one or the other, and nobody looked where.
    Impossible,
}

async fn apply(
    Writers { state, log: log_writer }: &mut Writers,
    network: &Network,
    Built { mut segment, merge }: Built,
    answers: &Answers,
    is_careful: bool,
) -> Result<Applied, HistoryError> {
    let height = segment.range.last().as_i64();
    let tx = state.tx().await?;
    let progress = bulk::lock_progress(&tx, network.id).await?;
    if progress.head + 1 != segment.range.from().as_i64() || progress.finalized != progress.head {
        return Err(StoreError::Fenced { what: format!("the ledger of {}", network.slug) }.into());
    }
    // A message may have brought some back since the worker looked: it looks again.
    if !ledger::open_above(&tx, network.id, progress.head).await?.is_empty() {
        return Err(StoreError::Fenced { what: format!("the end of the log of {}", network.slug) }.into());
    }
    let log_tx = match log_writer {
        Some(writer) => {
            let log_tx = writer.tx().await?;
            if !log_height::claim(&log_tx, network.id, progress.head, height).await? {
                log_tx.rollback().await?;
                log_height::settle(&tx, network.id, progress.head).await?;
                tx.commit().await?;
                return Ok(Applied::Settled(Box::new(Built { segment, merge })));
            }
            Some(log_tx)
        }
        None => {
            log_height::settle(&tx, network.id, progress.head).await?;
            None
        }
    };
    projection::lock_network(&tx, network.id).await?;
    bulk::stage(&tx, merge).await?;
    // Read models that are kept as history goes need to know what was there before.
    let is_careful = is_careful || !progress.read_models_due;
    if is_careful {
        let below_zero = bulk::join_balances(&tx).await?;
        if !below_zero.is_empty() {
            tx.rollback().await?;
            return Ok(Applied::BelowZero(Box::new(segment), below_zero));
        }
    }
    let log = Log {
        ids: segment.event_ids.take(),
        events: segment.event_rows.take(),
        history: segment.history_rows.take(),
        transfers: segment.transfer_rows.take(),
        blocks: segment.block_rows.take(),
    };
    // Different tables, so neither waits for the other.
    let (appended, merged) = match &log_tx {
        Some(log_tx) => tokio::join!(
            bulk::append(log_tx, network.id, log),
            merge_state(&tx, network, &segment, answers, &progress, is_careful)
        ),
        None => (
            bulk::append(&tx, network.id, log).await,
            merge_state(&tx, network, &segment, answers, &progress, is_careful).await,
        ),
    };
    appended?;
    if let Some(refused) = merged? {
        tx.rollback().await?;
        return Ok(refused);
    }
    // The log first: rows of it that are ahead of the ledger's head can be told, and are nobody's.
    if let Some(log_tx) = log_tx {
        log_tx.commit().await?;
    }
    tx.commit().await?;
    Ok(Applied::Done)
}

/// Everything of a segment that is not its log, up to the checkpoint. Gives why it cannot be, if it cannot.
async fn merge_state(
    tx: &Tx<'_>,
    network: &Network,
    segment: &Segment,
    answers: &Answers,
    progress: &Progress,
    is_careful: bool,
) -> Result<Option<Applied>, HistoryError> {
    let now = segment.last_time;
    if is_careful {
        bulk::merge_balances(tx, network.id, now).await?;
        let overfull = bulk::merge_catalog(tx, network.id).await?;
        if !overfull.is_empty() {
            return Ok(Some(Applied::Overfull(overfull)));
        }
    } else if !bulk::merge_at_once(tx, network.id, now).await? {
        return Ok(Some(Applied::Impossible));
    }
    let height = segment.range.last().as_i64();
    let mut workers = vec!["normalizer", "state-updater"];
    if !progress.read_models_due {
        bulk::merge_read_models(tx, network.id, now).await?;
        projection::move_watermark(tx, network.id, height, None).await?;
        workers.push("projector");
    }
    let opened: Vec<_> = segment.opened.iter().map(|(asset, _, _)| asset.0).collect();
    bulk::mark_partial(tx, &opened).await?;
    bulk::add_digests(tx, network.id, &segment.digest, height).await?;
    ledger::record_openings(tx, network.id, &opening_rows(&segment.assets, &segment.opened, answers), true)
        .await?;
    bulk::count_events(tx, network.id, usize::try_from(segment.events).unwrap_or(usize::MAX)).await?;
    let set_aside =
        SetAside { range: segment.range, quarantined: &segment.quarantined, refused: &segment.refused };
    quarantine(tx, network, &set_aside).await?;
    bulk::finish(tx, network.id, progress.head, height, &workers).await?;
    Ok(None)
}

/// What is known of openings after this segment: the chain's answers, and what was spent without one.
fn opening_rows(
    assets: &[SegmentAsset],
    opened: &[(AssetId, AccountId, U256)],
    answers: &Answers,
) -> BTreeMap<Pair, OpeningRow> {
    let mut rows: BTreeMap<Pair, OpeningRow> = answers
        .given
        .iter()
        .map(|(asset, account, answer)| {
            let (state, qty) = match answer {
                Some(qty) => (OpeningState::Known, *qty),
                None => (OpeningState::Unknown, U256::ZERO),
            };
            ((*asset, *account), OpeningRow { state, qty, parts: u32::from(!qty.is_zero()) })
        })
        .collect();
    for (asset, account, qty) in opened {
        let single = assets.iter().any(|one| one.id == *asset && one.standard == Standard::Erc721);
        let state = if single { OpeningState::Known } else { OpeningState::Implied };
        let before = answers.known.get(&(*asset, *account));
        let (held, parts) = before.map_or((U256::ZERO, 0), |row| (row.qty, row.parts));
        let row = OpeningRow { state, qty: held.saturating_add(*qty), parts: parts + 1 };
        rows.entry((*asset, *account))
            .and_modify(|known| {
                if known.state == OpeningState::Unknown {
                    *known = row;
                }
            })
            .or_insert(row);
    }
    rows
}

fn merge_rows(network: &Network, segment: &Segment) -> Merge {
    let mut balances = CopyBuffer::new(5);
    for change in &segment.balances {
        let asset = segment.asset(change.asset);
        balances
            .row()
            .uuid(asset.id.0)
            .uuid(segment.account(change.account).id.0)
            .uuid(segment.collection(asset.collection).id.0)
            .qty(change.net)
            .qty(change.low);
    }
    let mut assets = CopyBuffer::new(11);
    for asset in &segment.assets {
        let partial = is_partial(network, asset.standard, asset.begins_with_mint);
        assets
            .row()
            .uuid(asset.id.0)
            .uuid(segment.collection(asset.collection).id.0)
            .text(&asset.token_id)
            .text(asset.standard.as_str())
            .qty(asset.supply)
            .timestamp(asset.first_seen)
            .i64(asset.first_height.as_i64())
            .i64(asset.last_height.as_i64())
            .bool(partial)
            .bool(asset.burnt && !(partial && asset.standard.is_fungible_class()))
            .qty(asset.high);
    }
    let mut accounts = CopyBuffer::new(5);
    for account in &segment.accounts {
        accounts
            .row()
            .uuid(account.id.0)
            .text(&account.address)
            .timestamp(account.first_seen)
            .timestamp(account.last_seen)
            .i64(account.transfers);
    }
    let mut collections = CopyBuffer::new(8);
    for collection in &segment.collections {
        collections
            .row()
            .uuid(collection.id.0)
            .uuid(collection.contract.0)
            .text(&collection.address)
            .text(collection.standard.as_str())
            .timestamp(collection.first_seen)
            .i64(collection.first_height.as_i64())
            .i64(collection.last_height.as_i64())
            .i64(collection.transfers);
    }
    Merge {
        balances: balances.sorted_by_leading_uuid(),
        assets: assets.sorted_by_leading_uuid(),
        accounts: accounts.sorted_by_leading_uuid(),
        collections,
    }
}

/// Learns about pairs that went below zero. Where our history may begin after theirs, the missing part is
/// an opening balance; where it cannot, their balance before the segment tells which event to refuse.
fn learn(
    network: &Network,
    segment: &Segment,
    pairs: Vec<BelowZero>,
    known: &BTreeMap<Pair, OpeningRow>,
    before: &mut Before,
) {
    let assets: HashMap<AssetId, &SegmentAsset> =
        segment.assets.iter().map(|asset| (asset.id, asset)).collect();
    for pair in pairs {
        let key = (pair.asset, pair.account);
        let asset = assets[&pair.asset];
        let row = known.get(&key);
        let is_known = row.is_some_and(|row| row.state == OpeningState::Known);
        let unknown = network.start_block.0 > 0 && !is_known && !before.openings.contains_key(&key);
        let first_sender = !pair.moved_before && asset.first_sender == Some(pair.account);
        match asset.standard {
            // Whoever sends a token before anybody was seen to receive it held it before: exactly one.
            Standard::Erc721 if unknown && first_sender => before.openings.insert(key, U256::from(1)),
            // The node could not tell: at least what was missing.
            Standard::Erc1155 if unknown => {
                before.parts.insert(key, row.map_or(0, |row| row.parts));
                before.openings.insert(key, pair.missing)
            }
            Standard::Erc721 | Standard::Erc1155 => before.balances.insert(key, pair.held),
        };
    }
}

/// What a segment keeps without effect.
struct SetAside<'a> {
    range: HeightRange,
    quarantined: &'a [(Height, Quarantined)],
    refused: &'a [Refused],
}

async fn quarantine(tx: &Tx<'_>, network: &Network, segment: &SetAside<'_>) -> Result<(), StoreError> {
    let malformed: Vec<QuarantineRow> = segment
        .quarantined
        .iter()
        .map(|(height, bad)| QuarantineRow {
            event: EventId::of(&bad.source_event_id, 0).0,
            source: bad.source_event_id.as_str().to_owned(),
            height: height.as_i64(),
            asset: None,
            reason: bad.reason.clone(),
            evidence: serde_json::json!({ "tx_hash": bad.tx_hash, "event_index": bad.event_index }),
        })
        .collect();
    bulk::quarantine(tx, "normalizer", network.id, &malformed).await?;
    let refused: Vec<QuarantineRow> = segment
        .refused
        .iter()
        .map(|refused| QuarantineRow {
            event: refused.event.0,
            source: refused.source.as_str().to_owned(),
            height: refused.height.as_i64(),
            asset: Some(refused.asset.0),
            reason: refused.reason.clone(),
            evidence: serde_json::json!({ "segment": [segment.range.from(), segment.range.to()] }),
        })
        .collect();
    bulk::quarantine(tx, "state-updater", network.id, &refused).await?;
    let contracts: Vec<_> = segment
        .refused
        .iter()
        .map(|refused| (refused.contract.0, format!("event {} {}", refused.source.as_str(), refused.reason)))
        .collect();
    bulk::distrust(tx, &contracts).await
}
