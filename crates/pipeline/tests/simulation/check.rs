//! The ledger against the truth.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::U256;
use rand::Rng as _;
use rand::rngs::StdRng;
use tidemark_model::ids::{AccountId, AssetId, Height, NetworkId};
use tidemark_model::quantity::SignedQty;
use tidemark_pipeline::workers::{Cause, advance_finality, rewind, verify_ledger};
use tidemark_store::ownership::{AsOf, holdings_at, owners_at};
use tidemark_store::projection::check as projections;
use tidemark_store::{Db, digest};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::chain::{Archive, Chain, State, digest_of};
use crate::ground::Ground;
use crate::lane::{Failed, Lane, replay, text};
use crate::run::Trace;

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: &T, expected: &T) -> Result<(), Failed> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}:\n  found    {found:?}\n  expected {expected:?}"))
}

/// The first differences of two maps or sets, by key.
fn same_rows<K: Ord + Clone + std::fmt::Debug, V: PartialEq + std::fmt::Debug>(
    what: &str,
    found: &BTreeMap<K, V>,
    expected: &BTreeMap<K, V>,
) -> Result<(), Failed> {
    let keys: BTreeSet<&K> = found.keys().chain(expected.keys()).collect();
    let differ: Vec<String> = keys
        .into_iter()
        .filter(|key| found.get(key) != expected.get(key))
        .take(5)
        .map(|key| format!("\n  {key:?}: found {:?}, expected {:?}", found.get(key), expected.get(key)))
        .collect();
    if differ.is_empty() { Ok(()) } else { Err(format!("{what}:{}", differ.concat())) }
}

/// Does the ledger know everybody who moved exactly, or only at least?
fn is_exact(chain: &Chain) -> bool {
    chain.network.start_block.0 == 0 || chain.archive == Archive::Answers
}

async fn state(db: &Db, sql: &str, network: NetworkId) -> Result<State, Failed> {
    let conn = db.conn().await.map_err(text)?;
    let rows = conn.query("read balances", sql, &[&network.0]).await.map_err(text)?;
    rows.iter()
        .map(|row| {
            let qty: &str = row.get(2);
            let qty = qty.parse().map_err(|_| format!("a balance of {qty}"))?;
            Ok(((AssetId(row.get(0)), AccountId(row.get(1))), qty))
        })
        .collect()
}

const FINALIZED: &str =
    "select asset_id, account_id, qty::text from ledger.ownership_current where network_id = $1";
const LATEST: &str = "
    select asset_id, account_id, sum(qty)::text
      from (select asset_id, account_id, qty from ledger.ownership_current where network_id = $1
            union all
            select asset_id, account_id, qty_delta from ledger.unfinalized_deltas where network_id = $1) x
     group by 1, 2 having sum(qty) <> 0";
const SHOWN: &str = "
    select asset_id, account_id, qty::text from projection.ownership_view where network_id = $1 and qty <> 0";
const SHOWN_FINAL: &str = "
    select asset_id, account_id, qty_finalized::text from projection.ownership_now
     where network_id = $1 and qty_finalized <> 0";

/// What the ledger knows of a state: everything, or the pairs that moved since it began.
fn known(chain: &Chain, mut state: State, moved: &BTreeSet<(AssetId, AccountId)>) -> State {
    if chain.network.start_block.0 > 0 {
        state.retain(|pair, _| moved.contains(pair));
    }
    state
}

/// Everything was delivered: what is shown is the chain's newest state.
pub(crate) async fn latest(ground: &Ground, lane: &Lane) -> Result<(), Failed> {
    let (chain, network) = (&lane.chain, lane.chain.network.id);
    if !is_exact(chain) {
        return Ok(());
    }
    let head = chain.sim.head();
    let truth = known(chain, chain.truth_at(head), &chain.moved_since_start(head));
    same_rows("the latest state", &state(&ground.db, LATEST, network).await?, &truth)?;
    same_rows("what is shown", &state(&ground.db, SHOWN, network).await?, &truth)?;
    let finalized = state(&ground.db, FINALIZED, network).await?;
    same_rows("what is shown as final", &state(&ground.db, SHOWN_FINAL, network).await?, &finalized)?;
    Ok(())
}

