//! One batch of touched keys, one transaction. First the transfers (read, decide, write), then the rows of
//! ownership_view and asset_cards, then the aggregates by the differences these made. Owners of a large batch go into a
//! transaction beside it ([`Beside`]).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::json;
use tidemark_model::envelope::Draft;
use tidemark_model::ids::{AssetId, BlockHash, EventId, NetworkId, TxId};
use tidemark_model::subject::Subject;
use tidemark_store::outbox::Emitter;
use tidemark_store::projection::live::{
    self, AccountChange, CardChange, CardKey, OwnersMoved, OwnershipKeys, StandingKey, StatsChange,
    TransferDetail, TransferRow,
};
use tidemark_store::together::both;
use tidemark_store::{Conn, Db, Tx, projection};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use super::addresses::{Addresses, Known};
use super::{Touched, WorkError};

/// What a batch did.
#[derive(Debug, Default)]
pub struct Projected {
    /// To emit on stream `projection`, in this order: retractions newest first, then deliveries oldest
    /// first, then the finality line.
    pub drafts: Vec<Draft>,
    /// Rows written or removed.
    pub rows: u64,
}

/// Where owners of large batches are written: on a connection of their own, beside everything else (ADR 0029).
#[derive(Debug, Clone)]
pub struct Beside {
    /// Whose connections.
    pub db: Db,
    /// Batches of fewer rows of owners are not worth a second commit.
    pub pairs_min: usize,
}

impl Beside {
    /// As live does it.
    pub fn live(db: Db) -> Self {
        Self { db, pairs_min: 100 }
    }
}

/// What a batch is projected with, besides its transaction.
struct With<'a> {
    addresses: &'a Addresses,
    emitter: Option<&'a Emitter>,
    beside: Option<&'a Beside>,
}

/// Recomputes what `touched` names from the ledger, as it is now. Calling it again, with the same or an older
/// batch, writes nothing and drafts nothing (but for the finality line, whose id is the same).
pub async fn rebuild_keys(
    tx: &Tx<'_>,
    network: NetworkId,
    touched: &Touched,
    beside: Option<&Beside>,
) -> Result<Projected, WorkError> {
    let with = With { addresses: &Addresses::default(), emitter: None, beside };
    rebuild(tx, network, touched, with).await
}

/// The same, and appends what it drafts to the outbox.
pub async fn rebuild_and_emit(
    tx: &Tx<'_>,
    network: NetworkId,
    touched: &Touched,
    addresses: &Addresses,
    emitter: &Emitter,
    beside: &Beside,
) -> Result<Projected, WorkError> {
    rebuild(tx, network, touched, With { addresses, emitter: Some(emitter), beside: Some(beside) }).await
}

