//! The API's reads: projection.* by index, and the bounded functions of migration 0007 for history, stream
//! and raw rows. Nothing here writes. Every statement is in [`STATEMENTS`]; a test prepares each of them and
//! proves that none scans a large table.
//!
//! Optional joins are lateral with `limit 1`: whatever the planner believes about a page, dressing its rows
//! is one index probe each.

use time::OffsetDateTime;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::db::{Conn, Db, StoreError};
use crate::projection::truth::is_open;

/// One network as the projection sees it.
#[derive(Debug, Clone)]
pub struct NetworkRow {
    /// Network id.
    pub network_id: i32,
    /// Short name.
    pub slug: String,
    /// Chain family.
    pub family: String,
    /// First height we read.
    pub start_block: i64,
    /// Blocks above an event before it counts as confirmed.
    pub confirmations: i64,
    /// Newest block the nodes report.
    pub head_height: Option<i64>,
    /// Its time.
    pub head_time: Option<OffsetDateTime>,
    /// Raw rows are stored up to here.
    pub ingested_height: Option<i64>,
    /// The ledger is complete up to here.
    pub normalized_height: Option<i64>,
    /// The tidemark: nothing at or below changes.
    pub finalized_height: Option<i64>,
    /// Answers are complete up to here.
    pub projected_height: Option<i64>,
    /// When the tidemark last moved.
    pub finalized_at: Option<OffsetDateTime>,
    /// Why the network is stopped, if it is.
    pub halted_reason: Option<String>,
    /// Events projected so far.
    pub events_total: i64,
    /// Reorgs handled so far.
    pub reorgs_total: i64,
    /// When this row was written.
    pub updated_at: OffsetDateTime,
    /// Time of the newest known block at or below `projected_height`.
    pub projected_time: Option<OffsetDateTime>,
    /// Hash of the block at `projected_height`; none for history.
    pub projected_hash: Option<Vec<u8>>,
}

const NETWORKS: &str = "
    select s.network_id, s.slug, s.family, s.start_block, s.confirmations, s.head_height, s.head_time,
           s.ingested_height, s.normalized_height, s.finalized_height, s.projected_height, s.finalized_at,
           s.halted_reason, s.events_total, s.reorgs_total, s.updated_at, p.block_time as projected_time, s.projected_hash
      from projection.network_status s
      left join lateral (select b.block_time from projection.block_cards b
                          where b.network_id = s.network_id and b.height <= s.projected_height
                          order by b.height desc limit 1) p on true
     order by s.network_id";

/// All networks, by id. A handful of rows.
pub async fn networks(conn: &Conn) -> Result<Vec<NetworkRow>, StoreError> {
    let rows = conn.query("read networks", NETWORKS, &[]).await?;
    Ok(rows
        .iter()
        .map(|row| NetworkRow {
            network_id: row.get(0),
            slug: row.get(1),
            family: row.get(2),
            start_block: row.get(3),
            confirmations: row.get(4),
            head_height: row.get(5),
            head_time: row.get(6),
            ingested_height: row.get(7),
            normalized_height: row.get(8),
            finalized_height: row.get(9),
            projected_height: row.get(10),
            finalized_at: row.get(11),
            halted_reason: row.get(12),
            events_total: row.get(13),
            reorgs_total: row.get(14),
            updated_at: row.get(15),
            projected_time: row.get(16),
            projected_hash: row.get(17),
        })
        .collect())
}

const ACTIVITY: &str = "
    select a.bucket, a.events
      from projection.network_activity a
     where a.network_id = $1 and a.bucket >= $2
     order by a.bucket
     limit 1000";

