//! The read models of a network whose history is long: nothing is kept of them while the ledger is filled
//! (`ledger.network_progress.read_models_due`). When that is done, those of a first history are all built from the
//! ledger, and those of a backlog on top of what was shown before (`read_models_height`) are caught up: what its
//! transfers touched is compared with the ledger and merged, once for all of it, in the order of the keys.
//! transfers and block_cards are not among them: history appends those as it goes.
//!
//! Read models that were built stand at the ledger's head and are shown by catching up, which is quick if nothing came
//! since: between the two their indexes are made, so that readers and live find them there.
//!
//! Built twice is built once: each table forgets what it has of the network first. Caught up twice is caught up once:
//! holdings and cards are made what the ledger says, and what that changes in accounts and in the statistics of
//! collections is noted (`projection.accounts_to_come`, `projection.stats_to_come`) until the transaction that adds up
//! everything else takes it.

use tidemark_model::OffsetDateTime;
use tidemark_model::ids::NetworkId;

use super::truth::{account_truth, card_truth, holder_truth, stats_truth};
use crate::bulk;
use crate::db::{Conn, Param, StoreError, Tx};

const PUT_OFF: &str = "
    update ledger.network_progress
       set read_models_due = true, read_models_height = case when head_height > $3 then head_height end
     where network_id = $1 and head_height = $2 and finalized_height = $2 and not read_models_due";