// Statements that do not need each other's answers are in flight together: the database goes from one to the next
// without waiting for us, and we write what others are told while it works.
async fn rebuild(
    tx: &Tx<'_>,
    network: NetworkId,
    touched: &Touched,
    With { addresses, emitter, beside }: With<'_>,
) -> Result<Projected, WorkError> {
    projection::lock_all_but_owners(tx, network).await?;
    tx.look_up_by_key().await?;

    if !touched.whole_assets.is_empty() {
        live::reopen_positions(tx, network).await?;
    }
    let events: Vec<Uuid> = touched.events.iter().map(|event| event.0).collect();
    let told_and_new = told_and_new(tx, network, touched).await?;
    let is_all_new = told_and_new.is_some();
    let (truth, standing) = match told_and_new {
        Some(told) => (told, Vec::new()),
        None if events.is_empty() => (Vec::new(), Vec::new()),
        None => {
            let truth = live::true_transfers(tx, network, &events).await?;
            let standing = live::standing_transfers(tx, network, &events, &truth).await?;
            (truth, standing)
        }
    };
    let decided = decide(&truth, &standing);
    let mut moves = Moves::of(&decided);
    moves.remember_sides(&truth);
    let mut done = Projected {
        rows: live::remove_transfers(tx, network, &decided.remove).await?,
        ..Projected::default()
    };

    let owners = OwnershipKeys {
        events: events.iter().copied().filter(|event| !moves.events.contains(event)).collect(),
        pairs: moves.pairs.clone(),
        open_assets: touched.assets.iter().map(|asset| asset.0).collect(),
        final_height: touched.finalized.map(|(height, _)| height),
        whole_assets: touched.whole_assets.iter().map(|asset| asset.0).collect(),
    };
    let cards = card_keys(&moves, touched);
    let is_exact = cards.iter().any(|key| key.exact);
    // Only where nothing is taken back, and where what is new leads to all rows: positions that this transaction
    // writes are not seen from another one.
    let beside = beside.filter(|beside| {
        is_all_new && !is_exact && owners.open_assets.is_empty() && owners.pairs.len() >= beside.pairs_min
    });
    let mut second = match beside {
        Some(beside) => beside.db.spare_conn().await,
        None => None,
    };

    let write = write_transfers(tx, network, &decided);
    let tell = async {
        let named: Vec<&TransferDetail> =
            decided.retracted.iter().chain(&decided.projected).map(|(one, _)| *one).collect();
        let known = addresses.of(tx, &named).await?;
        let drafts = told(network, &decided, &known);
        emit(tx, emitter, &drafts).await?;
        Ok::<_, WorkError>(drafts)
    };
    let rebuild_owners = async {
        projection::lock_owners(tx, network).await?;
        Ok(live::rebuild_owners(tx, network, &owners).await?)
    };
    let rebuild_cards = async { Ok(live::rebuild_cards(tx, network, &cards).await?) };
    let (drafts, written, cards, mut moved, ahead) = if let Some(second) = &mut second {
        let here = both(tell, both(write, rebuild_cards));
        let (here, beside) = tokio::join!(here, owners_ahead(second, network, &owners));
        let (drafts, (written, cards)) = here?;
        let (moved, ahead) = beside?;
        (drafts, written, cards, moved, Some(ahead))
    } else if is_exact {
        // Looks newest transfers up: those of the batch must be there, and its plan is its own.
        let (drafts, written) = (tell.await?, write.await?);
        let owners = rebuild_owners.await?;
        (drafts, written, rebuild_cards.await?, owners, None)
    } else {
        let (drafts, (written, (owners, cards))) =
            both(tell, both(write, both(rebuild_owners, rebuild_cards))).await?;
        (drafts, written, cards, owners, None)
    };
    done.rows += written + moved.rows + cards.iter().map(|change| change.written).sum::<u64>();
    done.drafts = drafts;

    moved.add(&live::take_noted(tx, network).await?);
    let accounts = account_changes(&moves, &moved.assets);
    let stats = stats_changes(cards, &moved.owners, &moves.by_collection);
    let move_accounts = live::move_accounts(tx, network, &accounts);
    let move_stats = live::move_stats(tx, network, &stats);
    let (moved_accounts, moved_stats) = if is_exact {
        (move_accounts.await?, move_stats.await?)
    } else {
        both(move_accounts, move_stats).await?
    };
    done.rows += moved_accounts + moved_stats;

    if let Some((height, hash)) = &touched.normalized {
        projection::move_watermark(tx, network, *height, hash.as_deref()).await?;
    }
    if let Some((height, at)) = touched.finalized {
        live::forget_positions(tx, network, height).await?;
        let line = Draft::derived(
            subject("finality", "advanced"),
            &format!("{network}:{height}"),
            network.to_string(),
            json!({ "network_id": network, "finalized_height": height }),
            at,
        );
        emit(tx, emitter, std::slice::from_ref(&line)).await?;
        done.drafts.push(line);
    }
    projection::move_finality_line(tx, network, touched.finalized.map(|(height, _)| height)).await?;
    tx.look_up_as_usual().await?;
    if let Some(Ahead { tx: beside, note }) = ahead {
        // Right before the caller's commit. Should that not come, the same batch comes again: it finds the owners as they
        // must be, and their note.
        beside.commit().await?;
        live::forget_note(tx, note).await?;
    }
    Ok(done)
}

/// Owners that are written, noted and not committed yet.
struct Ahead<'a> {
    tx: Tx<'a>,
    note: i64,
}

async fn owners_ahead<'a>(
    conn: &'a mut Conn,
    network: NetworkId,
    keys: &OwnershipKeys,
) -> Result<(OwnersMoved, Ahead<'a>), WorkError> {
    let tx = conn.tx().await?;
    // The commit behind it waits for the disk, and its place in the server's log is behind this one's.
    tx.batch("leave waiting to the next commit", "set local synchronous_commit = off").await?;
    tx.look_up_by_key().await?;
    projection::lock_owners(&tx, network).await?;
    let moved = live::rebuild_owners(&tx, network, keys).await?;
    let note = live::note_owners(&tx, network, &moved).await?;
    Ok((moved, Ahead { tx, note }))
}

