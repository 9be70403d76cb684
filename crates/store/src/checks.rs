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
        select e.asset_id, l.account_id, sum(l.qty) as qty
          from ledger.normalized_events e
         cross join lateral (values (e.from_account_id, -abs(e.qty_delta)),
                                    (e.to_account_id, abs(e.qty_delta))) l (account_id, qty)
         where e.asset_id between $3 and $4 and e.qty_delta is not null
           and e.network_id = $1 and not e.is_reverted
           and e.block_number <= (select finalized_height from ledger.network_progress where network_id = $1)
           and l.account_id is not null
           and not exists (select 1 from ledger.quarantine q
                            where q.consumer = 'state-updater' and q.resolved_at is null
                              and q.normalized_event_id = e.id)
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
    select e.asset_id, format('event %s is a %s from %s to %s of %s', e.id, e.event_kind, e.from_account_id,
                  e.to_account_id, e.qty_delta)
      from ledger.normalized_events e
     where e.network_id = $1 and e.id between $3 and $4 and e.qty_delta is not null
       and case e.event_kind
           when 'mint' then e.from_account_id is not null or e.to_account_id is null or e.qty_delta < 0
           when 'opening' then e.from_account_id is not null or e.to_account_id is null or e.qty_delta < 0
           when 'burn' then e.from_account_id is null or e.to_account_id is not null or e.qty_delta > 0
           when 'transfer' then e.from_account_id is null or e.to_account_id is null or e.qty_delta < 0
           else false end
     limit $2",
    },
    Check {
        name: "applied_events_exist_and_stand",
        sql: "
    select null::uuid, format('%s applied event %s, which is %s', a.consumer, a.normalized_event_id,
                  case when e.is_reverted then 'reverted' when e.block_number is null then 'not in the log'
                       else 'not final' end)
      from ledger.applied_events a
      left join ledger.normalized_events e on e.id = a.normalized_event_id
     where a.normalized_event_id between $3 and $4
       and ((e.network_id = $1
             and (e.is_reverted or e.block_number > (select finalized_height from ledger.network_progress
                                                      where network_id = $1)))
            or e.id is null)
     limit $2",
    },
    Check {
        name: "final_events_are_applied",
        sql: "
    select null::uuid, format('event %s of block %s is final and was not applied', e.id, e.block_number)
      from ledger.normalized_events e
      join ledger.network_progress p on p.network_id = e.network_id
     where e.id between $3 and $4
       and e.network_id = $1 and not e.is_reverted
       and e.block_number > p.history_height and e.block_number <= p.finalized_height
       and not exists (select 1 from ledger.applied_events a
                        where a.consumer = 'state-updater' and a.normalized_event_id = e.id)
       and not exists (select 1 from ledger.applied_events_archive a
                        where a.consumer = 'state-updater' and a.normalized_event_id = e.id)
       and not exists (select 1 from ledger.quarantine q
                        where q.consumer = 'state-updater' and q.normalized_event_id = e.id)
     limit $2",
    },
    Check {
        name: "reverted_events_say_so",
        sql: "
    select e.asset_id, format('event %s of block %s is %s, and reverted: %s', e.id, e.block_number, e.finality_status,
                  e.is_reverted)
      from ledger.normalized_events e
     where e.id between $3 and $4 and e.network_id = $1 and e.is_reverted <> (e.finality_status = 'reverted')
     limit $2",
    },
    Check {
        name: "open_legs_equal_the_open_log",
        sql: "
    with log as (
        select e.asset_id, l.account_id, e.id as normalized_event_id, l.leg, l.qty as qty_delta
          from ledger.normalized_events e
         cross join lateral (values (0::smallint, e.from_account_id, -abs(e.qty_delta)),
                                    (1::smallint, e.to_account_id, abs(e.qty_delta))) l (leg, account_id, qty)
         where e.asset_id between $3 and $4 and e.qty_delta is not null
           and e.network_id = $1 and not e.is_reverted
           and e.block_number > (select finalized_height from ledger.network_progress where network_id = $1)
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
                  e.id, e.block_number, e.finality_status, p.finalized_height)
      from ledger.normalized_events e
      join ledger.network_progress p on p.network_id = e.network_id
     where e.id between $3 and $4 and e.network_id = $1
       and e.finality_status = 'finalized' and e.block_number > p.finalized_height
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