/// Events per ten seconds since `since`, oldest first.
pub async fn activity(
    conn: &Conn,
    network: i32,
    since: OffsetDateTime,
) -> Result<Vec<(OffsetDateTime, i64)>, StoreError> {
    let rows = conn.query("read activity", ACTIVITY, &[&network, &since]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// A collection with its numbers.
#[derive(Debug, Clone)]
pub struct CollectionRow {
    /// Collection id.
    pub collection_id: Uuid,
    /// Network.
    pub network_id: i32,
    /// Canonical contract address.
    pub address: String,
    /// Token standard.
    pub standard: String,
    /// Slug, if it has one.
    pub slug: Option<String>,
    /// Name as the chain gave it: hostile.
    pub name: Option<String>,
    /// Verified by address.
    pub verified: bool,
    /// Metadata has not come yet.
    pub is_stub: bool,
    /// `ok` or `unreliable`.
    pub reliability: String,
    /// Why it is unreliable.
    pub unreliable_reason: Option<String>,
    /// Distinct owners.
    pub owners_count: i64,
    /// Distinct assets.
    pub asset_count: i64,
    /// Units over all assets.
    pub total_supply: String,
    /// Assets without metadata.
    pub stub_count: i64,
    /// Transfers so far.
    pub transfer_count: i64,
    /// Height of its newest event.
    pub last_height: i64,
    /// When these numbers were written.
    pub updated_at: OffsetDateTime,
}

macro_rules! collection_columns {
    () => {
        "c.collection_id, c.network_id, c.address, c.standard, c.slug, c.name, c.verified, c.is_stub,
         c.reliability, c.unreliable_reason, c.owners_count, c.asset_count, c.total_supply::text as total_supply,
         c.stub_count, c.transfer_count, c.last_height, c.updated_at"
    };
}

fn collection(row: &Row) -> CollectionRow {
    CollectionRow {
        collection_id: row.get("collection_id"),
        network_id: row.get("network_id"),
        address: row.get("address"),
        standard: row.get("standard"),
        slug: row.get("slug"),
        name: row.get("name"),
        verified: row.get("verified"),
        is_stub: row.get("is_stub"),
        reliability: row.get("reliability"),
        unreliable_reason: row.get("unreliable_reason"),
        owners_count: row.get("owners_count"),
        asset_count: row.get("asset_count"),
        total_supply: row.get("total_supply"),
        stub_count: row.get("stub_count"),
        transfer_count: row.get("transfer_count"),
        last_height: row.get("last_height"),
        updated_at: row.get("updated_at"),
    }
}

// Rank is descending and the tie-breaker ascending, so a page is two index ranges: the rest of the tie, then
// everything below it.
macro_rules! collections_ranked {
    ($filter:literal) => {
        concat!(
            "select * from (
               (select ",
            collection_columns!(),
            "   from projection.collection_stats c
                where ",
            $filter,
            " c.transfer_count = $1 and c.collection_id > $2 and (not $3 or not c.is_stub)
                order by c.collection_id limit $4)
               union all
               (select ",
            collection_columns!(),
            "   from projection.collection_stats c
                where ",
            $filter,
            " c.transfer_count < $1 and (not $3 or not c.is_stub)
                order by c.transfer_count desc, c.collection_id limit $4)
             ) u order by u.transfer_count desc, u.collection_id limit $4"
        )
    };
}
const COLLECTIONS_RANKED: &str = collections_ranked!("");
const COLLECTIONS_RANKED_IN: &str = collections_ranked!("c.network_id = $5 and");
macro_rules! collections_by_id_order {
    ($filter:literal) => {
        concat!(
            "select ",
            collection_columns!(),
            " from projection.collection_stats c
             where ",
            $filter,
            " c.collection_id > $1 and (not $2 or not c.is_stub) order by c.collection_id limit $3"
        )
    };
}
const COLLECTIONS_BY_ID_ORDER: &str = collections_by_id_order!("");
const COLLECTIONS_BY_ID_ORDER_IN: &str = collections_by_id_order!("c.network_id = $4 and");

/// Collections with most transfers first, after the given place.
pub async fn collections_ranked(
    conn: &Conn,
    network: Option<i32>,
    after: (i64, Uuid),
    require_metadata: bool,
    limit: i64,
) -> Result<Vec<CollectionRow>, StoreError> {
    let label = "list collections";
    let rows = match network {
        None => {
            conn.query(label, COLLECTIONS_RANKED, &[&after.0, &after.1, &require_metadata, &limit]).await?
        }
        Some(network) => {
            let params: [crate::db::Param<'_>; 5] = [&after.0, &after.1, &require_metadata, &limit, &network];
            conn.query(label, COLLECTIONS_RANKED_IN, &params).await?
        }
    };
    Ok(rows.iter().map(collection).collect())
}

/// Collections by id: an order that no write changes.
pub async fn collections_by_id_order(
    conn: &Conn,
    network: Option<i32>,
    after: Uuid,
    require_metadata: bool,
    limit: i64,
) -> Result<Vec<CollectionRow>, StoreError> {
    let label = "list collections by id";
    let rows = match network {
        None => conn.query(label, COLLECTIONS_BY_ID_ORDER, &[&after, &require_metadata, &limit]).await?,
        Some(network) => {
            let params: [crate::db::Param<'_>; 4] = [&after, &require_metadata, &limit, &network];
            conn.query(label, COLLECTIONS_BY_ID_ORDER_IN, &params).await?
        }
    };
    Ok(rows.iter().map(collection).collect())
}

const COLLECTIONS: &str = concat!(
    "select ",
    collection_columns!(),
    " from projection.collection_stats c where c.collection_id = any($1) order by c.transfer_count desc, c.collection_id"
);

/// The collections with these ids; unknown ids are left out.
pub async fn collections(conn: &Conn, ids: &[Uuid]) -> Result<Vec<CollectionRow>, StoreError> {
    let rows = conn.query("read collections", COLLECTIONS, &[&ids]).await?;
    Ok(rows.iter().map(collection).collect())
}

const COLLECTIONS_BY_NAME: &str = concat!(
    "select ",
    collection_columns!(),
    " from projection.collection_stats c
     where c.name is not null and lower(c.name) ~>=~ $1 and lower(c.name) ~<~ $2
     order by lower(c.name) using ~<~, c.collection_id limit $3"
);
const COLLECTIONS_BY_ADDRESS_PREFIX: &str = concat!(
    "select ",
    collection_columns!(),
    " from projection.collection_stats c
     where c.address ~>=~ $1 and c.address ~<~ $2
     order by c.address using ~<~, c.collection_id limit $3"
);

/// `[from, to)` holds every text that begins with `prefix`, in byte order.
fn prefix_range(prefix: &str) -> (String, String) {
    (prefix.to_owned(), format!("{prefix}\u{10ffff}"))
}

/// Collections whose name begins with `prefix`, without regard to case.
pub async fn collections_by_name(
    conn: &Conn,
    prefix: &str,
    limit: i64,
) -> Result<Vec<CollectionRow>, StoreError> {
    let (from, to) = prefix_range(&prefix.to_lowercase());
    let rows = conn.query("search collections", COLLECTIONS_BY_NAME, &[&from, &to, &limit]).await?;
    Ok(rows.iter().map(collection).collect())
}

/// Collections whose address begins with `prefix`.
pub async fn collections_by_address_prefix(
    conn: &Conn,
    prefix: &str,
    limit: i64,
) -> Result<Vec<CollectionRow>, StoreError> {
    let (from, to) = prefix_range(prefix);
    let rows = conn.query("search contracts", COLLECTIONS_BY_ADDRESS_PREFIX, &[&from, &to, &limit]).await?;
    Ok(rows.iter().map(collection).collect())
}

/// A holder of a collection.
#[derive(Debug, Clone)]
pub struct HolderRow {
    /// Collection.
    pub collection_id: Uuid,
    /// Account.
    pub account_id: Uuid,
    /// Its address, once the projector has seen the account.
    pub address: Option<String>,
    /// Distinct assets held.
    pub asset_count: i64,
    /// Units held.
    pub qty: String,
}

macro_rules! holder_columns {
    () => {
        "h.collection_id, h.account_id, h.asset_count, h.qty::text as qty,
         (select a.address from projection.account_summaries a where a.account_id = h.account_id) as address"
    };
}
const HOLDERS_RANKED: &str = concat!(
    "select ",
    holder_columns!(),
    " from (
       (select * from projection.collection_holders h
         where h.collection_id = $1 and h.asset_count = $2 and h.account_id > $3
         order by h.account_id limit $4)
       union all
       (select * from projection.collection_holders h
         where h.collection_id = $1 and h.asset_count < $2
         order by h.asset_count desc, h.account_id limit $4)
     ) h order by h.asset_count desc, h.account_id limit $4"
);
const HOLDERS_BY_ACCOUNT: &str = concat!(
    "select ",
    holder_columns!(),
    " from projection.collection_holders h
     where h.collection_id = $1 and h.account_id > $2
     order by h.account_id limit $3"
);

fn holder(row: &Row) -> HolderRow {
    HolderRow {
        collection_id: row.get("collection_id"),
        account_id: row.get("account_id"),
        address: row.get("address"),
        asset_count: row.get("asset_count"),
        qty: row.get("qty"),
    }
}

/// Holders with most assets first.
pub async fn holders_ranked(
    conn: &Conn,
    collection: Uuid,
    after: (i64, Uuid),
    limit: i64,
) -> Result<Vec<HolderRow>, StoreError> {
    let rows = conn.query("list holders", HOLDERS_RANKED, &[&collection, &after.0, &after.1, &limit]).await?;
    Ok(rows.iter().map(holder).collect())
}

/// Holders by account id: an order that no write changes.
pub async fn holders_by_account(
    conn: &Conn,
    collection: Uuid,
    after: Uuid,
    limit: i64,
) -> Result<Vec<HolderRow>, StoreError> {
    let rows = conn.query("list holders by id", HOLDERS_BY_ACCOUNT, &[&collection, &after, &limit]).await?;
    Ok(rows.iter().map(holder).collect())
}

/// An asset as shown.
#[derive(Debug, Clone)]
pub struct AssetRow {
    /// Asset id.
    pub asset_id: Uuid,
    /// Network.
    pub network_id: i32,
    /// Collection.
    pub collection_id: Uuid,
    /// Token id as the chain writes it.
    pub token_id: String,
    /// Token standard.
    pub standard: String,
    /// Name: hostile.
    pub name: Option<String>,
    /// Picture: hostile.
    pub image_url: Option<String>,
    /// Metadata has not come yet.
    pub is_stub: bool,
    /// Nothing of it is left.
    pub is_burned: bool,
    /// Units in existence.
    pub supply: String,
    /// `complete` or `partial`.
    pub history: String,
    /// Weakest of what contributed.
    pub finality_status: String,
    /// Height of its newest event.
    pub last_height: i64,
    /// When this row was written.
    pub updated_at: OffsetDateTime,
    /// Contract address, once the collection is projected.
    pub contract: Option<String>,
    /// Collection name: hostile.
    pub collection_name: Option<String>,
}

/// How sure the row `$of` is: the projection keeps the height of the newest event above finality that the row
/// rests on; the line of its network says whether that is final by now, the head whether it is confirmed.
macro_rules! status_of {
    ($of:literal) => {
        concat!(
            "case when not ",
            is_open!($of),
            " then 'finalized' when ",
            $of,
            ".open_height <= (select coalesce(hd.head_height, hd.projected_height) - hd.confirmations
                                                   from projection.network_status hd
                                                  where hd.network_id = ",
            $of,
            ".network_id)
                  then 'confirmed' else 'pending' end"
        )
    };
}
/// What is final of the row `o` of ownership_view.
macro_rules! qty_finalized {
    () => {
        concat!("case when ", is_open!("o"), " then o.qty_finalized else o.qty end")
    };
}
macro_rules! asset_select {
    () => {
        concat!(
            "select c.asset_id, c.network_id, c.collection_id, c.token_id, c.standard, c.name, c.image_url, c.is_stub,
                    c.is_burned, c.supply::text as supply, c.history, ",
            status_of!("c"),
            " as finality_status,
                    c.last_height, c.updated_at, s.address as contract, s.name as collection_name
               from projection.asset_cards c
               left join lateral (select x.address, x.name from projection.collection_stats x
                                   where x.collection_id = c.collection_id limit 1) s on true "
        )
    };
}

fn asset(row: &Row) -> AssetRow {
    AssetRow {
        asset_id: row.get("asset_id"),
        network_id: row.get("network_id"),
        collection_id: row.get("collection_id"),
        token_id: row.get("token_id"),
        standard: row.get("standard"),
        name: row.get("name"),
        image_url: row.get("image_url"),
        is_stub: row.get("is_stub"),
        is_burned: row.get("is_burned"),
        supply: row.get("supply"),
        history: row.get("history"),
        finality_status: row.get("finality_status"),
        last_height: row.get("last_height"),
        updated_at: row.get("updated_at"),
        contract: row.get("contract"),
        collection_name: row.get("collection_name"),
    }
}

const ASSETS: &str = concat!(asset_select!(), "where c.asset_id = any($1) order by c.asset_id");
const ASSETS_OF_COLLECTION: &str = concat!(
    asset_select!(),
    "where c.collection_id = $1
       and (length(c.token_id), c.token_id collate \"C\", c.asset_id) > ($2::int, $3::text, $4::uuid)
       and (not $5 or not c.is_stub)
     order by length(c.token_id), c.token_id collate \"C\", c.asset_id limit $6"
);
const ASSETS_BY_NAME: &str = concat!(
    asset_select!(),
    "where c.name is not null and lower(c.name) ~>=~ $1 and lower(c.name) ~<~ $2
     order by lower(c.name) using ~<~, c.asset_id limit $3"
);

/// The assets with these ids; unknown ids are left out.
pub async fn assets(conn: &Conn, ids: &[Uuid]) -> Result<Vec<AssetRow>, StoreError> {
    let rows = conn.query("read assets", ASSETS, &[&ids]).await?;
    Ok(rows.iter().map(asset).collect())
}

/// Assets of a collection by token id (numbers by value), after the asset with this token id and id.
pub async fn assets_of_collection(
    conn: &Conn,
    collection: Uuid,
    after: (&str, Uuid),
    require_metadata: bool,
    limit: i64,
) -> Result<Vec<AssetRow>, StoreError> {
    let length = i32::try_from(after.0.chars().count()).unwrap_or(i32::MAX);
    let params: [crate::db::Param<'_>; 6] =
        [&collection, &length, &after.0, &after.1, &require_metadata, &limit];
    let rows = conn.query("list assets", ASSETS_OF_COLLECTION, &params).await?;
    Ok(rows.iter().map(asset).collect())
}

/// Assets whose name begins with `prefix`, without regard to case.
pub async fn assets_by_name(conn: &Conn, prefix: &str, limit: i64) -> Result<Vec<AssetRow>, StoreError> {
    let (from, to) = prefix_range(&prefix.to_lowercase());
    let rows = conn.query("search assets", ASSETS_BY_NAME, &[&from, &to, &limit]).await?;
    Ok(rows.iter().map(asset).collect())
}

/// An owner of an asset.
#[derive(Debug, Clone)]
pub struct OwnerRow {
    /// Account.
    pub account_id: Uuid,
    /// Its address, once the projector has seen the account.
    pub address: Option<String>,
    /// Units at the asked finality.
    pub qty: String,
    /// Units that will not change by themselves.
    pub qty_finalized: String,
    /// How sure `qty` is.
    pub finality_status: String,
    /// When this row was written.
    pub updated_at: OffsetDateTime,
}

// `confirmed` over a row that still holds something pending falls back to what is final: the projection keeps
// two numbers, and the weaker claim is the true one.
macro_rules! qty_at {
    ($finality:literal) => {
        concat!(
            "case ",
            $finality,
            " when 'finalized' then ",
            qty_finalized!(),
            " when 'confirmed' then case when ",
            status_of!("o"),
            " = 'pending' then o.qty_finalized else o.qty end
                  else o.qty end"
        )
    };
}
macro_rules! status_at {
    ($finality:literal) => {
        concat!(
            "case ",
            $finality,
            " when 'finalized' then 'finalized'
                  when 'confirmed' then coalesce(nullif(",
            status_of!("o"),
            ", 'pending'), 'finalized')
                  else ",
            status_of!("o"),
            " end"
        )
    };
}
const OWNERS: &str = concat!(
    "select o.account_id, (select a.address from projection.account_summaries a where a.account_id = o.account_id)
               as address, (",
    qty_at!("$3::text"),
    ")::text as qty, (",
    qty_finalized!(),
    ")::text as qty_finalized, ",
    status_at!("$3::text"),
    " as finality_status, o.updated_at
       from projection.ownership_view o
      where o.asset_id = $1 and o.account_id > $2 and ",
    qty_at!("$3::text"),
    " > 0 order by o.account_id limit $4"
);

/// Owners of an asset by account id, as known at `finality` (`pending`, `confirmed` or `finalized`).
pub async fn owners(
    conn: &Conn,
    asset: Uuid,
    after: Uuid,
    finality: &str,
    limit: i64,
) -> Result<Vec<OwnerRow>, StoreError> {
    let rows = conn.query("list owners", OWNERS, &[&asset, &after, &finality, &limit]).await?;
    Ok(rows
        .iter()
        .map(|row| OwnerRow {
            account_id: row.get("account_id"),
            address: row.get("address"),
            qty: row.get("qty"),
            qty_finalized: row.get("qty_finalized"),
            finality_status: row.get("finality_status"),
            updated_at: row.get("updated_at"),
        })
        .collect())
}

const OWNERS_AT: &str = "
    select o.account_id, o.qty::text as qty, o.since_height, o.since,
           (select a.address from projection.account_summaries a where a.account_id = o.account_id) as address
      from projection.owners_at($1, $2, $3, $4) o
     order by o.account_id";

/// Owners of an asset when `height` was final; `updated_at` is the time of the last change before it.
pub async fn owners_at(
    conn: &Conn,
    asset: Uuid,
    height: i64,
    after: Uuid,
    limit: i32,
) -> Result<Vec<OwnerRow>, StoreError> {
    let rows = conn.query("list owners in history", OWNERS_AT, &[&asset, &height, &after, &limit]).await?;
    Ok(rows
        .iter()
        .map(|row| {
            let qty: String = row.get("qty");
            OwnerRow {
                account_id: row.get("account_id"),
                address: row.get("address"),
                qty_finalized: qty.clone(),
                qty,
                finality_status: "finalized".into(),
                updated_at: row.get("since"),
            }
        })
        .collect())
}

const HEIGHT_AT: &str = "
    select projection.height_at($1, $2),
           (select b.block_time from projection.block_cards b where b.network_id = $1
             order by b.height desc limit 1)";

/// The highest block at or before `at`, and the time of the newest block known.
pub async fn height_at(
    conn: &Conn,
    network: i32,
    at: OffsetDateTime,
) -> Result<(Option<i64>, Option<OffsetDateTime>), StoreError> {
    let row = conn.query_one("find a height by time", HEIGHT_AT, &[&network, &at]).await?;
    Ok((row.get(0), row.get(1)))
}

/// An account.
#[derive(Debug, Clone)]
pub struct AccountRow {
    /// Account id.
    pub account_id: Uuid,
    /// Network.
    pub network_id: i32,
    /// Canonical address.
    pub address: String,
    /// Distinct assets held.
    pub asset_count: i64,
    /// Transfers it took part in.
    pub transfer_count: i64,
    /// First event.
    pub first_seen_at: OffsetDateTime,
    /// Newest event.
    pub last_seen_at: OffsetDateTime,
    /// When this row was written.
    pub updated_at: OffsetDateTime,
}

macro_rules! account_columns {
    () => {
        "a.account_id, a.network_id, a.address, a.asset_count, a.transfer_count, a.first_seen_at, a.last_seen_at,
         a.updated_at"
    };
}
const ACCOUNTS: &str = concat!(
    "select ",
    account_columns!(),
    " from projection.account_summaries a where a.account_id = any($1) order by a.network_id"
);
const ACCOUNTS_BY_PREFIX: &str = concat!(
    "select ",
    account_columns!(),
    " from projection.account_summaries a
     where a.address ~>=~ $1 and a.address ~<~ $2
     order by a.address using ~<~, a.network_id limit $3"
);

fn account(row: &Row) -> AccountRow {
    AccountRow {
        account_id: row.get("account_id"),
        network_id: row.get("network_id"),
        address: row.get("address"),
        asset_count: row.get("asset_count"),
        transfer_count: row.get("transfer_count"),
        first_seen_at: row.get("first_seen_at"),
        last_seen_at: row.get("last_seen_at"),
        updated_at: row.get("updated_at"),
    }
}

/// The accounts with these ids; unknown ids are left out.
pub async fn accounts(conn: &Conn, ids: &[Uuid]) -> Result<Vec<AccountRow>, StoreError> {
    let rows = conn.query("read accounts", ACCOUNTS, &[&ids]).await?;
    Ok(rows.iter().map(account).collect())
}

/// Accounts whose address begins with `prefix`.
pub async fn accounts_by_prefix(
    conn: &Conn,
    prefix: &str,
    limit: i64,
) -> Result<Vec<AccountRow>, StoreError> {
    let (from, to) = prefix_range(prefix);
    let rows = conn.query("search accounts", ACCOUNTS_BY_PREFIX, &[&from, &to, &limit]).await?;
    Ok(rows.iter().map(account).collect())
}

/// One asset in an account.
#[derive(Debug, Clone)]
pub struct HoldingRow {
    /// The asset.
    pub asset: AssetRow,
    /// Units at the asked finality.
    pub qty: String,
    /// Units that will not change by themselves.
    pub qty_finalized: String,
    /// How sure `qty` is.
    pub finality_status: String,
}

/// Holdings of one stored status, in the order of ownership_view_by_account.
macro_rules! holdings_stored_as {
    ($status:literal) => {
        concat!(
            "(select o.asset_id, o.network_id, o.collection_id, o.updated_at, (",
            qty_at!("$3::text"),
            ")::text as qty, (",
            qty_finalized!(),
            ")::text as qty_finalized, ",
            status_at!("$3::text"),
            " as finality_status
                from projection.ownership_view o
               where o.account_id = $1 and o.finality_status = '",
            $status,
            "' and o.asset_id > $2 and ",
            qty_at!("$3::text"),
            " > 0 and ($5::uuid is null or o.collection_id = $5)
                 and (not $6 or exists (select 1 from projection.asset_cards k
                                         where k.asset_id = o.asset_id and not k.is_stub))
               order by o.asset_id limit $4)"
        )
    };
}
const HOLDINGS: &str = concat!(
    "select p.asset_id, p.network_id, p.collection_id, c.token_id, c.standard, c.name, c.image_url,
            coalesce(c.is_stub, true) as is_stub, coalesce(c.is_burned, false) as is_burned,
            coalesce(c.supply, 0)::text as supply, coalesce(c.history, 'complete') as history,
            p.finality_status, coalesce(c.last_height, 0) as last_height, p.updated_at, s.address as contract,
            s.name as collection_name, p.qty, p.qty_finalized
       from (select * from (",
    holdings_stored_as!("pending"),
    " union all ",
    holdings_stored_as!("finalized"),
    ") w order by asset_id limit $4) p
       join lateral (select k.token_id, k.standard, k.name, k.image_url, k.is_stub, k.is_burned, k.supply,
                            k.history, k.last_height from projection.asset_cards k
                      where k.asset_id = p.asset_id limit 1) c on true
       left join lateral (select x.address, x.name from projection.collection_stats x
                           where x.collection_id = p.collection_id limit 1) s on true
      order by p.asset_id"
);

/// Which holdings of an account to list.
#[derive(Debug, Clone)]
pub struct HoldingQuery<'a> {
    /// Whose.
    pub account: Uuid,
    /// After this asset.
    pub after: Uuid,
    /// `pending`, `confirmed` or `finalized`.
    pub finality: &'a str,
    /// Only of this collection.
    pub collection: Option<Uuid>,
    /// Leave stubs out.
    pub require_metadata: bool,
    /// How many.
    pub limit: i64,
}

fn holding(row: &Row) -> HoldingRow {
    HoldingRow {
        qty: row.get("qty"),
        qty_finalized: row.get("qty_finalized"),
        finality_status: row.get("finality_status"),
        asset: asset(row),
    }
}

/// What an account holds, by asset id.
pub async fn holdings(conn: &Conn, query: &HoldingQuery<'_>) -> Result<Vec<HoldingRow>, StoreError> {
    let rows = conn
        .query(
            "list holdings",
            HOLDINGS,
            &[
                &query.account,
                &query.after,
                &query.finality,
                &query.limit,
                &query.collection,
                &query.require_metadata,
            ],
        )
        .await?;
    Ok(rows.iter().map(holding).collect())
}

const HOLDINGS_AT: &str = "
    select c.asset_id, c.network_id, c.collection_id, c.token_id, c.standard, c.name, c.image_url, c.is_stub,
           c.is_burned, c.supply::text as supply, c.history, 'finalized' as finality_status, c.last_height,
           c.updated_at, s.address as contract, s.name as collection_name, h.qty::text as qty,
           h.qty::text as qty_finalized
      from projection.holdings_at($1, $2, $3, $4) h
      join lateral (select * from projection.asset_cards k where k.asset_id = h.asset_id limit 1) c on true
      left join lateral (select x.address, x.name from projection.collection_stats x
                          where x.collection_id = c.collection_id limit 1) s on true
     order by h.asset_id";

/// What an account held when `height` was final.
pub async fn holdings_at(
    conn: &Conn,
    account: Uuid,
    height: i64,
    after: Uuid,
    limit: i32,
) -> Result<Vec<HoldingRow>, StoreError> {
    let rows =
        conn.query("list holdings in history", HOLDINGS_AT, &[&account, &height, &after, &limit]).await?;
    Ok(rows.iter().map(holding).collect())
}

const ACCOUNT_COLLECTIONS: &str = concat!(
    "select ",
    collection_columns!(),
    ", h.asset_count as held, h.qty::text as held_qty
       from (select h.collection_id, h.asset_count, h.qty from projection.collection_holders h
              where h.account_id = $1 and h.collection_id > $2
                and (not $4 or exists (select 1 from projection.collection_stats k
                                        where k.collection_id = h.collection_id and not k.is_stub))
              order by h.collection_id limit $3) h
       join lateral (select * from projection.collection_stats x where x.collection_id = h.collection_id limit 1) c
            on true
      order by h.collection_id"
);

/// Collections an account holds something of: the collection, distinct assets, units.
pub async fn account_collections(
    conn: &Conn,
    account: Uuid,
    after: Uuid,
    require_metadata: bool,
    limit: i64,
) -> Result<Vec<(CollectionRow, i64, String)>, StoreError> {
    let params: [crate::db::Param<'_>; 4] = [&account, &after, &limit, &require_metadata];
    let rows = conn.query("list collections of an account", ACCOUNT_COLLECTIONS, &params).await?;
    Ok(rows.iter().map(|row| (collection(row), row.get("held"), row.get("held_qty"))).collect())
}

const HELD_OF_COLLECTIONS: &str = concat!(
    "select ",
    collection_columns!(),
    ", h.asset_count as held, h.qty::text as held_qty
       from unnest($2::uuid[]) as k(collection_id)
       join lateral (select y.asset_count, y.qty from projection.collection_holders y
                      where y.collection_id = k.collection_id and y.account_id = $1 limit 1) h on true
       join lateral (select * from projection.collection_stats x where x.collection_id = k.collection_id limit 1) c
            on true
      order by k.collection_id"
);

/// What an account holds of these collections: the collection, distinct assets, units.
pub async fn held_of_collections(
    conn: &Conn,
    account: Uuid,
    collections: &[Uuid],
) -> Result<Vec<(CollectionRow, i64, String)>, StoreError> {
    let params: [crate::db::Param<'_>; 2] = [&account, &collections];
    let rows = conn.query("list holdings of collections", HELD_OF_COLLECTIONS, &params).await?;
    Ok(rows.iter().map(|row| (collection(row), row.get("held"), row.get("held_qty"))).collect())
}

/// A place in a list of transfers: newest first, exclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TransferPlace {
    /// Height.
    pub height: i64,
    /// Index of the event in its block.
    pub event_index: i32,
    /// Index within the event.
    pub sub_index: i32,
    /// Event id: a reverted event and its successor may share all of the above.
    pub event_id: Uuid,
}

impl TransferPlace {
    /// Above every row.
    pub const TOP: Self =
        Self { height: i64::MAX, event_index: i32::MAX, sub_index: i32::MAX, event_id: Uuid::max() };
    /// Below every row.
    pub const BOTTOM: Self = Self { height: -1, event_index: -1, sub_index: -1, event_id: Uuid::nil() };
}

/// Whose transfers.
#[derive(Debug, Clone)]
pub enum TransferScope {
    /// Of the whole network.
    Network,
    /// Of an asset.
    Asset(Uuid),
    /// Of a collection.
    Collection(Uuid),
    /// To or from an account.
    Account(Uuid),
    /// Of one block.
    Block(i64),
    /// Of one transaction in one block.
    Transaction(i64, Vec<u8>),
}

/// Which transfers to list.
#[derive(Debug, Clone)]
pub struct TransferQuery {
    /// Network.
    pub network: i32,
    /// Whose.
    pub scope: TransferScope,
    /// Below this place.
    pub before: TransferPlace,
    /// At or below this height.
    pub height_max: i64,
    /// With rows a reorg took back.
    pub include_reverted: bool,
    /// Only these kinds.
    pub kinds: Option<Vec<String>>,
    /// How many.
    pub limit: i64,
}

/// A transfer, mint or burn.
#[derive(Debug, Clone)]
pub struct TransferRow {
    /// Network.
    pub network_id: i32,
    /// Where it is in the list.
    pub place: TransferPlace,
    /// `transfer`, `mint`, `burn`…
    pub kind: String,
    /// Asset.
    pub asset_id: Uuid,
    /// Collection.
    pub collection_id: Uuid,
    /// Who lost it.
    pub from_account: Option<Uuid>,
    /// Who got it.
    pub to_account: Option<Uuid>,
    /// Address of `from_account`.
    pub from_address: Option<String>,
    /// Address of `to_account`.
    pub to_address: Option<String>,
    /// Units, without sign.
    pub qty: String,
    /// Transaction.
    pub tx_hash: Vec<u8>,
    /// Block.
    pub block_hash: Vec<u8>,
    /// Block time.
    pub event_time: OffsetDateTime,
    /// A reorg took it back.
    pub is_reverted: bool,
    /// Token id.
    pub token_id: Option<String>,
    /// Token standard.
    pub standard: Option<String>,
    /// Asset name: hostile.
    pub asset_name: Option<String>,
    /// Contract address.
    pub contract: Option<String>,
    /// Collection name: hostile.
    pub collection_name: Option<String>,
}

macro_rules! transfer_window {
    ($columns:literal, $filter:literal, $limit:literal) => {
        concat!(
            "select ",
            $columns,
            " from projection.transfers t
              where t.network_id = $1",
            $filter,
            " and (t.height, t.event_index, t.sub_index, t.event_id) < ($2::bigint, $3::int, $4::int, $5::uuid)
                and t.height <= $6 and ($7 or not t.is_reverted)
              order by t.height desc, t.event_index desc, t.sub_index desc, t.event_id desc ",
            $limit
        )
    };
}
// The largest page is written into the statement: then the planner knows enough to plan once and for all, which
// halves what such a list costs. The page that is asked for is cut out of it before it is dressed.
macro_rules! any_kind {
    ($filter:literal) => {
        concat!(
            "select w.* from (",
            transfer_window!(
                "t.network_id, t.height, t.event_index, t.sub_index, t.event_id, t.kind, t.asset_id,
                 t.collection_id, t.from_account, t.to_account, t.qty, t.tx_hash, t.block_hash, t.event_time,
                 t.is_reverted",
                $filter,
                "limit 101"
            ),
            ") w limit $8"
        )
    };
}
// Kinds are looked for in a stretch of the list: a kind that is rare, or never there, must not cost a walk through
// all of it. Rows come in the order of the index, so the filter outside ends the walk as soon as it may.
macro_rules! some_kinds {
    ($filter:literal) => {
        concat!(
            "select w.* from (",
            transfer_window!(
                "t.network_id, t.height, t.event_index, t.sub_index, t.event_id, t.kind, t.asset_id,
                 t.collection_id, t.from_account, t.to_account, t.qty, t.tx_hash, t.block_hash, t.event_time,
                 t.is_reverted",
                $filter,
                "limit 10000"
            ),
            ") w where w.kind::text = any($9::text[]) limit $8"
        )
    };
}
// Where that stretch ends, if it ends before the list does.
macro_rules! stretch_end {
    ($filter:literal) => {
        transfer_window!("t.height, t.event_index, t.sub_index, t.event_id", $filter, "offset 9999 limit 1")
    };
}
macro_rules! dressed {
    ($page:expr, $order:literal) => {
        concat!(
            "with page as materialized (",
            $page,
            ") select p.network_id, p.height, p.event_index, p.sub_index, p.event_id, p.kind::text as kind, p.asset_id,
                      p.collection_id, p.from_account, p.to_account, abs(p.qty)::text as qty, p.tx_hash, p.block_hash,
                      p.event_time, p.is_reverted, c.token_id, c.standard, c.name as asset_name,
                      s.address as contract, s.name as collection_name,
                      (select a.address from projection.account_summaries a where a.account_id = p.from_account)
                          as from_address,
                      (select a.address from projection.account_summaries a where a.account_id = p.to_account)
                          as to_address
                 from page p
                 left join lateral (select x.token_id, x.standard, x.name from projection.asset_cards x
                                     where x.asset_id = p.asset_id limit 1) c on true
                 left join lateral (select x.address, x.name from projection.collection_stats x
                                     where x.collection_id = p.collection_id limit 1) s on true
                order by ",
            $order
        )
    };
}
macro_rules! newest_first {
    ($page:expr) => {
        dressed!($page, "p.height desc, p.event_index desc, p.sub_index desc, p.event_id desc")
    };
}
// Transfers of an account: two ordered index scans, merged; a transfer to oneself is in the first only.
const TRANSFERS: &str = newest_first!(any_kind!(""));
const TRANSFERS_OF_ASSET: &str = newest_first!(any_kind!(" and t.asset_id = $9"));
const TRANSFERS_OF_COLLECTION: &str = newest_first!(any_kind!(" and t.collection_id = $9"));
const TRANSFERS_OF_BLOCK: &str = newest_first!(any_kind!(" and t.height = $9"));
const TRANSFERS_OF_TX: &str = newest_first!(any_kind!(" and t.height = $9 and t.tx_hash = $10"));
const TRANSFERS_OF_ACCOUNT: &str = newest_first!(concat!(
    "select * from ((",
    any_kind!(" and t.from_account = $9"),
    ") union all (",
    any_kind!(" and t.to_account = $9 and t.from_account is distinct from $9"),
    ")) u order by u.height desc, u.event_index desc, u.sub_index desc, u.event_id desc limit $8"
));
const KINDS: &str = newest_first!(some_kinds!(""));
const KINDS_OF_ASSET: &str = newest_first!(some_kinds!(" and t.asset_id = $10"));
const KINDS_OF_COLLECTION: &str = newest_first!(some_kinds!(" and t.collection_id = $10"));
const KINDS_OF_BLOCK: &str = newest_first!(some_kinds!(" and t.height = $10"));
const KINDS_OF_TX: &str = newest_first!(some_kinds!(" and t.height = $10 and t.tx_hash = $11"));
const KINDS_OF_ACCOUNT: &str = newest_first!(concat!(
    "select * from ((",
    some_kinds!(" and t.from_account = $10"),
    ") union all (",
    some_kinds!(" and t.to_account = $10 and t.from_account is distinct from $10"),
    ")) u order by u.height desc, u.event_index desc, u.sub_index desc, u.event_id desc limit $8"
));
// The newest of two ends: below it one of the two was not looked at.
const STRETCH: &str = stretch_end!("");
const STRETCH_OF_ASSET: &str = stretch_end!(" and t.asset_id = $8");
const STRETCH_OF_COLLECTION: &str = stretch_end!(" and t.collection_id = $8");
const STRETCH_OF_BLOCK: &str = stretch_end!(" and t.height = $8");
const STRETCH_OF_TX: &str = stretch_end!(" and t.height = $8 and t.tx_hash = $9");
const STRETCH_OF_ACCOUNT: &str = concat!(
    "select * from ((",
    stretch_end!(" and t.from_account = $8"),
    ") union all (",
    stretch_end!(" and t.to_account = $8 and t.from_account is distinct from $8"),
    ")) u order by u.height desc, u.event_index desc, u.sub_index desc, u.event_id desc limit 1"
);

fn transfer(row: &Row) -> TransferRow {
    TransferRow {
        network_id: row.get("network_id"),
        place: TransferPlace {
            height: row.get("height"),
            event_index: row.get("event_index"),
            sub_index: row.get("sub_index"),
            event_id: row.get("event_id"),
        },
        kind: row.get("kind"),
        asset_id: row.get("asset_id"),
        collection_id: row.get("collection_id"),
        from_account: row.get("from_account"),
        to_account: row.get("to_account"),
        from_address: row.get("from_address"),
        to_address: row.get("to_address"),
        qty: row.get("qty"),
        tx_hash: row.get("tx_hash"),
        block_hash: row.get("block_hash"),
        event_time: row.get("event_time"),
        is_reverted: row.get("is_reverted"),
        token_id: row.get("token_id"),
        standard: row.get("standard"),
        asset_name: row.get("asset_name"),
        contract: row.get("contract"),
        collection_name: row.get("collection_name"),
    }
}

/// Parameters that all statements about a list of transfers begin with.
fn window_params(query: &TransferQuery) -> Vec<crate::db::Param<'_>> {
    let place = &query.before;
    vec![
        &query.network,
        &place.height,
        &place.event_index,
        &place.sub_index,
        &place.event_id,
        &query.height_max,
        &query.include_reverted,
    ]
}

/// Adds the parameters of the scope; gives the statement for it.
fn scoped<'a>(
    scope: &'a TransferScope,
    params: &mut Vec<crate::db::Param<'a>>,
    statements: [&'static str; 6],
) -> &'static str {
    let [network, asset, collection, account, block, transaction] = statements;
    match scope {
        TransferScope::Network => network,
        TransferScope::Asset(id) => {
            params.push(id);
            asset
        }
        TransferScope::Collection(id) => {
            params.push(id);
            collection
        }
        TransferScope::Account(id) => {
            params.push(id);
            account
        }
        TransferScope::Block(height) => {
            params.push(height);
            block
        }
        TransferScope::Transaction(height, hash) => {
            params.push(height);
            params.push(hash);
            transaction
        }
    }
}

/// Transfers, newest first, at most 101. With `kinds`, a short answer may be the end of the stretch that was looked at and not
/// of the list: [`transfers_stretch_end`] tells.
pub async fn transfers(conn: &Conn, query: &TransferQuery) -> Result<Vec<TransferRow>, StoreError> {
    let mut params = window_params(query);
    params.push(&query.limit);
    let sql = match &query.kinds {
        None => scoped(
            &query.scope,
            &mut params,
            [
                TRANSFERS,
                TRANSFERS_OF_ASSET,
                TRANSFERS_OF_COLLECTION,
                TRANSFERS_OF_ACCOUNT,
                TRANSFERS_OF_BLOCK,
                TRANSFERS_OF_TX,
            ],
        ),
        Some(kinds) => {
            params.push(kinds);
            scoped(
                &query.scope,
                &mut params,
                [KINDS, KINDS_OF_ASSET, KINDS_OF_COLLECTION, KINDS_OF_ACCOUNT, KINDS_OF_BLOCK, KINDS_OF_TX],
            )
        }
    };
    let rows = conn.query("list transfers", sql, &params).await?;
    Ok(rows.iter().map(transfer).collect())
}

/// The last place that [`transfers`] looked at for kinds, if the list goes on below it.
pub async fn transfers_stretch_end(
    conn: &Conn,
    query: &TransferQuery,
) -> Result<Option<TransferPlace>, StoreError> {
    let mut params = window_params(query);
    let sql = scoped(
        &query.scope,
        &mut params,
        [
            STRETCH,
            STRETCH_OF_ASSET,
            STRETCH_OF_COLLECTION,
            STRETCH_OF_ACCOUNT,
            STRETCH_OF_BLOCK,
            STRETCH_OF_TX,
        ],
    );
    let row = conn.query_opt("find the end of a stretch", sql, &params).await?;
    Ok(row.map(|row| TransferPlace {
        height: row.get(0),
        event_index: row.get(1),
        sub_index: row.get(2),
        event_id: row.get(3),
    }))
}

const TRANSFERS_FORWARD: &str = dressed!(
    "select t.network_id, t.height, t.event_index, t.sub_index, t.event_id, t.kind, t.asset_id, t.collection_id,
            t.from_account, t.to_account, t.qty, t.tx_hash, t.block_hash, t.event_time, t.is_reverted
       from projection.transfers t
      where t.network_id = $1
        and (t.height, t.event_index, t.sub_index, t.event_id) > ($2::bigint, $3::int, $4::int, $5::uuid)
        and t.height <= $6 and not t.is_reverted
      order by t.height, t.event_index, t.sub_index, t.event_id
      limit $7",
    "p.height, p.event_index, p.sub_index, p.event_id"
);

/// Canonical transfers above `after` up to `height_max`, oldest first: what became final or confirmed.
pub async fn transfers_forward(
    conn: &Conn,
    network: i32,
    after: TransferPlace,
    height_max: i64,
    limit: i64,
) -> Result<Vec<TransferRow>, StoreError> {
    let params: [crate::db::Param<'_>; 7] =
        [&network, &after.height, &after.event_index, &after.sub_index, &after.event_id, &height_max, &limit];
    let rows = conn.query("follow transfers", TRANSFERS_FORWARD, &params).await?;
    Ok(rows.iter().map(transfer).collect())
}

/// A block.
#[derive(Debug, Clone)]
pub struct BlockRow {
    /// Network.
    pub network_id: i32,
    /// Height.
    pub height: i64,
    /// Hash.
    pub hash: Vec<u8>,
    /// Parent's hash.
    pub parent_hash: Vec<u8>,
    /// Time.
    pub block_time: OffsetDateTime,
    /// Transactions, where we read them.
    pub tx_count: Option<i32>,
    /// Events of ours.
    pub event_count: i32,
}

fn block(row: &Row) -> BlockRow {
    BlockRow {
        network_id: row.get(0),
        height: row.get(1),
        hash: row.get(2),
        parent_hash: row.get(3),
        block_time: row.get(4),
        tx_count: row.get(5),
        event_count: row.get(6),
    }
}

const BLOCKS_AT: &str = "
    select b.network_id, b.height, b.hash, b.parent_hash, b.block_time, b.tx_count, b.event_count
      from projection.block_cards b
     where b.network_id = any($1) and b.height = $2
     order by b.network_id";
const BLOCKS_BY_HASH: &str = "
    select b.network_id, b.height, b.hash, b.parent_hash, b.block_time, b.tx_count, b.event_count
      from projection.block_cards b
     where b.hash = $1
     order by b.network_id
     limit 20";

/// The blocks at this height, one per network.
pub async fn blocks_at(conn: &Conn, networks: &[i32], height: i64) -> Result<Vec<BlockRow>, StoreError> {
    let rows = conn.query("read blocks", BLOCKS_AT, &[&networks, &height]).await?;
    Ok(rows.iter().map(block).collect())
}

/// The blocks with this hash (a fork of a chain shares its history).
pub async fn blocks_by_hash(conn: &Conn, hash: &[u8]) -> Result<Vec<BlockRow>, StoreError> {
    let rows = conn.query("find a block by hash", BLOCKS_BY_HASH, &[&hash]).await?;
    Ok(rows.iter().map(block).collect())
}

/// Where a transaction is.
#[derive(Debug, Clone)]
pub struct TxPlace {
    /// Height of its block.
    pub height: i64,
    /// Index in its block.
    pub tx_index: i32,
    /// Time of its block.
    pub block_time: OffsetDateTime,
}

const RAW_TX_LOOKUP: &str = "select height, tx_index, block_time from projection.raw_tx_lookup($1, $2)";

/// Looks a transaction up by hash (raw database).
pub async fn tx_lookup(raw: &Conn, network: i32, hash: &[u8]) -> Result<Option<TxPlace>, StoreError> {
    let row = raw.query_opt("look a transaction up", RAW_TX_LOOKUP, &[&network, &hash]).await?;
    Ok(row.map(|row| TxPlace { height: row.get(0), tx_index: row.get(1), block_time: row.get(2) }))
}

/// The transaction's own row: only where the network is read in full.
#[derive(Debug, Clone)]
pub struct RawTransactionRow {
    /// Index in its block.
    pub tx_index: i32,
    /// Sender.
    pub sender: Vec<u8>,
    /// Receiver.
    pub receiver: Option<Vec<u8>>,
    /// Value in the smallest unit.
    pub value: String,
    /// Did it succeed?
    pub succeeded: Option<bool>,
    /// What no column holds.
    pub payload: Option<serde_json::Value>,
    /// Where a large payload lies.
    pub payload_ref: Option<String>,
}

const RAW_TRANSACTION: &str = "
    select tx_index, sender, receiver, value::text, succeeded, payload, payload_ref
      from projection.raw_transaction($1, $2, $3)";

/// A raw transaction by key (raw database).
pub async fn raw_transaction(
    raw: &Conn,
    network: i32,
    height: i64,
    hash: &[u8],
) -> Result<Option<RawTransactionRow>, StoreError> {
    let row = raw.query_opt("read a raw transaction", RAW_TRANSACTION, &[&network, &height, &hash]).await?;
    Ok(row.map(|row| RawTransactionRow {
        tx_index: row.get(0),
        sender: row.get(1),
        receiver: row.get(2),
        value: row.get(3),
        succeeded: row.get(4),
        payload: row.get(5),
        payload_ref: row.get(6),
    }))
}

const RAW_BLOCK_HASH: &str = "select projection.raw_block_hash($1, $2)";

/// Hash of the block that the ingester holds at this height now (raw database).
pub async fn raw_block_hash(raw: &Conn, network: i32, height: i64) -> Result<Option<Vec<u8>>, StoreError> {
    Ok(raw.query_one("read a block's hash", RAW_BLOCK_HASH, &[&network, &height]).await?.get(0))
}

/// An event as it was read.
#[derive(Debug, Clone)]
pub struct RawEventRow {
    /// Index in its block.
    pub event_index: i32,
    /// Transaction.
    pub tx_id: Vec<u8>,
    /// Index of the transaction in its block.
    pub tx_index: i32,
    /// Block.
    pub block_hash: Vec<u8>,
    /// Who emitted it.
    pub emitter: Vec<u8>,
    /// Topics, 32 bytes each.
    pub topics: Vec<u8>,
    /// Data; none when it was moved to object storage.
    pub data: Option<Vec<u8>>,
    /// What no column holds.
    pub payload: Option<serde_json::Value>,
    /// Where large data lies.
    pub payload_ref: Option<String>,
}

const RAW_EVENTS: &str = "
    select event_index, tx_id, tx_index, block_hash, emitter, topics, data, payload, payload_ref
      from projection.raw_events($1, $2, $3, $4, $5)";

/// Raw events of a block, or of one transaction in it, after an index (raw database).
pub async fn raw_events(
    raw: &Conn,
    network: i32,
    height: i64,
    hash: Option<&[u8]>,
    after_index: i32,
    limit: i32,
) -> Result<Vec<RawEventRow>, StoreError> {
    let rows =
        raw.query("read raw events", RAW_EVENTS, &[&network, &height, &hash, &after_index, &limit]).await?;
    Ok(rows
        .iter()
        .map(|row| RawEventRow {
            event_index: row.get(0),
            tx_id: row.get(1),
            tx_index: row.get(2),
            block_hash: row.get(3),
            emitter: row.get(4),
            topics: row.get(5),
            data: row.get(6),
            payload: row.get(7),
            payload_ref: row.get(8),
        })
        .collect())
}

/// Where a canonical event stands on chain.
#[derive(Debug, Clone)]
pub struct EventOrigin {
    /// Network.
    pub network_id: i32,
    /// Height.
    pub height: i64,
    /// Transaction.
    pub tx_hash: Vec<u8>,
    /// Index in its block.
    pub event_index: i32,
    /// The chain's own name for it.
    pub source_event_id: String,
    /// How sure it is.
    pub finality_status: String,
    /// A reorg took it back.
    pub is_reverted: bool,
}

const EVENT_ORIGIN: &str = "
    select network_id, height, tx_hash, event_index, source_event_id, finality_status, is_reverted
      from projection.event_origin($1)";

/// Looks a canonical event up by id.
pub async fn event_origin(conn: &Conn, event: Uuid) -> Result<Option<EventOrigin>, StoreError> {
    let row = conn.query_opt("look an event up", EVENT_ORIGIN, &[&event]).await?;
    Ok(row.map(|row| EventOrigin {
        network_id: row.get(0),
        height: row.get(1),
        tx_hash: row.get(2),
        event_index: row.get(3),
        source_event_id: row.get(4),
        finality_status: row.get(5),
        is_reverted: row.get(6),
    }))
}

/// One numbered message of the live stream.
#[derive(Debug, Clone)]
pub struct StreamRow {
    /// Its number: gapless.
    pub pseq: i64,
    /// Subject with version.
    pub topic: String,
    /// Payload.
    pub payload: serde_json::Value,
    /// When it was written.
    pub at: OffsetDateTime,
}

const STREAM_READ: &str = "select pseq, topic, payload, at from projection.stream_read($1, $2)";
const STREAM_BOUNDS: &str = "select oldest, newest from projection.stream_bounds()";

/// Messages after `after`, in order.
pub async fn stream_read(conn: &Conn, after: i64, limit: i32) -> Result<Vec<StreamRow>, StoreError> {
    let rows = conn.query("read the stream", STREAM_READ, &[&after, &limit]).await?;
    Ok(rows
        .iter()
        .map(|row| StreamRow {
            pseq: row.get(0),
            topic: row.get(1),
            payload: row.get::<_, Option<serde_json::Value>>(2).unwrap_or_default(),
            at: row.get(3),
        })
        .collect())
}

/// Oldest message still there, and newest number.
pub async fn stream_bounds(conn: &Conn) -> Result<(Option<i64>, i64), StoreError> {
    let row = conn.query_one("read the stream's bounds", STREAM_BOUNDS, &[]).await?;
    Ok((row.get(0), row.get(1)))
}

const OPERATOR_FACTS: &str = "select projection.operator_facts()";

/// What the operator page shows of one database.
pub async fn operator_facts(conn: &Conn) -> Result<serde_json::Value, StoreError> {
    Ok(conn.query_one("read operator facts", OPERATOR_FACTS, &[]).await?.get(0))
}

const CACHE_HITS: &str = "
    select case when s.relname like 'transfers%' then 'transfers' else s.relname::text end as projection_table,
           (sum(s.heap_blks_hit + coalesce(s.idx_blks_hit, 0))
            / nullif(sum(s.heap_blks_hit + s.heap_blks_read + coalesce(s.idx_blks_hit, 0)
                         + coalesce(s.idx_blks_read, 0)), 0))::float8 as ratio
      from pg_catalog.pg_statio_user_tables s
     where s.schemaname = 'projection'
     group by 1";
/// S0 §15.3: share of block reads the database's cache answered, per projection table (partitions together).
pub async fn cache_hits(conn: &Conn) -> Result<Vec<(String, Option<f64>)>, StoreError> {
    let rows = conn.query("read cache hits", CACHE_HITS, &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

const OWNERSHIP_ROWS: &str = "
    select greatest(c.reltuples, 0)::float8 from pg_catalog.pg_class c
     where c.oid = 'projection.ownership_view'::pg_catalog.regclass";
const FINALITY_SHARES: &str = concat!(
    "select s.finality_status, (count(*) / sum(count(*)) over ())::float4
       from (select ",
    status_of!("o"),
    " as finality_status from projection.ownership_view o tablesample system ($1::float8) limit 10000) s
      group by 1"
);

/// S0 §15.3: share of ownership rows per finality status, of a sample: counting them would read the table.
pub async fn finality_shares(conn: &Conn) -> Result<Vec<(String, f32)>, StoreError> {
    const SAMPLE_ROWS: f64 = 5_000.0;
    let rows: f64 = conn.query_one("estimate ownership rows", OWNERSHIP_ROWS, &[]).await?.get(0);
    let percent = (100.0 * SAMPLE_ROWS / rows.max(1.0)).min(100.0);
    let rows = conn.query("sample finality shares", FINALITY_SHARES, &[&percent]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Do both pools look at one database?
pub fn is_same_database(app: &Db, raw: &Db) -> bool {
    app.url().expose() == raw.url().expose()
}

/// Every statement of this module by name: a test prepares them and proves their plans.
pub const STATEMENTS: &[(&str, &str)] = &[
    ("networks", NETWORKS),
    ("activity", ACTIVITY),
    ("collections_ranked", COLLECTIONS_RANKED),
    ("collections_ranked_in", COLLECTIONS_RANKED_IN),
    ("collections_by_id_order", COLLECTIONS_BY_ID_ORDER),
    ("collections_by_id_order_in", COLLECTIONS_BY_ID_ORDER_IN),
    ("collections", COLLECTIONS),
    ("collections_by_name", COLLECTIONS_BY_NAME),
    ("collections_by_address_prefix", COLLECTIONS_BY_ADDRESS_PREFIX),
    ("holders_ranked", HOLDERS_RANKED),
    ("holders_by_account", HOLDERS_BY_ACCOUNT),
    ("assets", ASSETS),
    ("assets_of_collection", ASSETS_OF_COLLECTION),
    ("assets_by_name", ASSETS_BY_NAME),
    ("owners", OWNERS),
    ("owners_at", OWNERS_AT),
    ("height_at", HEIGHT_AT),
    ("accounts", ACCOUNTS),
    ("accounts_by_prefix", ACCOUNTS_BY_PREFIX),
    ("holdings", HOLDINGS),
    ("holdings_at", HOLDINGS_AT),
    ("account_collections", ACCOUNT_COLLECTIONS),
    ("held_of_collections", HELD_OF_COLLECTIONS),
    ("transfers", TRANSFERS),
    ("transfers_of_asset", TRANSFERS_OF_ASSET),
    ("transfers_of_collection", TRANSFERS_OF_COLLECTION),
    ("transfers_of_account", TRANSFERS_OF_ACCOUNT),
    ("transfers_of_block", TRANSFERS_OF_BLOCK),
    ("transfers_of_tx", TRANSFERS_OF_TX),
    ("kinds", KINDS),
    ("kinds_of_asset", KINDS_OF_ASSET),
    ("kinds_of_collection", KINDS_OF_COLLECTION),
    ("kinds_of_account", KINDS_OF_ACCOUNT),
    ("kinds_of_block", KINDS_OF_BLOCK),
    ("kinds_of_tx", KINDS_OF_TX),
    ("stretch", STRETCH),
    ("stretch_of_asset", STRETCH_OF_ASSET),
    ("stretch_of_collection", STRETCH_OF_COLLECTION),
    ("stretch_of_account", STRETCH_OF_ACCOUNT),
    ("stretch_of_block", STRETCH_OF_BLOCK),
    ("stretch_of_tx", STRETCH_OF_TX),
    ("transfers_forward", TRANSFERS_FORWARD),
    ("blocks_at", BLOCKS_AT),
    ("blocks_by_hash", BLOCKS_BY_HASH),
    ("raw_tx_lookup", RAW_TX_LOOKUP),
    ("raw_transaction", RAW_TRANSACTION),
    ("raw_block_hash", RAW_BLOCK_HASH),
    ("raw_events", RAW_EVENTS),
    ("event_origin", EVENT_ORIGIN),
    ("stream_read", STREAM_READ),
    ("stream_bounds", STREAM_BOUNDS),
    ("operator_facts", OPERATOR_FACTS),
    ("cache_hits", CACHE_HITS),
    ("ownership_rows", OWNERSHIP_ROWS),
    ("finality_shares", FINALITY_SHARES),
];