/// Everything is final: state, past, digest, invariants, read models, a clean replay, and a rewind.
pub(crate) async fn everything(
    ground: &Ground,
    lane: &Lane,
    random: &mut StdRng,
    trace: &mut Trace,
) -> Result<(), Failed> {
    let (chain, network) = (&lane.chain, lane.chain.network.id);
    let slug = &chain.network.slug;
    let head = chain.sim.head();
    let moved = chain.moved_since_start(head);
    let truth = known(chain, chain.truth_at(head), &moved);
    let owned = state(&ground.db, FINALIZED, network).await?;
    if is_exact(chain) {
        same_rows(&format!("{slug}: owners"), &owned, &truth)?;
        past(ground, chain, head, &moved, random).await.map_err(|error| format!("{slug}: {error}"))?;
    } else if let Some((pair, qty)) =
        owned.iter().find(|(pair, qty)| **qty > truth.get(pair).copied().unwrap_or_default())
    {
        return Err(format!("{slug}: a phantom of {qty} at {pair:?}"));
    }
    same_rows(&format!("{slug}: what is shown"), &state(&ground.db, SHOWN, network).await?, &owned)?;
    healthy(ground, network).await.map_err(|error| format!("{slug}: {error}"))?;
    let in_bulk = random.random_bool(0.5);
    replay(&ground.replay, lane, head, in_bulk).await?;
    trace.0.push(format!("{slug} replayed, in bulk: {in_bulk}"));
    equal_replay(ground, chain)
        .await
        .map_err(|error| format!("{slug}, replay in bulk {in_bulk}: {error}"))?;
    there_and_back(ground, chain, head, &moved, random).await.map_err(|error| format!("{slug}: {error}"))?;
    let conn = ground.db.conn().await.map_err(text)?;
    let digest = digest::total(&digest::read_with(&conn, network).await.map_err(text)?);
    trace.0.push(format!("{slug} ends with {}", digest.0));
    Ok(())
}

const HISTORY: &str = "
    select asset_id, account_id, block_number, sum(qty_delta)::text from ledger.ownership_history
     where network_id = $1 group by 1, 2, 3 order by 3";
const DIGESTS: &str = "select height, digest::text from ledger.digest_history where network_id = $1";

/// At every height: the owners by the history, and the digest where there is one.
async fn past(
    ground: &Ground,
    chain: &Chain,
    head: u64,
    moved: &BTreeSet<(AssetId, AccountId)>,
    random: &mut StdRng,
) -> Result<(), Failed> {
    let network = chain.network.id;
    let conn = ground.db.conn().await.map_err(text)?;
    let legs = conn.query("read history", HISTORY, &[&network.0]).await.map_err(text)?;
    let digests: BTreeMap<u64, String> = conn
        .query("read digests", DIGESTS, &[&network.0])
        .await
        .map_err(text)?
        .iter()
        .map(|row| (Height::from_i64(row.get(0)).0, row.get(1)))
        .collect();
    let mut legs = legs.iter().peekable();
    let mut running: BTreeMap<(AssetId, AccountId), SignedQty> = BTreeMap::new();
    let first = chain.network.start_block.0;
    let asked = random.random_range(first..=head);
    for height in first..=head {
        while let Some(row) = legs.next_if(|row| Height::from_i64(row.get::<_, i64>(2).max(0)).0 <= height) {
            let pair = (AssetId(row.get(0)), AccountId(row.get(1)));
            let qty: SignedQty = row.get::<_, &str>(3).parse().map_err(|_| "a leg is no number")?;
            let sum = running.entry(pair).or_default();
            *sum = sum.checked_add(qty).ok_or("a sum leaves its type")?;
        }
        let found: BTreeMap<_, _> =
            running.iter().filter(|(_, qty)| !qty.is_zero()).map(|(pair, qty)| (*pair, *qty)).collect();
        let truth = known(chain, chain.truth_at(height), moved);
        let expected = truth.iter().map(|(pair, qty)| (*pair, SignedQty::gain(*qty))).collect();
        same_rows(&format!("owners at {height}"), &found, &expected)?;
        if let Some(digest) = digests.get(&height)
            && first == 0
        {
            same(&format!("digest at {height}"), digest, &digest_of(&truth).to_string())?;
        }
        if height == asked {
            point_in_time(ground, chain, height, &truth).await?;
        }
    }
    if first > 0 {
        let kept = digest::total(&digest::read_with(&conn, network).await.map_err(text)?);
        same("digest", &kept.0, &digest_of(&known(chain, chain.truth_at(head), moved)))?;
    }
    Ok(())
}

