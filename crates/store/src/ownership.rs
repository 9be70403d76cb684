//! Who owns how much: finalized state now, and at any height or time before. Writing adds signed changes and
//! never reads an asset's history; reading the past sums one asset's or one account's history.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::U256;
use tidemark_model::ids::{AccountId, AssetId, EventId, Height, NetworkId};
use tidemark_model::quantity::SignedQty;
use time::OffsetDateTime;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::copy::CopyBuffer;
use crate::db::{Conn, StoreError, Tx};
use crate::ledger::{Pair, pair_columns, quantity};
use crate::together::both;

const BALANCES: &str = "
    select o.asset_id, o.account_id, o.qty::text
      from unnest($1::uuid[], $2::uuid[]) u (asset, account)
      join ledger.ownership_current o on o.asset_id = u.asset and o.account_id = u.account";

/// Finalized balances of these pairs; what is missing is zero.
pub async fn balances(tx: &Tx<'_>, pairs: &BTreeSet<Pair>) -> Result<BTreeMap<Pair, U256>, StoreError> {
    if pairs.is_empty() {
        return Ok(BTreeMap::new());
    }
    let (assets, accounts) = pair_columns(pairs.iter());
    let rows = tx.query("read balances", BALANCES, &[&assets, &accounts]).await?;
    rows.iter().map(|row| Ok((pair(row), quantity(row, 2)?))).collect()
}

/// A finalized balance that changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Balance {
    /// Of whom, in what.
    pub pair: Pair,
    /// What its row says; none if there is no row.
    pub was: Option<U256>,
    /// What it must say. Nothing: no row.
    pub is: U256,
}

const MAKE: &str = "
    insert into ledger.ownership_current (asset_id, account_id, network_id, qty, updated_at)
    select u.asset, u.account, $1, u.qty::numeric, now()
      from unnest($2::uuid[], $3::uuid[], $4::text[]) u (asset, account, qty)
     order by u.asset, u.account";
const CHANGE: &str = "
    update ledger.ownership_current o set qty = u.qty::numeric, updated_at = now()
      from unnest($1::uuid[], $2::uuid[], $3::text[]) u (asset, account, qty)
     where o.asset_id = u.asset and o.account_id = u.account";
const DROP: &str = "
    delete from ledger.ownership_current o
     using unnest($1::uuid[], $2::uuid[]) u (asset, account)
     where o.asset_id = u.asset and o.account_id = u.account";

/// Writes finalized balances that were read under the lock of the network's progress. Who gives a token away loses the
/// row at once: made nothing first and dropped afterwards, it would be written twice, with an entry in each index.
pub async fn write(tx: &Tx<'_>, network: NetworkId, balances: &[Balance]) -> Result<(), StoreError> {
    let of = |wanted: fn(&Balance) -> bool| {
        let rows: Vec<&Balance> = balances.iter().filter(|balance| wanted(balance)).collect();
        let (assets, accounts) = pair_columns(rows.iter().map(|balance| &balance.pair));
        let quantities: Vec<String> = rows.iter().map(|balance| balance.is.to_string()).collect();
        (assets, accounts, quantities)
    };
    let gone = of(|balance| balance.was.is_some() && balance.is.is_zero());
    let changed = of(|balance| balance.was.is_some() && !balance.is.is_zero());
    let made = of(|balance| balance.was.is_none() && !balance.is.is_zero());
    let drop = async {
        match gone.0.len() {
            0 => Ok(0),
            _ => tx.execute("drop empty balances", DROP, &[&gone.0, &gone.1]).await,
        }
    };
    let change = async {
        match changed.0.len() {
            0 => Ok(0),
            _ => tx.execute("change balances", CHANGE, &[&changed.0, &changed.1, &changed.2]).await,
        }
    };
    let make = async {
        match made.0.len() {
            0 => Ok(0),
            _ => tx.execute("make balances", MAKE, &[&network.0, &made.0, &made.1, &made.2]).await,
        }
    };
    let (dropped, (changed_rows, _)) = both(drop, both(change, make)).await?;
    let expected = gone.0.len() + changed.0.len();
    let found = usize::try_from(dropped + changed_rows).unwrap_or(usize::MAX);
    if found != expected {
        return Err(StoreError::Corrupt {
            what: "ledger.ownership_current".to_owned(),
            found: format!("{found} of {expected} balances that were read a moment ago"),
            hint: "somebody else writes it: stop that, then let `tidemark verify ledger` name what differs",
        });
    }
    Ok(())
}

