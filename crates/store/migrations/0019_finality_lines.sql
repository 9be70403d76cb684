-- A row that rests on something above finality says on which height (open_height). When finality passes that height
-- the row is final as it stands; writing it again would touch every index of it. The line below which the
-- read models are final is kept here, by the projector, in the transaction that projects what led to it.
create table projection.finality_lines (
    network_id integer primary key,
    height     bigint not null
);

-- Rows of an asset that may still change by a reorg, and rows that wait for finality to be removed.
drop index projection.ownership_view_open;
create index ownership_view_open on projection.ownership_view (asset_id, open_height) where open_height is not null;
create index ownership_view_empty on projection.ownership_view (asset_id) where qty = 0;
-- An account's assets are read as two ordered ranges of ownership_view_by_account, one per stored status.
drop index projection.ownership_view_by_account_asset;

comment on column projection.ownership_view.finality_status is
    'as it was when the row was written: ownership_now says what it is now';
comment on column projection.asset_cards.finality_status is
    'as it was when the row was written: cards_now says what it is now';

-- What the rows say now.
create view projection.ownership_now as
    select o.asset_id, o.account_id, o.network_id, o.collection_id, o.qty,
           case when o.open_height > coalesce(l.height, -1) then o.qty_finalized else o.qty end as qty_finalized,
           case when o.open_height is null or o.open_height <= coalesce(l.height, -1) then 'finalized'
                when o.open_height <= coalesce(n.head_height, n.projected_height) - n.confirmations then 'confirmed'
                else 'pending' end::ledger.event_finality_status as finality_status,
           case when o.open_height > coalesce(l.height, -1) then o.open_height end as open_height, o.updated_at
      from projection.ownership_view o
      left join projection.finality_lines l on l.network_id = o.network_id
      left join projection.network_status n on n.network_id = o.network_id;

create view projection.cards_now as
    select c.asset_id, c.network_id, c.collection_id, c.token_id, c.standard, c.name, c.image_url, c.is_stub,
           c.is_burned, c.supply, c.history,
           case when c.open_height is null or c.open_height <= coalesce(l.height, -1) then 'finalized'
                when c.open_height <= coalesce(n.head_height, n.projected_height) - n.confirmations then 'confirmed'
                else 'pending' end::ledger.event_finality_status as finality_status,
           case when c.open_height > coalesce(l.height, -1) then c.open_height end as open_height, c.last_height,
           c.updated_at
      from projection.asset_cards c
      left join projection.finality_lines l on l.network_id = c.network_id
      left join projection.network_status n on n.network_id = c.network_id;

create or replace view projection.portfolio_assets as
    select o.account_id, o.asset_id, o.network_id, o.collection_id, o.qty, o.qty_finalized, o.finality_status,
           o.updated_at, c.token_id, c.standard, c.name, c.image_url, c.is_stub, c.is_burned, c.history,
           null::numeric as estimated_value_usd
      from projection.ownership_now o
      join projection.asset_cards c on c.asset_id = o.asset_id;
