//! What each projection must hold, as SQL. Every macro takes the text that selects the keys, so that live
//! recomputation by key, a full rebuild, its catch-up and reconciliation all run the same definition.

/// Below this height the read models of the row's network are final.
macro_rules! line_of {
    ($of:expr) => {
        concat!(
            "coalesce((select fl.height from projection.finality_lines fl where fl.network_id = ",
            $of,
            ".network_id), -1)"
        )
    };
}
pub(crate) use line_of;

/// Is the row (of ownership_view or asset_cards) above the line? Then its columns count as they are written;
/// at or below it, what is written is final as it stands.
macro_rules! is_open {
    ($of:expr) => {
        concat!("coalesce(", $of, ".open_height > ", $crate::projection::truth::line_of!($of), ", false)")
    };
}
pub(crate) use is_open;

/// ownership_view. `keys`: (asset_id, account_id); network and collection come from the catalog, unless the caller
/// says from where. qty = finalized balance plus unfinalized legs; pending while
/// there are such legs, with the newest one's height, which readers hold against the head; no row when both
/// quantities are zero.
macro_rules! ownership_truth {
    ($keys:expr) => {
        $crate::projection::truth::ownership_truth!(
            $keys,
            "a.network_id",
            "a.collection_id",
            "join catalog.assets a on a.id = k.asset_id"
        )
    };
    ($keys:expr, $network:expr, $collection:expr, $join:expr) => {
        concat!(
            "select x.asset_id, x.account_id, x.network_id, x.collection_id, x.qty, x.qty_finalized, x.finality_status,
                    x.open_height
               from (select k.asset_id, k.account_id, ", $network, " as network_id, ", $collection, " as collection_id,
                            coalesce(c.qty, 0) + coalesce(u.net, 0) as qty,
                            coalesce(c.qty, 0) as qty_finalized,
                            case when u.open_height is null then 'finalized'
                                 else 'pending' end::ledger.event_finality_status as finality_status, u.open_height
                       from (", $keys, ") k
                       ", $join, "
                       left join ledger.ownership_current c
                              on c.asset_id = k.asset_id and c.account_id = k.account_id
                       left join lateral (
                            select sum(d.qty_delta) as net, max(d.block_number) as open_height
                              from ledger.unfinalized_deltas d
                             where d.asset_id = k.asset_id and d.account_id = k.account_id) u on true) x
              where x.qty <> 0 or x.qty_finalized <> 0"
        )
    };
}
pub(crate) use ownership_truth;

/// asset_cards without last_height. `keys`: (asset_id), and what `more` selects of them besides; or `from`: rows of
/// catalog.assets as `a`, what is `open` of them as `u`, and whether that has a mint or a burn. supply = finalized
/// supply plus the net of unfinalized mints and burns; burned = nothing is left of something that was, and no holder
/// from before our start is unknown.
macro_rules! card_truth {
    ($keys:expr) => {
        $crate::projection::truth::card_truth!($keys, "")
    };
    ($keys:expr, $more:expr) => {
        $crate::projection::truth::card_truth!(
            from: concat!("(", $keys, ") k join catalog.assets a on a.id = k.asset_id"),
            open: "(select sum(d.qty_delta) as net, max(d.block_number) as open_height
                      from ledger.unfinalized_deltas d where d.asset_id = a.id)",
            // `offset 0`: the legs of the asset are looked up; sorted by event there would be a whole index to read.
            made_or_burned: "exists (select from (select normalized_event_id, qty_delta from ledger.unfinalized_deltas
                                                   where asset_id = a.id offset 0) d
                                      group by d.normalized_event_id having sum(d.qty_delta) <> 0)",
            more: $more
        )
    };
    (from: $from:expr, open: $open:expr, made_or_burned: $made_or_burned:expr, more: $more:expr) => {
        concat!(
            "select a.id as asset_id, a.network_id, a.collection_id, a.token_id_raw as token_id,
                    a.standard_id as standard, a.is_stub, a.history,
                    a.supply + coalesce(u.net, 0) as supply,
                    a.supply + coalesce(u.net, 0) = 0
                        and (a.is_burned or a.supply <> 0 or ", $made_or_burned, ")
                        and not (a.is_fungible_class and a.history = 'partial') as is_burned,
                    case when u.open_height is null then 'finalized'
                         else 'pending' end::ledger.event_finality_status as finality_status,
                    u.open_height", $more, "
               from ", $from, "
               left join lateral ", $open, " u on true"
        )
    };
}
pub(crate) use card_truth;

