-- What the projectors need for themselves beside the read models.

-- Where an event that may still move stands in projection.transfers: that table has no index on event_id (it
-- would cost every row of history), and only events above finality can move to another block. `turn` counts
-- the live deliveries of the event, so that going back and forth between two branches gives new ids.
create table if not exists projection.transfer_positions (
    event_id    uuid primary key,
    network_id  int not null,
    height      bigint not null,
    event_index int not null,
    sub_index   int not null,
    turn        bigint not null default 0
);
create index if not exists transfer_positions_by_height on projection.transfer_positions (network_id, height);

-- The holders of an asset whose row depends on something above finality: a class with a million holders is
-- refreshed at the cost of those few.
create index if not exists ownership_view_open on projection.ownership_view (asset_id)
    where finality_status <> 'finalized';
