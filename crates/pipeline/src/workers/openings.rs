//! What accounts held before our first block (ADR 0008). Reading from the middle of a chain's history is the
//! normal case, so a balance that is older than `start_block` becomes an event of kind `opening`.
//!
//! - A single token (ERC-721): whoever sends it first held it. No question is needed.
//! - A class (ERC-1155): everybody who moves it for the first time, as sender or receiver, is asked for at
//!   `start_block - 1`, outside the transaction, in batches and within a budget.
//! - Where the chain cannot say, the asset is `partial` and an opening of exactly what is missing is implied
//!   when it is spent; it is never a reason to quarantine.
//!
//! An opening lives in the block of the event that needs it first: a reorg takes it away and brings it back
//! with that block, it becomes final with it, and the digest of a height does not depend on what lies above.
//! In ownership_history it stands before the first block, because that is when it was true.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::U256;
use tidemark_model::chain::{
    AssetRef, BalanceAsk, BlockRef, ChainAdapter, ChainError, EventKind, Network, RawEvent, Standard,
};
use tidemark_model::envelope::Draft;
use tidemark_model::finality::FinalityStatus;
use tidemark_model::ids::{AccountId, AssetId, CollectionId, EventId, SourceEventId, TxId};
use tidemark_store::Db;
use tidemark_store::ledger::{self, DeltaRow, NormalizedRow, OpeningRow, OpeningState, Pair};
use time::OffsetDateTime;

use super::normalizer::asset_ids;
use super::{Cause, WorkError, drafts};

/// Read from its first block on, a chain has nothing that is older than what we know.
pub(crate) fn may_be_needed(network: &Network) -> bool {
    network.start_block.0 > 0
}

/// Does our history of an asset begin after its own? It can only where we start in the middle of the chain's.
/// A class is then never known to be complete, because accounts that did not move since may hold units of it;
/// a single token is, if the first we see of it is its making.
pub(crate) fn is_partial(network: &Network, standard: Standard, begins_with_mint: bool) -> bool {
    may_be_needed(network) && (standard.is_fungible_class() || !begins_with_mint)
}

/// Answers brought in from outside the transaction: how much, or `None` where the chain cannot say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Openings(pub BTreeMap<Pair, Option<U256>>);

/// Balances asked for in one call.
const ASKS_PER_CALL: usize = 100;

/// Asks for the opening balances that these events need and that were never asked for, at most `budget` of
/// them, senders first. Runs before the transaction; running it twice or for nothing does no harm. What
/// the budget leaves out is asked for at the next touch.
pub async fn prepare(
    db: &Db,
    adapter: &dyn ChainAdapter,
    network: &Network,
    events: &[RawEvent],
    budget: usize,
) -> Result<Openings, WorkError> {
    if !may_be_needed(network) {
        return Ok(Openings::default());
    }
    let mut pairs: BTreeMap<Pair, (bool, &AssetRef, &str)> = BTreeMap::new();
    for event in events {
        let (Some(asset), Some(movement)) = (event.asset_refs.first(), event.movement()) else { continue };
        if asset.standard != Standard::Erc1155 || movement.qty.is_zero() {
            continue;
        }
        let (_, asset_id) = asset_ids(asset);
        for (address, receives) in [(movement.from, false), (movement.to, true)] {
            let Some(address) = address else { continue };
            let pair = (asset_id, AccountId::of(network.id, address));
            let entry = pairs.entry(pair).or_insert((receives, asset, address));
            entry.0 &= receives;
        }
    }
    if pairs.is_empty() {
        return Ok(Openings::default());
    }
    let known = {
        let mut conn = db.conn().await?;
        let tx = conn.tx().await?;
        let known = ledger::read_openings(&tx, &pairs.keys().copied().collect()).await?;
        tx.rollback().await?;
        known
    };
    let mut wanted: Vec<(bool, Pair, BalanceAsk)> = pairs
        .into_iter()
        .filter(|(pair, _)| !known.contains_key(pair))
        .map(|(pair, (receives, asset, account))| {
            let at = network.start_block.minus(1);
            (receives, pair, BalanceAsk { asset: asset.clone(), account: account.to_owned(), at })
        })
        .collect();
    wanted.sort_by_key(|(receives, pair, _)| (*receives, *pair));
    wanted.truncate(budget);
    let asks: Vec<(Pair, BalanceAsk)> = wanted.into_iter().map(|(_, pair, ask)| (pair, ask)).collect();
    ask(adapter, &asks).await
}

