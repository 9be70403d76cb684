//! The read models of a network whose first history is long: nothing is kept of them while the ledger is filled, and
//! all of it is built from the ledger at once when that is done (`ledger.network_progress.read_models_due`).
//! transfers and block_cards are not among them: history appends those as it goes.
//!
//! Built twice is built once: each table forgets what it has of the network first.

use tidemark_model::ids::NetworkId;

use super::truth::{account_truth, card_truth, holder_truth, stats_truth};
use crate::db::{Conn, StoreError, Tx};

const PUT_OFF: &str = "
    update ledger.network_progress set read_models_due = true
     where network_id = $1 and head_height = $2 and not read_models_due";

/// From now on segments of history leave the read models of this network alone. Does nothing, and says so, if the
/// network's ledger is not at its very beginning.
pub async fn put_off(conn: &Conn, network: NetworkId, before_start: i64) -> Result<bool, StoreError> {
    Ok(conn.execute("put the read models off", PUT_OFF, &[&network.0, &before_start]).await? > 0)
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
const BUILT: &str = "
    with checkpoint as (
        insert into app.indexing_checkpoints (worker_name, network_id, height)
        select 'projector', network_id, head_height from ledger.network_progress where network_id = $1
        on conflict (worker_name, network_id) do update set height = excluded.height, updated_at = now())
    update ledger.network_progress set read_models_due = false where network_id = $1 returning head_height";

/// Builds the read models that were put off, and lets live go on. The caller's transaction holds the locks of the
/// network's ledger and projections, and nothing of the network is open. With a second connection the two
/// halves that need nothing of each other are built side by side; what it commits counts with the caller's commit,
/// and is forgotten by the next try if that does not come.
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
    let row = tx.query_one("note that read models are built", BUILT, &[&network.0]).await?;
    super::move_watermark(tx, network, row.get(0), None).await
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