async fn emit(tx: &Tx<'_>, emitter: Option<&Emitter>, drafts: &[Draft]) -> Result<(), WorkError> {
    match emitter {
        Some(emitter) => Ok(emitter.append(tx, drafts).await?),
        None => Ok(()),
    }
}

/// The transfers of a batch as its messages tell them, if that is all there is to know: each of them stands in the block
/// it was told of, none was projected before, and nothing else is named. Then the log need not be read for them.
async fn told_and_new(
    tx: &Tx<'_>,
    network: NetworkId,
    touched: &Touched,
) -> Result<Option<Vec<TransferDetail>>, WorkError> {
    if touched.told.is_empty() || touched.told.len() != touched.events.len() {
        return Ok(None);
    }
    let heights: BTreeSet<i64> = touched.told.values().map(|told| told.height).collect();
    let keys = live::standing_keys(tx, network, &heights.into_iter().collect::<Vec<_>>()).await?;
    Ok(all_new(touched, &keys))
}

fn all_new(touched: &Touched, keys: &HashMap<EventId, StandingKey>) -> Option<Vec<TransferDetail>> {
    let mut all = Vec::with_capacity(touched.told.len());
    for (event, told) in &touched.told {
        let key = keys.get(event)?;
        if key.has_position || key.block_hash != told.block_hash.0 {
            return None;
        }
        all.extend(told.transfer.as_ref().map(|transfer| TransferDetail {
            row: transfer.row.clone(),
            finality_status: if key.is_confirmed { "confirmed" } else { "pending" }.to_owned(),
            token_id: transfer.token_id.clone(),
            turn: 0,
            has_position: false,
        }));
    }
    all.sort_by_key(|one| (one.row.place(), one.row.event_id));
    Some(all)
}

/// Which cards to recompute.
fn card_keys(moves: &Moves, touched: &Touched) -> Vec<CardKey> {
    let mut assets: BTreeSet<Uuid> = moves.assets.clone();
    let named = touched.event_assets.iter().chain(&touched.assets).chain(&touched.whole_assets);
    assets.extend(named.map(|asset| asset.0));
    let key = |asset: Uuid| CardKey {
        asset,
        seen: moves.seen.get(&asset).copied(),
        exact: moves.exact_assets.contains(&asset) || touched.whole_assets.contains(&AssetId(asset)),
    };
    assets.into_iter().map(key).collect()
}

/// What the statistics of each collection move by: every difference that was written must be counted, also
/// one in a collection without a card in this batch. The statements of a batch see the ledger at different
/// moments, and an event of the batch may have become another one's meanwhile (a reorg gave its place to
/// another log): its balances move now, its cards come with the events that say so.
fn stats_changes(
    cards: Vec<CardChange>,
    owners: &BTreeMap<Uuid, i64>,
    transfers: &BTreeMap<Uuid, i64>,
) -> Vec<StatsChange> {
    let mut cards: BTreeMap<Uuid, CardChange> =
        cards.into_iter().map(|cards| (cards.collection_id, cards)).collect();
    for collection in owners.keys().chain(transfers.keys()) {
        cards.entry(*collection).or_insert_with(|| CardChange {
            collection_id: *collection,
            written: 0,
            assets: 0,
            supply: "0".to_owned(),
            stubs: 0,
            height: 0,
            lowered: false,
        });
    }
    let of = |counts: &BTreeMap<Uuid, i64>, collection: &Uuid| counts.get(collection).copied().unwrap_or(0);
    cards
        .into_values()
        .map(|cards| StatsChange {
            owners: of(owners, &cards.collection_id),
            transfers: of(transfers, &cards.collection_id),
            cards,
        })
        .collect()
}

async fn write_transfers(tx: &Tx<'_>, network: NetworkId, decided: &Decided<'_>) -> Result<u64, WorkError> {
    let delivered = i64::try_from(decided.projected.len()).expect("a batch is small");
    let all_new = decided.all_new;
    let (written, _) = both(
        live::put_transfers(tx, network, &decided.put, all_new),
        both(
            live::put_positions(tx, network, &decided.positions, all_new),
            projection::count_activity(tx, network, delivered),
        ),
    )
    .await?;
    Ok(written)
}