/// The questions people ask of the past, for everything that was owned then.
async fn point_in_time(ground: &Ground, chain: &Chain, height: u64, truth: &State) -> Result<(), Failed> {
    let conn = ground.db.conn().await.map_err(text)?;
    let block = chain.raw_block(height).expect("canonical");
    let by_asset: BTreeSet<AssetId> = truth.keys().map(|pair| pair.0).take(3).collect();
    let by_account: BTreeSet<AccountId> = truth.keys().map(|pair| pair.1).take(3).collect();
    for at in [AsOf::Height(Height(height)), AsOf::Time(block.time)] {
        for asset in &by_asset {
            let found = owners_at(&conn, *asset, at).await.map_err(text)?;
            let expected: BTreeMap<AccountId, U256> =
                truth.iter().filter(|(pair, _)| pair.0 == *asset).map(|(pair, qty)| (pair.1, *qty)).collect();
            same_rows(&format!("owners of {asset} {at:?}"), &found, &expected)?;
        }
        for account in &by_account {
            let found = holdings_at(&conn, *account, at).await.map_err(text)?;
            let expected: BTreeMap<AssetId, U256> = truth
                .iter()
                .filter(|(pair, _)| pair.1 == *account)
                .map(|(pair, qty)| (pair.0, *qty))
                .collect();
            same_rows(&format!("holdings of {account} {at:?}"), &found, &expected)?;
        }
    }
    Ok(())
}

const QUARANTINED: &str = "select count(*) from ledger.quarantine where network_id = $1";
const ASSETS: &str = "select id from catalog.assets where network_id = $1 order by id";

/// No invariant is broken, nothing is in quarantine, the read models say what the ledger says.
async fn healthy(ground: &Ground, network: NetworkId) -> Result<(), Failed> {
    let mut conn = ground.db.conn().await.map_err(text)?;
    let tx = conn.snapshot_tx().await.map_err(text)?;
    let broken = verify_ledger(&tx, network).await.map_err(text)?;
    same("invariants", &broken, &Vec::new())?;
    let row = tx.query_one("count the quarantine", QUARANTINED, &[&network.0]).await.map_err(text)?;
    same("quarantined events", &row.get::<_, i64>(0), &0)?;
    let rows = tx.query("list assets", ASSETS, &[&network.0]).await.map_err(text)?;
    let assets: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    let mut wrong = projections::check_cards(&tx, &assets).await.map_err(text)?;
    wrong.extend(projections::check_ownership(&tx, &assets).await.map_err(text)?);
    wrong.extend(projections::check_stats(&tx, &assets, 1_000).await.map_err(text)?.1);
    wrong.truncate(3);
    same("read models", &wrong, &Vec::new())
}

