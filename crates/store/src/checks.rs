//! Invariants of the ledger as statements: each gives the rows that break it, so none means good.

use tidemark_model::ids::{AssetId, NetworkId};
use uuid::Uuid;

use crate::db::{StoreError, Tx};

/// One invariant.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    /// Its name.
    pub name: &'static str,
    /// `$1` is the network, `$2` the most rows to name, `$3` and `$4` the first and last id of the slice to look
    /// at: asset ids, or event ids where it is about events. The asset (if it is about one), and one text that
    /// names the row and what is wrong.
    pub sql: &'static str,
}

/// All invariants that are one statement; the digest is checked by its own function.
pub const CHECKS: &[Check] = &[
    Check {
        name: "owners_equal_the_log",
        sql: "
    with log as (
        select d.asset_id, l.account_id, sum(l.qty) as qty
          from ledger.normalized_event_keys k
          join ledger.normalized_event_deltas d on d.normalized_event_id = k.normalized_event_id
         cross join lateral (values (d.from_account_id, -abs(d.qty_delta)),
                                    (d.to_account_id, abs(d.qty_delta))) l (account_id, qty)
         where d.asset_id between $3 and $4
           and k.network_id = $1 and not k.is_reverted
           and k.block_number <= (select finalized_height from ledger.network_progress where network_id = $1)
           and l.account_id is not null
           and not exists (select 1 from ledger.quarantine q
                            where q.consumer = 'state-updater' and q.resolved_at is null
                              and q.normalized_event_id = k.normalized_event_id)
         group by 1, 2 having sum(l.qty) <> 0
    ), now as (
        select asset_id, account_id, qty from ledger.ownership_current
         where asset_id between $3 and $4 and network_id = $1
    )
    select asset_id, format('asset %s account %s: owns %s, the log says %s', asset_id, account_id,
                  coalesce(now.qty, 0), coalesce(log.qty, 0))
      from now full join log using (asset_id, account_id)
     where now.qty is distinct from log.qty
     limit $2",
    },
    Check {
        name: "history_sums_to_owners",
        sql: "
    with past as (
        select asset_id, account_id, sum(qty_delta) as qty from ledger.ownership_history
         where asset_id between $3 and $4 and network_id = $1 group by 1, 2 having sum(qty_delta) <> 0
    ), now as (
        select asset_id, account_id, qty from ledger.ownership_current
         where asset_id between $3 and $4 and network_id = $1
    )
    select asset_id, format('asset %s account %s: owns %s, the history sums to %s', asset_id, account_id,
                  coalesce(now.qty, 0), coalesce(past.qty, 0))
      from now full join past using (asset_id, account_id)
     where now.qty is distinct from past.qty
     limit $2",
    },
    Check {
        name: "balances_are_positive",
        sql: "
    select asset_id, format('asset %s account %s owns %s', asset_id, account_id, qty)
      from ledger.ownership_current
     where asset_id between $3 and $4 and network_id = $1 and qty <= 0 limit $2",
    },
    Check {
        name: "single_tokens_have_one_owner",
        sql: "
    select o.asset_id, format('asset %s has %s owners of %s units', o.asset_id, count(*), sum(o.qty))
      from ledger.ownership_current o join catalog.assets a on a.id = o.asset_id
     where o.asset_id between $3 and $4 and o.network_id = $1 and not a.is_fungible_class
     group by o.asset_id having count(*) > 1 or sum(o.qty) > 1
     limit $2",
    },
    Check {
        name: "supply_is_what_owners_hold",
        sql: "
    select a.id, format('asset %s has a supply of %s, its owners hold %s', a.id, a.supply, coalesce(o.qty, 0))
      from catalog.assets a
      left join (select asset_id, sum(qty) as qty from ledger.ownership_current
                  where asset_id between $3 and $4 and network_id = $1 group by 1) o on o.asset_id = a.id
     where a.id between $3 and $4 and a.network_id = $1 and a.supply <> coalesce(o.qty, 0)
     limit $2",
    },
    Check {
        name: "movements_fit_their_kind",
        sql: "
    select d.asset_id, format('event %s is a %s from %s to %s of %s', e.id, e.event_kind, d.from_account_id,
                  d.to_account_id, d.qty_delta)
      from ledger.normalized_events e
      join ledger.normalized_event_deltas d on d.normalized_event_id = e.id
     where e.network_id = $1 and e.id between $3 and $4
       and case e.event_kind
           when 'mint' then d.from_account_id is not null or d.to_account_id is null or d.qty_delta < 0
           when 'opening' then d.from_account_id is not null or d.to_account_id is null or d.qty_delta < 0
           when 'burn' then d.from_account_id is null or d.to_account_id is not null or d.qty_delta > 0
           when 'transfer' then d.from_account_id is null or d.to_account_id is null or d.qty_delta < 0
           else false end
     limit $2",
    },
    Check {
        name: "applied_events_exist_and_stand",
        sql: "
    select null::uuid, format('%s applied event %s, which is %s', a.consumer, a.normalized_event_id,
                  case when k.is_reverted then 'reverted' when k.block_number is null then 'not in the log'
                       else 'not final' end)
      from ledger.applied_events a
      left join ledger.normalized_event_keys k on k.normalized_event_id = a.normalized_event_id
     where a.normalized_event_id between $3 and $4
       and ((k.network_id = $1
             and (k.is_reverted or k.block_number > (select finalized_height from ledger.network_progress
                                                      where network_id = $1)))
            or k.normalized_event_id is null)
     limit $2",
    },
    Check {
        name: "final_events_are_applied",
        sql: "
    select null::uuid, format('event %s of block %s is final and was not applied', k.normalized_event_id, k.block_number)
      from ledger.normalized_event_keys k
      join ledger.network_progress p on p.network_id = k.network_id
     where k.normalized_event_id between $3 and $4
       and k.network_id = $1 and not k.is_reverted
       and k.block_number > p.history_height and k.block_number <= p.finalized_height
       and not exists (select 1 from ledger.applied_events a
                        where a.consumer = 'state-updater' and a.normalized_event_id = k.normalized_event_id)
       and not exists (select 1 from ledger.applied_events_archive a
                        where a.consumer = 'state-updater' and a.normalized_event_id = k.normalized_event_id)
       and not exists (select 1 from ledger.quarantine q
                        where q.consumer = 'state-updater' and q.normalized_event_id = k.normalized_event_id)
     limit $2",
    },
    Check {
        name: "keys_and_events_agree",
        sql: "
    select e.asset_id, format('event %s: its key says block %s %s, its row says block %s %s',
                  coalesce(k.normalized_event_id, e.id), k.block_number, k.finality_status, e.block_number,
                  e.finality_status)
      from (select * from ledger.normalized_event_keys
             where normalized_event_id between $3 and $4 and network_id = $1) k
      full join (select * from ledger.normalized_events
                  where id between $3 and $4 and network_id = $1) e on e.id = k.normalized_event_id
     where (k.block_number, k.block_hash, k.finality_status, k.is_reverted) is distinct from
           (e.block_number, e.block_hash, e.finality_status, e.is_reverted)
        or k.is_reverted <> (k.finality_status = 'reverted')
     limit $2",
    },
    Check {
        name: "open_legs_equal_the_open_log",
        sql: "
    with log as (
        select d.asset_id, l.account_id, d.normalized_event_id, l.leg, l.qty as qty_delta
          from ledger.normalized_event_keys k
          join ledger.normalized_event_deltas d on d.normalized_event_id = k.normalized_event_id
         cross join lateral (values (0::smallint, d.from_account_id, -abs(d.qty_delta)),
                                    (1::smallint, d.to_account_id, abs(d.qty_delta))) l (leg, account_id, qty)
         where d.asset_id between $3 and $4
           and k.network_id = $1 and not k.is_reverted
           and k.block_number > (select finalized_height from ledger.network_progress where network_id = $1)
           and l.account_id is not null and l.qty <> 0
    ), open as (
        select asset_id, account_id, normalized_event_id, leg, qty_delta
          from ledger.unfinalized_deltas where asset_id between $3 and $4 and network_id = $1
    )
    select asset_id, format('leg %s of event %s: open %s, the log says %s', leg, normalized_event_id,
                  coalesce(open.qty_delta, 0), coalesce(log.qty_delta, 0))
      from open full join log using (asset_id, account_id, normalized_event_id, leg)
     where open.qty_delta is distinct from log.qty_delta
     limit $2",
    },
    Check {
        name: "finality_never_regressed",
        sql: "
    select null::uuid, format('event %s of block %s was written as %s, the ledger is final up to %s',
                  k.normalized_event_id, k.block_number, k.finality_status, p.finalized_height)
      from ledger.normalized_event_keys k
      join ledger.network_progress p on p.network_id = k.network_id
     where k.normalized_event_id between $3 and $4 and k.network_id = $1
       and k.finality_status = 'finalized' and k.block_number > p.finalized_height
     limit $2",
    },
];