/// Asks the chain, in batches. Runs outside any transaction.
pub async fn ask(adapter: &dyn ChainAdapter, asks: &[(Pair, BalanceAsk)]) -> Result<Openings, WorkError> {
    let mut answers = BTreeMap::new();
    for chunk in asks.chunks(ASKS_PER_CALL) {
        let questions: Vec<BalanceAsk> = chunk.iter().map(|(_, ask)| ask.clone()).collect();
        let given = match adapter.balances(&questions).await {
            Ok(given) => given,
            // No node keeps that height, and none will: that is an answer too.
            Err(ChainError::Pruned { .. }) => vec![None; questions.len()],
            Err(error) => return Err(error.into()),
        };
        answers.extend(chunk.iter().map(|(pair, _)| *pair).zip(given));
    }
    Ok(Openings(answers))
}

/// For a live consumer that may not ask inside its transaction: what open events need and nobody asked for,
/// at most `budget`. A task of its own calls this, [`ask`] and [`settle`] in a loop, well before finality.
pub async fn unasked(
    tx: &tidemark_store::Tx<'_>,
    network: &Network,
    budget: usize,
) -> Result<Vec<(Pair, BalanceAsk)>, WorkError> {
    if !may_be_needed(network) {
        return Ok(Vec::new());
    }
    let at_most = i64::try_from(budget).unwrap_or(i64::MAX);
    let rows = ledger::unasked_openings(tx, network.id, at_most).await?;
    let ask = |row: ledger::UnaskedRow| {
        let asset = AssetRef {
            network_id: network.id,
            collection_addr_normalized: row.contract,
            token_id_raw: row.token_id_raw,
            standard: row.standard,
        };
        (row.pair, BalanceAsk { asset, account: row.account, at: network.start_block.minus(1) })
    };
    Ok(rows.into_iter().map(ask).collect())
}

/// Writes answers that came after their events, as openings in the first open block that needs each. What
/// has become final meanwhile is not written: it is asked for again at its next touch.
pub async fn settle(
    tx: &tidemark_store::Tx<'_>,
    network: &Network,
    answers: &Openings,
    cause: &Cause,
) -> Result<Vec<Draft>, WorkError> {
    ledger::lock_progress(tx, network.id, network.start_block).await?;
    let pairs: BTreeSet<Pair> = answers.0.keys().copied().collect();
    let known = ledger::read_openings(tx, &pairs).await?;
    let mut learnt = BTreeMap::new();
    let mut rows = Vec::new();
    let mut partial = BTreeSet::new();
    for first in ledger::first_open(tx, network.id, &pairs).await? {
        if known.contains_key(&first.pair) {
            continue;
        }
        let Some(answer) = answers.0.get(&first.pair) else { continue };
        learnt.insert(first.pair, learnt_opening(*answer));
        if answer.is_none_or(|qty| !qty.is_zero()) {
            partial.insert(first.pair.0);
        }
        if let Some(qty) = answer.filter(|qty| !qty.is_zero()) {
            let ledger::FirstOpen { collection, block, event_time, status, .. } = first;
            let need = Need { collection, block, event_time, status };
            rows.push(opening_event(network, first.pair, 0, qty, &need));
        }
    }
    ledger::record_openings(tx, network.id, &learnt, false).await?;
    tidemark_store::catalog::mark_partial(tx, &partial.into_iter().collect::<Vec<_>>()).await?;
    let height = rows.iter().map(|row| row.block.height).max().unwrap_or_default().as_i64();
    let opened = ledger::upsert_events(tx, network.id, &rows.iter().collect::<Vec<_>>()).await?.touched;
    Ok(drafts::ownership_changed(network, "opening", height, &opened, cause))
}

fn learnt_opening(answer: Option<U256>) -> OpeningRow {
    match answer {
        Some(qty) => OpeningRow { state: OpeningState::Known, qty, parts: u32::from(!qty.is_zero()) },
        None => OpeningRow { state: OpeningState::Unknown, qty: U256::ZERO, parts: 0 },
    }
}

/// Where an opening is needed first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    pub(crate) collection: CollectionId,
    pub(crate) block: BlockRef,
    pub(crate) event_time: OffsetDateTime,
    pub(crate) status: FinalityStatus,
}