/// What the run and a clean replay must agree on, row for row: a key and what stands under it.
const COMPARED: &[(&str, &str)] = &[
    ("owners", "select asset_id || ' ' || account_id, qty::text from ledger.ownership_current where network_id = $1"),
    (
        "assets",
        "select id::text, format('%s supply %s burned %s %s', standard_id, supply, is_burned, history)
           from catalog.assets a where network_id = $1
            and exists (select 1 from ledger.normalized_events e
                         where e.network_id = $1 and e.asset_id = a.id and not e.is_reverted)",
    ),
    (
        "history",
        "select format('%s %s', normalized_event_id, leg),
                format('%s %s %s %s %s %s', asset_id, account_id, block_number, event_index, qty_delta, event_time)
           from ledger.ownership_history where network_id = $1",
    ),
    (
        "events",
        "select e.id::text, format('%s %s %s %s %s %s %s %s', e.event_kind, e.asset_id, e.block_number,
                encode(e.block_hash, 'hex'), e.event_index, e.event_time, e.finality_status, d.qty_delta)
           from ledger.events_now e
           left join ledger.normalized_event_deltas d on d.normalized_event_id = e.id
          where e.network_id = $1 and not e.is_reverted",
    ),
    ("digests", "select bucket::text, digest::text from ledger.digests where network_id = $1 and digest <> 0"),
];

async fn equal_replay(ground: &Ground, chain: &Chain) -> Result<(), Failed> {
    let network = chain.network.id;
    for (what, sql) in COMPARED {
        // Openings that the chain could not tell are made where they are missed, and that depends on the steps.
        if !is_exact(chain) && ["history", "events"].contains(what) {
            continue;
        }
        let mut both = Vec::new();
        for db in [&ground.db, &ground.replay] {
            let conn = db.conn().await.map_err(text)?;
            let rows = conn.query("read to compare", sql, &[&network.0]).await.map_err(text)?;
            let rows: BTreeMap<String, String> = rows
                .iter()
                .map(|row| (row.get(0), row.get::<_, Option<String>>(1).unwrap_or_default()))
                .collect();
            both.push(rows);
        }
        same_rows(what, &both[0], &both[1])?;
    }
    Ok(())
}

/// The operator's rewind: back to some height, and forward again.
async fn there_and_back(
    ground: &Ground,
    chain: &Chain,
    head: u64,
    moved: &BTreeSet<(AssetId, AccountId)>,
    random: &mut StdRng,
) -> Result<(), Failed> {
    let network = &chain.network;
    let height = random.random_range(network.start_block.0..=head);
    let cause = Cause { id: "there and back".to_owned(), at: OffsetDateTime::UNIX_EPOCH };
    let mut conn = ground.db.conn().await.map_err(text)?;
    let tx = conn.tx().await.map_err(text)?;
    rewind(&tx, network, Height(height), &cause).await.map_err(text)?;
    tx.commit().await.map_err(text)?;
    let tx = conn.snapshot_tx().await.map_err(text)?;
    let broken = verify_ledger(&tx, network.id).await.map_err(text)?;
    tx.rollback().await.map_err(text)?;
    same(&format!("invariants after a rewind to {height}"), &broken, &Vec::new())?;
    if network.start_block.0 == 0 {
        let found = state(&ground.db, FINALIZED, network.id).await?;
        same_rows(&format!("owners after a rewind to {height}"), &found, &chain.truth_at(height))?;
    }
    let tx = conn.tx().await.map_err(text)?;
    advance_finality(&tx, network, Height(head), None, &cause).await.map_err(text)?;
    tx.commit().await.map_err(text)?;
    let tx = conn.snapshot_tx().await.map_err(text)?;
    let broken = verify_ledger(&tx, network.id).await.map_err(text)?;
    tx.rollback().await.map_err(text)?;
    same("invariants after going forward again", &broken, &Vec::new())?;
    if is_exact(chain) {
        let truth = known(chain, chain.truth_at(head), moved);
        let found = state(&ground.db, FINALIZED, network.id).await?;
        same_rows("owners after going forward again", &found, &truth)?;
    }
    Ok(())
}