/// Height of the newest transfer that is not reverted of the asset `asset` of network `network`; 0 when there
/// is none. One step into an index of each partition, however long the history: `any(array[…])` keeps the planner,
/// while it has no statistics, from walking the primary key down from the newest height instead.
macro_rules! last_height_truth {
    ($network:expr, $asset:expr) => {
        concat!(
            "coalesce((select max(lt.height) from projection.transfers lt
                        where lt.network_id = any(array[",
            $network,
            "]) and lt.asset_id = ",
            $asset,
            " and not lt.is_reverted), 0)"
        )
    };
}
pub(crate) use last_height_truth;

/// transfers, with what a live delivery says besides. `keys`: (network_id, event_id).
macro_rules! transfer_truth {
    ($keys:expr) => {
        concat!(
            "select e.network_id, e.block_number as height, e.event_index, e.sub_index::int as sub_index,
                    e.id as event_id, e.event_kind as kind, e.asset_id, a.collection_id,
                    e.from_account_id as from_account, e.to_account_id as to_account, abs(e.qty_delta) as qty,
                    e.tx_hash, e.block_hash, e.event_time, e.is_reverted, a.token_id_raw
               from (", $keys, ") i
               join ledger.normalized_events e
                 on e.network_id = i.network_id and e.id = i.event_id and e.qty_delta is not null
               join catalog.assets a on a.id = e.asset_id
              where e.event_kind in ('transfer', 'mint', 'burn')"
        )
    };
}
pub(crate) use transfer_truth;

/// collection_holders, from ownership_view. `filter` is a condition on `o`.
macro_rules! holder_truth {
    ($filter:expr) => {
        concat!(
            "select o.collection_id, o.account_id, count(*) as asset_count, sum(o.qty) as qty
               from projection.ownership_view o
              where o.qty > 0 and ",
            $filter,
            "
              group by o.collection_id, o.account_id"
        )
    };
}
pub(crate) use holder_truth;

/// collection_stats, from asset_cards, collection_holders and transfers. `filter` is a condition on
/// `collection_id`, which all three have; `transfers` one on transfers instead.
macro_rules! stats_truth {
    ($filter:expr) => {
        $crate::projection::truth::stats_truth!($filter, $filter)
    };
    ($filter:expr, $transfers:expr) => {
        concat!(
            "select c.id as collection_id, c.network_id, t.address_normalized as address, t.standard_id as standard,
                    c.slug, c.name, c.verified, c.is_stub, t.reliability, t.unreliable_reason,
                    coalesce(h.owners, 0) as owners_count, x.assets as asset_count, x.supply as total_supply,
                    x.stubs as stub_count, coalesce(m.transfers, 0) as transfer_count, x.height as last_height
               from (select collection_id, count(*) filter (where supply > 0) as assets, sum(supply) as supply,
                            count(*) filter (where is_stub) as stubs, max(last_height) as height
                       from projection.asset_cards where ", $filter, " group by collection_id) x
               join catalog.collections c on c.id = x.collection_id
               join catalog.contracts t on t.id = c.contract_id
               left join (select collection_id, count(*) as owners
                            from projection.collection_holders where ", $filter, " group by collection_id) h
                      on h.collection_id = x.collection_id
               left join (select collection_id, count(*) as transfers
                            from projection.transfers where not is_reverted and ", $transfers, "
                           group by collection_id) m
                      on m.collection_id = x.collection_id"
        )
    };
}
pub(crate) use stats_truth;

/// account_summaries, from ownership_view (or other rows of `holdings`) and transfers. The filters are conditions on
/// `account_id`, `from_account` and `to_account`.
macro_rules! account_truth {
    ($account:expr, $from:expr, $to:expr) => {
        $crate::projection::truth::account_truth!("projection.ownership_view", $account, $from, $to)
    };
    ($holdings:expr, $account:expr, $from:expr, $to:expr) => {
        concat!(
            "select a.id as account_id, a.network_id, a.address_normalized as address,
                    x.assets as asset_count, x.transfers as transfer_count, a.first_seen_at,
                    greatest(a.first_seen_at, x.seen) as last_seen_at
               from (select p.account_id, sum(p.assets)::bigint as assets, sum(p.transfers)::bigint as transfers,
                            max(p.seen) as seen
                       from (select account_id, 1 as assets, 0 as transfers, null::timestamptz as seen
                               from ", $holdings, " where qty > 0 and ", $account, "
                             union all
                             select from_account, 0, 1, event_time from projection.transfers
                              where not is_reverted and from_account is not null and ", $from, "
                             union all
                             select to_account, 0, 1, event_time from projection.transfers
                              where not is_reverted and to_account is not null
                                and from_account is distinct from to_account and ", $to, ") p
                      group by p.account_id) x
               join ledger.accounts a on a.id = x.account_id"
        )
    };
}
pub(crate) use account_truth;