/// One leg of ownership_history.
#[derive(Debug, Clone, PartialEq)]
pub struct HistoryLeg {
    /// The asset.
    pub asset: AssetId,
    /// Whose balance changed.
    pub account: AccountId,
    /// Block position.
    pub block_number: i64,
    /// Index in the block.
    pub event_index: i32,
    /// Gained or lost.
    pub qty: SignedQty,
    /// Block time.
    pub event_time: OffsetDateTime,
    /// The event.
    pub event: EventId,
}

const COPY_HISTORY: &str = "
    copy ledger.ownership_history
        (asset_id, account_id, network_id, block_number, event_index, qty_delta, event_time,
         normalized_event_id, leg)
    from stdin (format binary)";

/// Appends legs. The caller holds the claims of their events, so no leg comes twice.
pub async fn append_history(tx: &Tx<'_>, network: NetworkId, legs: &[HistoryLeg]) -> Result<u64, StoreError> {
    let mut rows = CopyBuffer::new(9);
    for leg in legs {
        rows.row()
            .uuid(leg.asset.0)
            .uuid(leg.account.0)
            .i32(network.0)
            .i64(leg.block_number)
            .i32(leg.event_index)
            .qty(leg.qty)
            .timestamp(leg.event_time)
            .uuid(leg.event.0)
            .i16(i16::from(!leg.qty.is_negative()));
    }
    tx.copy_in("append ownership history", COPY_HISTORY, rows).await
}

const DROP_HISTORY: &str = "
    delete from ledger.ownership_history where asset_id = any($1) and normalized_event_id = any($2)";

/// Takes the legs of events out of the history: an operator's rewind.
pub async fn drop_history(
    tx: &Tx<'_>,
    assets: &BTreeSet<AssetId>,
    events: &[EventId],
) -> Result<u64, StoreError> {
    let ids: Vec<Uuid> = events.iter().map(|id| id.0).collect();
    tx.execute("drop ownership history", DROP_HISTORY, &[&asset_uuids(assets), &ids]).await
}

// Quarantined movements were never applied; everything else that is final was.
const RECOMPUTE: &str = "
    select e.asset_id, l.account_id, sum(l.qty)::text
      from ledger.normalized_events e
      join ledger.network_progress p on p.network_id = e.network_id and e.block_number <= p.finalized_height
     cross join lateral (values (e.from_account_id, -abs(e.qty_delta)),
                                (e.to_account_id, abs(e.qty_delta))) l (account_id, qty)
     where e.asset_id = any($1) and e.qty_delta is not null and l.account_id is not null
       and not e.is_reverted
       and not exists (select 1 from ledger.quarantine q
                        where q.consumer = 'state-updater' and q.normalized_event_id = e.id
                          and q.resolved_at is null)
     group by 1, 2
    having sum(l.qty) <> 0";

/// Balances of assets from the event log alone, by whole history. For rewinds and repairs.
pub async fn recompute(tx: &Tx<'_>, assets: &BTreeSet<AssetId>) -> Result<BTreeMap<Pair, U256>, StoreError> {
    let rows = tx.query("recompute balances from the log", RECOMPUTE, &[&asset_uuids(assets)]).await?;
    rows.iter().map(|row| Ok((pair(row), quantity(row, 2)?))).collect()
}

const BURNT_AMONG: &str = "
    select distinct e.asset_id
      from ledger.normalized_events e
      join ledger.network_progress p on p.network_id = e.network_id and e.block_number <= p.finalized_height
     where e.asset_id = any($1) and e.qty_delta is not null and e.to_account_id is null and e.qty_delta <> 0
       and not e.is_reverted
       and not exists (select 1 from ledger.quarantine q
                        where q.consumer = 'state-updater' and q.normalized_event_id = e.id
                          and q.resolved_at is null)";