/// A slice of everything by the first byte of ids, which are hashes: all slices are of one size. A slice of
/// assets is a bucket of the digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slice {
    /// Everything.
    All,
    /// One of 256.
    One(u8),
    /// Ids whose first two bytes are in this range, both ends in it.
    Part(u16, u16),
}

impl Slice {
    /// First and last id.
    pub fn bounds(self) -> (Uuid, Uuid) {
        match self {
            Self::All => (Uuid::nil(), Uuid::max()),
            Self::One(slice) => {
                let first = u128::from(slice) << 120;
                (Uuid::from_u128(first), Uuid::from_u128(first | (u128::MAX >> 8)))
            }
            Self::Part(first, last) => {
                let last = u128::from(last) << 112 | (u128::MAX >> 16);
                (Uuid::from_u128(u128::from(first) << 112), Uuid::from_u128(last))
            }
        }
    }
    /// The buckets of the digest that it completes: a digest is checked whole.
    pub fn buckets(self) -> Option<std::ops::RangeInclusive<u8>> {
        match self {
            Self::All => Some(0..=u8::MAX),
            Self::One(slice) => Some(slice..=slice),
            Self::Part(_, last) => {
                let [bucket, rest] = last.to_be_bytes();
                (rest == u8::MAX).then_some(bucket..=bucket)
            }
        }
    }
}