/// The opening event of a pair.
pub(crate) fn opening_event(
    network: &Network,
    (asset, account): Pair,
    part: u32,
    qty: U256,
    need: &Need,
) -> NormalizedRow {
    let source_event_id = SourceEventId::opening(network.id, asset, account);
    NormalizedRow {
        id: EventId::of(&source_event_id, part),
        source_event_id,
        sub_index: part,
        kind: EventKind::Opening,
        asset: Some(asset),
        collection: Some(need.collection),
        block: need.block,
        tx_hash: TxId::from([0; 32]),
        event_index: -1,
        event_time: need.event_time,
        status: need.status,
        blob_ref: None,
        delta: Some(DeltaRow { asset, from: None, to: Some(account), qty }),
    }
}

/// What normalizing a batch does about openings.
#[derive(Debug, Default)]
pub(crate) struct OpeningPlan {
    pub(crate) rows: Vec<NormalizedRow>,
    pub(crate) partial: BTreeSet<AssetId>,
}

/// Records answers and finds the opening events that the rows of a batch need and that do not stand; for networks
/// where any [may be needed](may_be_needed).
/// `rows` are in the chain's order.
pub(crate) async fn plan(
    tx: &tidemark_store::Tx<'_>,
    network: &Network,
    rows: &[(Standard, &NormalizedRow)],
    answers: &Openings,
) -> Result<OpeningPlan, WorkError> {
    let mut plan = OpeningPlan::default();
    let mut needs: BTreeMap<Pair, Need> = BTreeMap::new();
    let mut first_senders: BTreeMap<AssetId, Option<AccountId>> = BTreeMap::new();
    for (standard, row) in rows {
        let (Some(delta), Some(collection)) = (&row.delta, row.collection) else { continue };
        if row.status == FinalityStatus::Reverted || delta.qty.is_zero() {
            continue;
        }
        let need = Need { collection, block: row.block, event_time: row.event_time, status: row.status };
        match standard {
            Standard::Erc721 => {
                first_senders.entry(delta.asset).or_insert_with(|| {
                    if let Some(sender) = delta.from {
                        needs.insert((delta.asset, sender), need);
                    }
                    delta.from
                });
            }
            Standard::Erc1155 => {
                for account in delta.from.into_iter().chain(delta.to) {
                    needs.entry((delta.asset, account)).or_insert(need);
                }
            }
        }
    }
    // Single tokens: only one that was never seen before implies an opening.
    let candidates: Vec<AssetId> =
        first_senders.iter().filter(|(_, sender)| sender.is_some()).map(|(asset, _)| *asset).collect();
    let first_seen = if candidates.is_empty() {
        BTreeSet::new()
    } else {
        // An event of this batch may be here already, from a branch whose end we have not heard of yet.
        let batch: Vec<EventId> = rows.iter().map(|(_, row)| row.id).collect();
        let known: Vec<EventId> = ledger::live_among(tx, &batch).await?.into_iter().collect();
        ledger::first_seen(tx, &candidates, &known).await?
    };
    let mut learnt: BTreeMap<Pair, OpeningRow> = BTreeMap::new();
    for (asset, sender) in first_senders {
        let Some(sender) = sender else { continue };
        if first_seen.contains(&asset) {
            let row = OpeningRow { state: OpeningState::Known, qty: U256::from(1), parts: 1 };
            learnt.insert((asset, sender), row);
        } else {
            needs.remove(&(asset, sender));
        }
    }
    learnt.extend(answers.0.iter().map(|(pair, answer)| (*pair, learnt_opening(*answer))));
    ledger::record_openings(tx, network.id, &learnt, false).await?;
    let known = ledger::read_openings(tx, &needs.keys().copied().collect()).await?;
    let mut wanted = Vec::new();
    for (pair, opening) in &known {
        match opening.state {
            OpeningState::Known if opening.qty.is_zero() => {}
            OpeningState::Known => {
                let need = needs.get(pair).expect("only needed pairs were read");
                wanted.push(opening_event(network, *pair, 0, opening.qty, need));
            }
            // Implied ones were made final at once; nothing takes them away but a rewind, which keeps them.
            OpeningState::Implied | OpeningState::Unknown => {
                plan.partial.insert(pair.0);
            }
        }
    }
    let ids: Vec<EventId> = wanted.iter().map(|row| row.id).collect();
    let live = ledger::live_among(tx, &ids).await?;
    plan.rows = wanted.into_iter().filter(|row| !live.contains(&row.id)).collect();
    plan.partial.extend(plan.rows.iter().filter_map(|row| row.asset));
    Ok(plan)
}