/// From now on segments of history leave the read models of this network alone. The caller saw its ledger at `head`
/// with nothing open and nothing on its way to the projector; does nothing, and says so, if it moved since, or if they
/// are put off already. `before_start`: the head of a ledger that has nothing yet.
pub async fn put_off(
    conn: &mut Conn,
    network: NetworkId,
    head: i64,
    before_start: i64,
) -> Result<bool, StoreError> {
    let tx = conn.tx().await?;
    bulk::lock_progress(&tx, network).await?;
    super::lock_network(&tx, network).await?;
    let params: [Param<'_>; 3] = [&network.0, &head, &before_start];
    let is_put_off = tx.execute("put the read models off", PUT_OFF, &params).await? > 0;
    tx.commit().await?;
    Ok(is_put_off)
}

const BEHIND: &str = "
    select network_id from ledger.network_progress where read_models_height is not null order by 1 limit 1";

/// Refuses to touch read models as a whole while those of a network wait to be caught up, or its owners are ahead of
/// everything else: what is added to them then counts from where they stand. The caller holds the lock of all projections
/// ([`super::lock_all`]).
pub(super) async fn refuse_while_behind(tx: &Tx<'_>) -> Result<(), StoreError> {
    if let Some(row) = tx.query_opt("look for read models that are behind", BEHIND, &[]).await? {
        return Err(StoreError::NotNow {
            what: format!(
                "network {} catches up with its chain, and its read models come after",
                row.get::<_, i32>(0)
            ),
            hint: "try again when `tidemark status` shows it at its head",
        });
    }
    match super::live::owners_ahead(tx).await? {
        Some(network) => Err(StoreError::NotNow {
            what: format!(
                "the last block of network {network} was interrupted half-way into the read models"
            ),
            hint: "start `tidemark run` with the role projector, which ends it, and try again",
        }),
        None => Ok(()),
    }
}

// Statistics may be missing for tables that were empty a minute ago: whatever the planner thinks, these are joins
// of whole tables. The memory is for the sorts into the order of the keys.
const PREPARE: &str = "
    set local statement_timeout = 0; set local idle_in_transaction_session_timeout = 0;
    set local plan_cache_mode = force_custom_plan; set local enable_nestloop = off; set local work_mem = '64MB'";

const FORGET_HOLDINGS: &str = "delete from projection.ownership_view where network_id = $1";
const BUILD_HOLDINGS: &str = "
    insert into projection.ownership_view
        (asset_id, account_id, network_id, collection_id, qty, qty_finalized, finality_status, updated_at)
    select c.asset_id, c.account_id, c.network_id, a.collection_id, c.qty, c.qty, 'finalized', c.updated_at
      from ledger.ownership_current c join catalog.assets a on a.id = c.asset_id
     where c.network_id = $1 and c.qty <> 0
     order by c.asset_id, c.account_id";
const FORGET_HOLDERS: &str = "
    delete from projection.collection_holders
     where collection_id in (select id from catalog.collections where network_id = $1)";
const BUILD_HOLDERS: &str = concat!(
    "insert into projection.collection_holders (collection_id, account_id, asset_count, qty)
     select collection_id, account_id, asset_count, qty from (",
    holder_truth!("o.network_id = $1"),
    ") t order by collection_id, account_id"
);
const FORGET_CARDS: &str = "delete from projection.asset_cards where network_id = $1";
const BUILD_CARDS: &str = concat!(
    "insert into projection.asset_cards (asset_id, network_id, collection_id, token_id, standard, is_stub, is_burned,
         supply, history, finality_status, open_height, last_height, updated_at)
     select t.asset_id, t.network_id, t.collection_id, t.token_id, t.standard, t.is_stub, t.is_burned, t.supply,
            t.history, t.finality_status, t.open_height, coalesce(h.height, 0), now()
       from (",
    card_truth!(
        from: "catalog.assets a",
        open: "(select null::numeric as net, null::bigint as open_height)",
        made_or_burned: "false",
        more: ""
    ),
    "         where a.network_id = $1) t
       left join (select asset_id, max(height) as height from projection.transfers
                   where network_id = $1 and not is_reverted group by asset_id) h on h.asset_id = t.asset_id
      order by t.asset_id"
);
const FORGET_ACCOUNTS: &str = "delete from projection.account_summaries where network_id = $1";
const BUILD_ACCOUNTS: &str = concat!(
    "insert into projection.account_summaries (account_id, network_id, address, asset_count, transfer_count,
         first_seen_at, last_seen_at, updated_at)
     select account_id, network_id, address, asset_count, transfer_count, first_seen_at, last_seen_at, now() from (",
    account_truth!("ledger.ownership_current", "network_id = $1", "network_id = $1", "network_id = $1"),
    ") t order by account_id"
);
const FORGET_STATS: &str = "delete from projection.collection_stats where network_id = $1";
const BUILD_STATS: &str = concat!(
    "insert into projection.collection_stats (collection_id, network_id, address, standard, slug, name, verified, is_stub,
         reliability, unreliable_reason, owners_count, asset_count, total_supply, stub_count, transfer_count,
         last_height, updated_at)
     select t.*, now() from (",
    stats_truth!(
        "collection_id in (select n.id from catalog.collections n where n.network_id = $1)",
        "network_id = $1"
    ),
    ") t order by collection_id"
);
const STAND: &str = "
    update ledger.network_progress set read_models_height = head_height where network_id = $1";
const SHOWN: &str = "
    with checkpoint as (
        insert into app.indexing_checkpoints (worker_name, network_id, height)
        select 'projector', network_id, head_height from ledger.network_progress where network_id = $1
        on conflict (worker_name, network_id) do update set height = excluded.height, updated_at = now())
    update ledger.network_progress set read_models_due = false, read_models_height = null
     where network_id = $1 returning head_height";

/// Builds the read models of a first history that were put off: they stand at the ledger's head then, and wait to be
/// shown by [`catch_up`]. The caller's transaction holds the locks of the network's ledger and projections, and nothing
/// of the network is open. With a second connection the two halves that need nothing of each other are built side by
/// side; what it commits counts with the caller's commit, and is forgotten by the next try if that does not come.
pub async fn build(tx: &Tx<'_>, network: NetworkId, second: Option<&mut Conn>) -> Result<(), StoreError> {
    tx.batch("prepare to build read models", PREPARE).await?;
    match second {
        Some(second) => {
            let beside = async {
                let beside = second.tx().await?;
                beside.batch("prepare to build read models", PREPARE).await?;
                build_assets_and_accounts(&beside, network).await?;
                beside.commit().await
            };
            let (owners, others) = tokio::join!(build_owners(tx, network), beside);
            owners?;
            others?;
        }
        None => {
            build_owners(tx, network).await?;
            build_assets_and_accounts(tx, network).await?;
        }
    }
    tx.execute("forget collection statistics", FORGET_STATS, &[&network.0]).await?;
    tx.execute("build collection statistics", BUILD_STATS, &[&network.0]).await?;
    tx.execute("note where read models stand", STAND, &[&network.0]).await?;
    Ok(())
}

/// Transfers of network $1 that the read models have not seen: above $2.
macro_rules! unseen {
    () => {
        "projection.transfers t where t.network_id = $1 and t.height > $2 and not t.is_reverted"
    };
}
/// Those of one half of all collections: $3.
macro_rules! unseen_half {
    () => {
        concat!(unseen!(), " and get_byte(uuid_send(t.collection_id), 15) % 2 = any($3)")
    };
}

/// Collections by the last bit of their ids, which are hashes. No holding, holder or card is in both halves: two
/// connections can catch up one each.
type Halves = &'static [i32];
const EVEN: Halves = &[0];
const ODD: Halves = &[1];
const BOTH: Halves = &[0, 1];

const CREATE_UNSEEN: &str = "
    create temp table if not exists seg_pairs (
        asset_id uuid not null, account_id uuid not null, collection_id uuid not null) on commit delete rows";
const UNSEEN_PAIRS: &str = concat!(
    "insert into seg_pairs (asset_id, account_id, collection_id)
     select distinct t.asset_id, s.account_id, t.collection_id
       from (select * from ",
    unseen_half!(),
    ") t cross join lateral (values (t.from_account), (t.to_account)) s (account_id)
      where s.account_id is not null
      order by 1, 2"
);
const COUNT_UNSEEN: &str = "analyze seg_pairs";
// A row of nothing that is still there goes, like one that became empty.
const COMPARE_PAIRS: &str = "
    insert into seg_merge (asset_id, account_id, collection_id, net, low, old, at)
    select p.asset_id, p.account_id, p.collection_id, coalesce(c.qty, 0) - coalesce(v.qty, 0), 0, v.qty, v.ctid
      from seg_pairs p
      left join ledger.ownership_current c on c.asset_id = p.asset_id and c.account_id = p.account_id
      left join projection.ownership_view v on v.asset_id = p.asset_id and v.account_id = p.account_id
     where coalesce(c.qty, 0) <> coalesce(v.qty, 0) or v.qty = 0
     order by p.asset_id, p.account_id";
// Looking a pair up in both tables costs what going through three rows of each does (ADR 0032). The planner takes it for
// more and reads all of them. A table that nobody counted is compared as the planner sees fit.
const ARE_FEW: &str = "
    select v.reltuples > 3 * p.reltuples from pg_class v, pg_class p
     where v.oid = 'projection.ownership_view'::regclass and p.oid = 'pg_temp.seg_pairs'::regclass";
const COUNT_COMPARED: &str = "analyze seg_merge";
const REMOVE_HOLDINGS: &str = "
    delete from projection.ownership_view v using seg_merge m where v.ctid = m.at and m.old + m.net = 0";
const UPDATE_HOLDINGS: &str = "
    update projection.ownership_view v
       set qty = m.old + m.net, qty_finalized = m.old + m.net, finality_status = 'finalized', open_height = null,
           updated_at = $1
      from seg_merge m where v.ctid = m.at and m.old + m.net <> 0";
const INSERT_HOLDINGS: &str = "
    insert into projection.ownership_view
        (asset_id, account_id, network_id, collection_id, qty, qty_finalized, finality_status, updated_at)
    select asset_id, account_id, $1, collection_id, net, net, 'finalized', $2 from seg_merge
     where at is null order by asset_id, account_id";
// Nothing of the network is open: what the catalog says of an asset is what its card must say.
const COMPARE_ASSETS: &str = concat!(
    "insert into seg_assets_merge (asset_id, collection_id, token_id, standard, supply, first_seen, first_height,
         last_height, partial, old_supply, is_burned, high, at)
     select a.id, a.collection_id, a.token_id_raw, a.standard_id, a.supply - coalesce(o.supply, 0), a.created_at,
            a.first_seen_block, x.height, a.history = 'partial', o.supply,
            a.supply = 0 and a.is_burned and not (a.is_fungible_class and a.history = 'partial'), 0, o.ctid
       from (select t.asset_id, max(t.height) as height from ",
    unseen_half!(),
    "         group by t.asset_id) x
       join catalog.assets a on a.id = x.asset_id
       left join projection.asset_cards o on o.asset_id = x.asset_id
      order by a.id"
);
const UPDATE_CARDS: &str = "
    update projection.asset_cards c
       set supply = c.supply + s.supply, is_burned = s.is_burned,
           last_height = greatest(c.last_height, s.last_height), updated_at = $1
      from seg_assets_merge s where c.ctid = s.at";
const INSERT_CARDS: &str = "
    insert into projection.asset_cards (asset_id, network_id, collection_id, token_id, standard, is_stub, is_burned,
        supply, history, finality_status, last_height, updated_at)
    select s.asset_id, $1, s.collection_id, s.token_id, s.standard, true, s.is_burned, s.supply,
           case when s.partial then 'partial' else 'complete' end, 'finalized', s.last_height, $2
      from seg_assets_merge s where s.at is null order by s.asset_id";
// Notes are added and never changed, so that two who note at the same time do not wait for each other.
const NOTE_CARDS: &str = "
    insert into projection.stats_to_come (network_id, collection_id, assets, supply, stubs)
    select $1, s.collection_id,
           sum((coalesce(s.old_supply, 0) + s.supply > 0)::int - (coalesce(s.old_supply, 0) > 0)::int), sum(s.supply),
           count(*) filter (where s.at is null)
      from seg_assets_merge s group by s.collection_id order by s.collection_id";
const NOTE_HOLDERS: &str = "
    insert into projection.stats_to_come (network_id, collection_id, owners)
    select $1, collection_id, sum((coalesce(old, 0) + assets > 0)::int - (coalesce(old, 0) > 0)::int)
      from seg_holders group by collection_id order by collection_id";
const NOTE_HOLDINGS: &str = "
    insert into projection.accounts_to_come (network_id, account_id, assets)
    select $1, account_id, sum((coalesce(old, 0) + net > 0)::int - (coalesce(old, 0) > 0)::int)
      from seg_merge group by account_id";
const FORGET_STATS_NOTES: &str = "delete from projection.stats_to_come where network_id = $1";
const FORGET_ACCOUNT_NOTES: &str = "delete from projection.accounts_to_come where network_id = $1";
// Also those that were noted by somebody who died, and whose transfers were taken back since. Same below.
const UNSEEN_ACCOUNTS: &str = concat!(
    "insert into seg_accounts_merge (account_id, address, first_seen, last_seen, transfers)
     select a.id, a.address_normalized, a.first_seen_at, greatest(a.first_seen_at, x.seen), x.transfers
       from (select u.account_id, count(u.seen) as transfers, max(u.seen) as seen
               from (select s.account_id, t.event_time as seen
                       from (select * from ",
    unseen!(),
    ") t cross join lateral (values (t.from_account), (nullif(t.to_account, t.from_account))) s (account_id)
                      where s.account_id is not null
                     union all
                     select account_id, null from projection.accounts_to_come where network_id = $1) u
              group by u.account_id) x
       join ledger.accounts a on a.id = x.account_id
      order by a.id"
);
const UNSEEN_COLLECTIONS: &str = concat!(
    "insert into seg_collections (collection_id, contract_id, address, standard, first_seen, first_height, last_height,
         transfers)
     select c.id, c.contract_id, n.address_normalized, n.standard_id, c.created_at, 0, x.height, x.transfers
       from (select u.collection_id, coalesce(max(u.height), 0) as height, count(u.height) as transfers
               from (select t.collection_id, t.height from ",
    unseen!(),
    "                 union all
                     select collection_id, null from projection.stats_to_come where network_id = $1) u
              group by u.collection_id) x
       join catalog.collections c on c.id = x.collection_id
       join catalog.contracts n on n.id = c.contract_id
      order by c.id"
);
// Of a collection that is new here nobody could say yet what its contract turned out to be.
const RELIABILITY: &str = "
    update projection.collection_stats s
       set reliability = n.reliability, unreliable_reason = n.unreliable_reason
      from seg_collections c join catalog.contracts n on n.id = c.contract_id
     where s.collection_id = c.collection_id
       and (s.reliability, s.unreliable_reason) is distinct from (n.reliability, n.unreliable_reason)";
// How many keys there are is known by then, and whether they are most of a table or few of it. None comes twice.
const PREPARE_TO_CATCH_UP: &str = "
    set local statement_timeout = 0; set local idle_in_transaction_session_timeout = 0;
    set local plan_cache_mode = force_custom_plan; set local work_mem = '128MB'; set local enable_memoize = off";

/// What is caught up: a network, from where its read models stand.
#[derive(Clone, Copy)]
struct Behind {
    network: NetworkId,
    from: i64,
    now: OffsetDateTime,
}

/// Brings read models that stand at `from` to the ledger's head, and lets live go on. The caller's transaction holds
/// the locks of the network's ledger and projections, and nothing of the network is open. With a second connection each
/// catches up one half of the collections, holdings and cards crosswise: where nearly everything is one collection,
/// one has its holdings and the other its cards. What the second commits counts with the caller's commit, because
/// accounts and statistics are added up from notes there.
pub async fn catch_up(
    tx: &Tx<'_>,
    second: Option<&mut Conn>,
    network: NetworkId,
    from: i64,
    now: OffsetDateTime,
) -> Result<(), StoreError> {
    let behind = Behind { network, from, now };
    match second {
        Some(second) => {
            let here = async {
                catch_up_holdings(tx, behind, EVEN).await?;
                catch_up_cards(tx, behind, ODD).await
            };
            let beside = async {
                let beside = second.tx().await?;
                catch_up_holdings(&beside, behind, ODD).await?;
                catch_up_cards(&beside, behind, EVEN).await?;
                Ok::<_, StoreError>(beside)
            };
            let (here, beside) = tokio::join!(here, beside);
            here?;
            // Not before: readers should not see one half long before the other.
            beside?.commit().await?;
        }
        None => {
            catch_up_holdings(tx, behind, BOTH).await?;
            catch_up_cards(tx, behind, BOTH).await?;
        }
    }
    let unseen: [Param<'_>; 2] = [&network.0, &from];
    tx.execute("count unseen transfers of accounts", UNSEEN_ACCOUNTS, &unseen).await?;
    tx.execute("count unseen transfers of collections", UNSEEN_COLLECTIONS, &unseen).await?;
    bulk::merge_noted(tx, network, now).await?;
    tx.execute("forget noted statistics", FORGET_STATS_NOTES, &[&network.0]).await?;
    tx.execute("forget noted accounts", FORGET_ACCOUNT_NOTES, &[&network.0]).await?;
    tx.execute("show unreliable contracts", RELIABILITY, &[]).await?;
    let row = tx.query_one("note that read models are shown", SHOWN, &[&network.0]).await?;
    super::move_watermark(tx, network, row.get(0), None).await
}

async fn catch_up_holdings(
    tx: &Tx<'_>,
    Behind { network, from, now }: Behind,
    of: Halves,
) -> Result<(), StoreError> {
    bulk::create_merge_tables(tx).await?;
    tx.batch("create the table of unseen pairs", CREATE_UNSEEN).await?;
    tx.batch("prepare to catch up read models", PREPARE_TO_CATCH_UP).await?;
    tx.execute("list unseen pairs", UNSEEN_PAIRS, &[&network.0, &from, &of]).await?;
    tx.batch("count unseen pairs", COUNT_UNSEEN).await?;
    if tx.query_one("look whether unseen pairs are few", ARE_FEW, &[]).await?.get(0) {
        tx.look_up_one_by_one().await?;
    }
    tx.execute("compare holdings", COMPARE_PAIRS, &[]).await?;
    tx.batch("count compared holdings", COUNT_COMPARED).await?;
    tx.look_up_one_by_one().await?;
    tx.execute("remove emptied holdings", REMOVE_HOLDINGS, &[]).await?;
    tx.execute("update holdings", UPDATE_HOLDINGS, &[&now]).await?;
    tx.look_up_as_usual().await?;
    tx.execute("insert holdings", INSERT_HOLDINGS, &[&network.0, &now]).await?;
    tx.look_up_one_by_one().await?;
    bulk::merge_holders(tx).await?;
    tx.look_up_as_usual().await?;
    tx.execute("note owners to come", NOTE_HOLDERS, &[&network.0]).await?;
    tx.execute("note assets of accounts to come", NOTE_HOLDINGS, &[&network.0]).await?;
    Ok(())
}

async fn catch_up_cards(
    tx: &Tx<'_>,
    Behind { network, from, now }: Behind,
    of: Halves,
) -> Result<(), StoreError> {
    bulk::create_merge_tables(tx).await?;
    tx.batch("prepare to catch up read models", PREPARE_TO_CATCH_UP).await?;
    tx.execute("compare asset cards", COMPARE_ASSETS, &[&network.0, &from, &of]).await?;
    tx.look_up_one_by_one().await?;
    tx.execute("update asset cards", UPDATE_CARDS, &[&now]).await?;
    tx.look_up_as_usual().await?;
    tx.execute("insert asset cards", INSERT_CARDS, &[&network.0, &now]).await?;
    tx.execute("note statistics to come", NOTE_CARDS, &[&network.0]).await?;
    Ok(())
}

async fn build_owners(tx: &Tx<'_>, network: NetworkId) -> Result<(), StoreError> {
    tx.execute("forget holdings", FORGET_HOLDINGS, &[&network.0]).await?;
    tx.execute("build holdings", BUILD_HOLDINGS, &[&network.0]).await?;
    tx.execute("forget holders", FORGET_HOLDERS, &[&network.0]).await?;
    tx.execute("build holders", BUILD_HOLDERS, &[&network.0]).await?;
    Ok(())
}

async fn build_assets_and_accounts(tx: &Tx<'_>, network: NetworkId) -> Result<(), StoreError> {
    tx.execute("forget asset cards", FORGET_CARDS, &[&network.0]).await?;
    tx.execute("build asset cards", BUILD_CARDS, &[&network.0]).await?;
    tx.execute("forget account summaries", FORGET_ACCOUNTS, &[&network.0]).await?;
    tx.execute("build account summaries", BUILD_ACCOUNTS, &[&network.0]).await?;
    Ok(())
}