/// Of which of these assets something was burned, by the event log alone.
pub async fn burnt_among(tx: &Tx<'_>, assets: &BTreeSet<AssetId>) -> Result<BTreeSet<AssetId>, StoreError> {
    let rows = tx.query("look for burned assets", BURNT_AMONG, &[&asset_uuids(assets)]).await?;
    Ok(rows.iter().map(|row| AssetId(row.get(0))).collect())
}

const OF_ASSETS: &str = "
    select asset_id, account_id, qty::text from ledger.ownership_current where asset_id = any($1)";

/// All finalized balances of these assets.
pub async fn of_assets(tx: &Tx<'_>, assets: &BTreeSet<AssetId>) -> Result<BTreeMap<Pair, U256>, StoreError> {
    let rows = tx.query("read balances of assets", OF_ASSETS, &[&asset_uuids(assets)]).await?;
    rows.iter().map(|row| Ok((pair(row), quantity(row, 2)?))).collect()
}

/// A point in the past, inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsOf {
    /// After the block at this height.
    Height(Height),
    /// After all blocks at or before this time.
    Time(OffsetDateTime),
}

const OWNERS_AT_HEIGHT: &str = "
    select asset_id, account_id, sum(qty_delta)::text
      from ledger.ownership_history
     where asset_id = $1 and block_number <= $2
     group by 1, 2 having sum(qty_delta) <> 0 order by 2";
const OWNERS_AT_TIME: &str = "
    select asset_id, account_id, sum(qty_delta)::text
      from ledger.ownership_history
     where asset_id = $1 and event_time <= $2
     group by 1, 2 having sum(qty_delta) <> 0 order by 2";

/// Who owned an asset at a point in the past, by finalized events.
pub async fn owners_at(
    conn: &Conn,
    asset: AssetId,
    at: AsOf,
) -> Result<BTreeMap<AccountId, U256>, StoreError> {
    let rows = match at {
        AsOf::Height(height) => {
            conn.query("read owners at a height", OWNERS_AT_HEIGHT, &[&asset.0, &height.as_i64()]).await?
        }
        AsOf::Time(time) => conn.query("read owners at a time", OWNERS_AT_TIME, &[&asset.0, &time]).await?,
    };
    rows.iter().map(|row| Ok((pair(row).1, quantity(row, 2)?))).collect()
}

const HOLDINGS_AT_HEIGHT: &str = "
    select asset_id, account_id, sum(qty_delta)::text
      from ledger.ownership_history
     where account_id = $1 and block_number <= $2
     group by 1, 2 having sum(qty_delta) <> 0 order by 1";
const HOLDINGS_AT_TIME: &str = "
    select asset_id, account_id, sum(qty_delta)::text
      from ledger.ownership_history
     where account_id = $1 and event_time <= $2
     group by 1, 2 having sum(qty_delta) <> 0 order by 1";

/// What an account held at a point in the past, by finalized events.
pub async fn holdings_at(
    conn: &Conn,
    account: AccountId,
    at: AsOf,
) -> Result<BTreeMap<AssetId, U256>, StoreError> {
    let rows = match at {
        AsOf::Height(height) => {
            let height = height.as_i64();
            conn.query("read holdings at a height", HOLDINGS_AT_HEIGHT, &[&account.0, &height]).await?
        }
        AsOf::Time(time) => {
            conn.query("read holdings at a time", HOLDINGS_AT_TIME, &[&account.0, &time]).await?
        }
    };
    rows.iter().map(|row| Ok((pair(row).0, quantity(row, 2)?))).collect()
}

fn pair(row: &Row) -> Pair {
    (AssetId(row.get(0)), AccountId(row.get(1)))
}

fn asset_uuids(assets: &BTreeSet<AssetId>) -> Vec<Uuid> {
    assets.iter().map(|id| id.0).collect()
}