/// What the live stream is told: retractions newest first, then deliveries oldest first.
fn told(network: NetworkId, decided: &Decided<'_>, known: &Known) -> Vec<Draft> {
    let retracted: Vec<Told<'_>> =
        decided.retracted.iter().rev().map(|&(one, turn)| Told { one, turn, status: "reverted" }).collect();
    let projected: Vec<Told<'_>> = decided
        .projected
        .iter()
        .map(|&(one, turn)| Told { one, turn, status: &one.finality_status })
        .collect();
    let mut told = drafts(network, &subject("transfer", "retracted"), &retracted, known);
    told.extend(drafts(network, &subject("transfer", "projected"), &projected, known));
    told
}

/// What becomes of the rows of some events.
#[derive(Debug, Default)]
struct Decided<'a> {
    remove: Vec<&'a TransferRow>,
    put: Vec<&'a TransferRow>,
    /// Deliveries to take back, and their turn.
    retracted: Vec<(&'a TransferDetail, i64)>,
    /// Deliveries to make, and their turn.
    projected: Vec<(&'a TransferDetail, i64)>,
    positions: Vec<(&'a TransferRow, i64)>,
    /// Rows that stood somewhere else or said something else.
    replaced: Vec<&'a TransferRow>,
    /// Sure that none of the events was projected before.
    all_new: bool,
}

/// Compares what the ledger says with what stands. Touches nothing.
fn decide<'a>(truth: &'a [TransferDetail], standing: &'a [TransferDetail]) -> Decided<'a> {
    let mut decided = Decided {
        all_new: standing.is_empty() && truth.iter().all(TransferDetail::is_new),
        ..Decided::default()
    };
    let mut old: BTreeMap<EventId, Vec<&TransferDetail>> = BTreeMap::new();
    for one in standing {
        old.entry(one.row.event_id).or_default().push(one);
    }
    for new in truth {
        let mut turn = new.turn;
        let mut is_same = false;
        let standing = old.remove(&new.row.event_id).unwrap_or_default();
        let was_open = new.turn > 0 || !standing.is_empty();
        for before in standing {
            if before.row == new.row {
                is_same = true;
                continue;
            }
            if before.row.place() != new.row.place() {
                decided.remove.push(&before.row);
            }
            decided.replaced.push(&before.row);
            if !before.row.is_reverted {
                decided.retracted.push((before, turn));
                turn += 1;
            }
        }
        if !is_same {
            decided.put.push(&new.row);
            if !new.row.is_reverted {
                decided.projected.push((new, turn));
                turn += 1;
            }
        }
        // A final event cannot move: its position is only kept up where there is one.
        if new.finality_status != "finalized" || (was_open && !is_same) {
            decided.positions.push((&new.row, turn));
        }
    }
    // The ledger no longer has these (a rewind below its start, say).
    for before in old.into_values().flatten() {
        decided.remove.push(&before.row);
        decided.replaced.push(&before.row);
        if !before.row.is_reverted {
            decided.retracted.push((before, before.turn));
        }
    }
    decided
}

/// What the transfers of a batch mean for everything else.
#[derive(Debug, Default)]
struct Moves {
    /// Canonical transfers, more or fewer.
    by_collection: BTreeMap<Uuid, i64>,
    by_account: BTreeMap<Uuid, AccountMoves>,
    assets: BTreeSet<Uuid>,
    /// Newest height of transfers that are new where they are, by asset.
    seen: BTreeMap<Uuid, i64>,
    /// Their newest transfer may be older than it was.
    exact_assets: BTreeSet<Uuid>,
    /// Asset and account of every side, of transfers as they are now and of rows that were replaced, with the
    /// asset's collection.
    pairs: BTreeMap<(Uuid, Uuid), Uuid>,
    /// Events whose sides are all in there.
    events: BTreeSet<Uuid>,
}

#[derive(Debug, Default)]
struct AccountMoves {
    transfers: i64,
    seen_at: Option<OffsetDateTime>,
    exact: bool,
}

impl Moves {
    fn of(decided: &Decided<'_>) -> Self {
        let mut moves = Self::default();
        for row in &decided.replaced {
            moves.assets.insert(row.asset_id.0);
            moves.exact_assets.insert(row.asset_id.0);
            for account in sides(row) {
                moves.pairs.insert((row.asset_id.0, account), row.collection_id.0);
                moves.by_account.entry(account).or_default().exact = true;
            }
            if !row.is_reverted {
                moves.count(row, -1);
            }
        }
        for row in &decided.put {
            moves.assets.insert(row.asset_id.0);
            if row.is_reverted {
                continue;
            }
            let seen = moves.seen.entry(row.asset_id.0).or_insert(row.height);
            *seen = row.height.max(*seen);
            moves.count(row, 1);
            for account in sides(row) {
                let one = moves.by_account.entry(account).or_default();
                one.seen_at = one.seen_at.max(Some(row.event_time));
            }
        }
        moves
    }
    fn remember_sides(&mut self, truth: &[TransferDetail]) {
        for TransferDetail { row, .. } in truth {
            self.events.insert(row.event_id.0);
            for account in sides(row) {
                self.pairs.insert((row.asset_id.0, account), row.collection_id.0);
            }
        }
    }
    fn count(&mut self, row: &TransferRow, by: i64) {
        *self.by_collection.entry(row.collection_id.0).or_default() += by;
        for account in sides(row) {
            self.by_account.entry(account).or_default().transfers += by;
        }
    }
}

/// The accounts on both sides, each once.
fn sides(row: &TransferRow) -> BTreeSet<Uuid> {
    row.from_account.iter().chain(&row.to_account).map(|account| account.0).collect()
}

fn account_changes(moves: &Moves, assets: &BTreeMap<Uuid, i64>) -> Vec<AccountChange> {
    let accounts: BTreeSet<Uuid> = assets.keys().chain(moves.by_account.keys()).copied().collect();
    let change = |account_id| {
        let one = moves.by_account.get(&account_id);
        AccountChange {
            account_id,
            assets: assets.get(&account_id).copied().unwrap_or(0),
            transfers: one.map_or(0, |one| one.transfers),
            seen_at: one.and_then(|one| one.seen_at),
            exact: one.is_some_and(|one| one.exact),
        }
    };
    accounts.into_iter().map(change).collect()
}

fn subject(aggregate: &str, event: &str) -> Subject {
    Subject::new("projection", aggregate, event, 1).expect("the projections' subjects follow the grammar")
}

/// Transfers in one event of the live stream.
const TRANSFERS_PER_EVENT: usize = 50;

/// A transfer as the live stream tells it.
struct Told<'a> {
    one: &'a TransferDetail,
    /// Tells a second inclusion in the same block (there and back again) from the first.
    turn: i64,
    status: &'a str,
}

/// Deliveries of the live stream, those of one height together. The same facts give the same id: a transfer is
/// told once per turn, so the first of an event names it.
fn drafts(network: NetworkId, subject: &Subject, told: &[Told<'_>], known: &Known) -> Vec<Draft> {
    told.chunk_by(|one, next| one.one.row.height == next.one.row.height)
        .flat_map(|height| height.chunks(TRANSFERS_PER_EVENT))
        .map(|told| {
            let first = &told[0];
            let row = &first.one.row;
            let cause = format!("{}:{}:{}", row.event_id, block_hash(row), first.turn);
            let payload = json!({
                "network_id": network,
                "height": row.height,
                "transfers": told.iter().map(|told| transfer(network, told, known)).collect::<Vec<_>>(),
            });
            Draft::derived(subject.clone(), &cause, network.to_string(), payload, row.event_time)
        })
        .collect()
}

fn block_hash(row: &TransferRow) -> String {
    BlockHash::from_slice(&row.block_hash).map(|hash| hash.to_string()).unwrap_or_default()
}

fn transfer(network: NetworkId, told: &Told<'_>, known: &Known) -> serde_json::Value {
    let address = |id: Uuid| known.get(&id).map(|address| &**address);
    let (one, row) = (told.one, &told.one.row);
    json!({
        "event_id": row.event_id,
        "network_id": network,
        "kind": row.kind,
        "asset_id": row.asset_id,
        "collection_id": row.collection_id,
        "contract": address(row.collection_id.0),
        "token_id": one.token_id,
        "from": row.from_account.and_then(|account| address(account.0)),
        "to": row.to_account.and_then(|account| address(account.0)),
        "qty": row.qty,
        "height": row.height,
        "block_hash": block_hash(row),
        "tx_hash": TxId::from_slice(&row.tx_hash).map(|hash| hash.to_string()).unwrap_or_default(),
        "event_index": row.event_index,
        "sub_index": row.sub_index.to_string(),
        "event_time": row.event_time.format(&Rfc3339).expect("block times are within RFC 3339's years"),
        "finality_status": told.status,
    })
}

#[cfg(test)]
mod tests {
    use tidemark_model::ids::{AccountId, CollectionId};

    use super::super::touched::{ToldEvent, ToldTransfer};
    use super::*;

    #[test]
    fn no_difference_is_lost_for_want_of_a_card() {
        let card = CardChange {
            collection_id: Uuid::from_u128(1),
            written: 2,
            assets: 1,
            supply: "3".to_owned(),
            stubs: 1,
            height: 9,
            lowered: false,
        };
        let owners = BTreeMap::from([(Uuid::from_u128(1), 1), (Uuid::from_u128(2), -1)]);
        let transfers = BTreeMap::from([(Uuid::from_u128(3), 4)]);
        let stats = stats_changes(vec![card.clone()], &owners, &transfers);
        let moved: Vec<_> =
            stats.iter().map(|one| (one.cards.collection_id.as_u128(), one.owners, one.transfers)).collect();
        assert_eq!(moved, [(1, 1, 0), (2, -1, 0), (3, 0, 4)]);
        assert_eq!(stats[0].cards, card);
        assert_eq!((stats[1].cards.assets, stats[1].cards.supply.as_str()), (0, "0"));
    }

    fn at(height: i64, block: u8, is_reverted: bool, turn: i64) -> TransferDetail {
        TransferDetail {
            row: TransferRow {
                event_id: EventId(Uuid::from_u128(1)),
                height,
                event_index: 0,
                sub_index: 0,
                kind: "transfer".into(),
                asset_id: AssetId(Uuid::from_u128(2)),
                collection_id: CollectionId(Uuid::from_u128(3)),
                from_account: Some(AccountId(Uuid::from_u128(4))),
                to_account: Some(AccountId(Uuid::from_u128(5))),
                qty: "1".into(),
                tx_hash: vec![9; 32],
                block_hash: vec![block; 32],
                event_time: OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(height),
                is_reverted,
            },
            finality_status: if is_reverted { "reverted" } else { "pending" }.into(),
            token_id: "7".into(),
            turn,
            has_position: turn > 0,
        }
    }

    /// Deliveries taken back and made (with their turns), rows removed and put, and the sum of transfers.
    #[track_caller]
    fn check(
        truth: Option<TransferDetail>,
        standing: Option<TransferDetail>,
        (retracted, projected): (&[i64], &[i64]),
        (removed, put): (usize, usize),
        transfers: i64,
    ) {
        let (truth, standing): (Vec<_>, Vec<_>) =
            (truth.into_iter().collect(), standing.into_iter().collect());
        let decided = decide(&truth, &standing);
        let turns = |of: &[(&TransferDetail, i64)]| of.iter().map(|(_, turn)| *turn).collect::<Vec<_>>();
        assert_eq!(turns(&decided.retracted), retracted);
        assert_eq!(turns(&decided.projected), projected);
        assert_eq!((decided.remove.len(), decided.put.len()), (removed, put));
        let moves = Moves::of(&decided);
        assert_eq!(moves.by_collection.values().sum::<i64>(), transfers);
        assert!(moves.by_account.values().all(|one| one.transfers == transfers));
    }

    #[test]
    fn a_new_event_is_delivered() {
        check(Some(at(5, 1, false, 0)), None, (&[], &[0]), (0, 1), 1);
    }
    #[test]
    fn the_same_row_is_left_alone() {
        check(Some(at(5, 1, false, 1)), Some(at(5, 1, false, 1)), (&[], &[]), (0, 0), 0);
    }
    #[test]
    fn a_reverted_event_is_taken_back_and_its_row_stays() {
        check(Some(at(5, 1, true, 1)), Some(at(5, 1, false, 1)), (&[1], &[]), (0, 1), -1);
    }
    #[test]
    fn an_event_that_was_never_canonical_is_shown_but_not_delivered() {
        check(Some(at(5, 1, true, 0)), None, (&[], &[]), (0, 1), 0);
    }
    #[test]
    fn an_event_in_another_block_of_the_same_height_is_taken_back_and_delivered() {
        check(Some(at(5, 2, false, 1)), Some(at(5, 1, false, 1)), (&[1], &[2]), (0, 1), 0);
    }
    #[test]
    fn an_event_at_another_height_moves() {
        check(Some(at(7, 2, false, 2)), Some(at(5, 1, true, 2)), (&[], &[2]), (1, 1), 1);
        check(Some(at(4, 2, false, 1)), Some(at(5, 1, false, 1)), (&[1], &[2]), (1, 1), 0);
    }
    #[test]
    fn an_event_the_ledger_forgot_goes() {
        check(None, Some(at(5, 1, false, 1)), (&[1], &[]), (1, 0), -1);
    }

    #[test]
    fn messages_are_believed_only_where_every_event_is_new_and_stands_in_its_block() {
        let one = at(5, 1, false, 0);
        let mut touched = Touched::default();
        let transfer = ToldTransfer { row: one.row.clone(), token_id: "7".into() };
        let told = |transfer| ToldEvent { height: 5, block_hash: BlockHash([1; 32]), transfer };
        touched.told.insert(one.row.event_id, told(Some(transfer)));
        let key = |block: u8, has_position| {
            let key = StandingKey { block_hash: vec![block; 32], is_confirmed: false, has_position };
            HashMap::from([(one.row.event_id, key)])
        };
        assert_eq!(all_new(&touched, &key(1, false)), Some(vec![one.clone()]));
        assert_eq!(all_new(&touched, &key(2, false)), None, "it stands elsewhere by now");
        assert_eq!(all_new(&touched, &key(1, true)), None, "it was projected before");
        assert_eq!(all_new(&touched, &HashMap::new()), None, "it is gone, or final");
        touched.told.insert(one.row.event_id, told(None));
        assert_eq!(all_new(&touched, &key(1, false)), Some(vec![]), "it moves nothing");
        assert_eq!(all_new(&touched, &key(1, true)), None, "it moved something when it was projected");
    }

    #[test]
    fn what_is_taken_back_asks_for_an_exact_look() {
        let (truth, standing) = ([at(5, 1, true, 1)], [at(5, 1, false, 1)]);
        let moves = Moves::of(&decide(&truth, &standing));
        assert_eq!(moves.exact_assets.len(), 1);
        assert!(moves.by_account.values().all(|one| one.exact));
        let truth = [at(5, 1, false, 0)];
        let moves = Moves::of(&decide(&truth, &[]));
        assert!(moves.exact_assets.is_empty() && moves.by_account.values().all(|one| !one.exact));
    }

    #[test]
    fn the_same_fact_has_the_same_id_and_another_turn_another() {
        let one = at(5, 1, false, 0);
        let id = |turn| {
            let told = [Told { one: &one, turn, status: "pending" }];
            drafts(NetworkId(1), &subject("transfer", "projected"), &told, &Known::new())[0].event_id
        };
        assert_eq!(id(0), id(0));
        assert_ne!(id(0), id(1));
    }

    #[test]
    fn transfers_of_a_height_are_told_together_in_their_order() {
        let mut all: Vec<TransferDetail> = Vec::new();
        for (height, index) in (0..120).map(|index| (5, index)).chain([(6, 0)]) {
            let mut one = at(height, 1, false, 0);
            one.row.event_index = index;
            one.row.event_id = EventId(Uuid::from_u128(u128::from(index.unsigned_abs()) * 100 + 5));
            all.push(one);
        }
        let told: Vec<Told<'_>> = all.iter().map(|one| Told { one, turn: 0, status: "pending" }).collect();
        let drafts = drafts(NetworkId(1), &subject("transfer", "projected"), &told, &Known::new());
        let transfers = |draft: &Draft| draft.payload["transfers"].as_array().expect("a list").clone();
        assert_eq!(drafts.iter().map(|draft| transfers(draft).len()).collect::<Vec<_>>(), [50, 50, 20, 1]);
        let indexes: Vec<i64> = drafts
            .iter()
            .flat_map(transfers)
            .filter_map(|transfer| transfer["event_index"].as_i64())
            .collect();
        assert_eq!(indexes, (0..120).chain([0]).collect::<Vec<_>>());
        assert!(drafts.iter().all(|draft| draft.payload["height"] == transfers(draft)[0]["height"]));
    }
}