/// A row that breaks an invariant: its asset, if it is about one, and the rest in words.
pub type Broken = (Option<AssetId>, String);

/// Rows of a slice that break an invariant, at most `at_most` of them.
pub async fn run(
    tx: &Tx<'_>,
    check: &Check,
    network: NetworkId,
    slice: Slice,
    at_most: i64,
) -> Result<Vec<Broken>, StoreError> {
    let (first, last) = slice.bounds();
    let rows = tx
        .query("check an invariant of the ledger", check.sql, &[&network.0, &at_most, &first, &last])
        .await?;
    Ok(rows.iter().map(|row| (row.get::<_, Option<Uuid>>(0).map(AssetId), row.get(1))).collect())
}

const SET_ASIDE: &str = "
    insert into ledger.quarantine
        (normalized_event_id, consumer, network_id, source_event_id, block_number, asset_id, reason, evidence)
    select u.id, 'verify', $1, u.detail, 0, u.asset, u.name, jsonb_build_object('detail', u.detail)
      from unnest($2::uuid[], $3::uuid[], $4::text[], $5::text[]) u (id, asset, name, detail)
     order by u.id
    on conflict (consumer, normalized_event_id) do nothing
    returning normalized_event_id";

/// Keeps broken rows for an operator, each once; gives how many were new. `ids` name them.
pub async fn set_aside(
    tx: &Tx<'_>,
    network: NetworkId,
    ids: &[Uuid],
    broken: &[(&'static str, Broken)],
) -> Result<usize, StoreError> {
    if broken.is_empty() {
        return Ok(0);
    }
    let assets: Vec<Option<Uuid>> = broken.iter().map(|(_, (asset, _))| asset.map(|id| id.0)).collect();
    let names: Vec<&str> = broken.iter().map(|(name, _)| *name).collect();
    let details: Vec<&str> = broken.iter().map(|(_, (_, detail))| detail.as_str()).collect();
    let rows =
        tx.query("keep broken rows", SET_ASIDE, &[&network.0, &ids, &assets, &names, &details]).await?;
    Ok(rows.len())
}
