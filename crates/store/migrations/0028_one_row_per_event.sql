-- One row for each event of the log, with what it moved (ADR 0026). Key, event and movement were three rows of three
-- tables with three primary keys that said the same: the id is a hash of the event's natural name, which begins with its
-- network, so that uniqueness of the id is uniqueness of all three. The old names stay for readers, as views.
do $$
begin
    if exists (select from ledger.normalized_event_deltas where delta_index <> 0) then
        raise exception 'an event of ledger.normalized_event_deltas has several movements'
            using hint = 'no version of Tidemark writes such rows: remove them, or index into a new database';
    end if;
end $$;

drop view ledger.events_now;
alter table ledger.normalized_events rename to normalized_events__old;

-- Fixed widths first: no room is lost between them.
create table ledger.normalized_events (
    block_number    bigint not null,
    event_time      timestamptz not null,
    network_id      int not null,
    event_index     int not null,
    event_kind      ledger.event_kind not null,
    finality_status ledger.event_finality_status not null,
    is_reverted     boolean not null default false,
    id              uuid not null,              -- uuidv5(source_event_id:sub_index)
    asset_id        uuid,
    collection_id   uuid,
    from_account_id uuid,
    to_account_id   uuid,
    qty_delta       numeric(78, 0),             -- negative for burns (design.md §5); null where nothing moves
    block_hash      bytea not null,
    tx_hash         bytea not null,
    source_event_id text not null,
    sub_index       text not null,
    blob_ref        text,
    constraint normalized_events_movement check (
        case when qty_delta is null then from_account_id is null and to_account_id is null
             else asset_id is not null end)
);
comment on column ledger.normalized_events.finality_status is
    'as it was when the row was written: ledger.events_now says what it is now';

insert into ledger.normalized_events
    (block_number, event_time, network_id, event_index, event_kind, finality_status, is_reverted, id, asset_id,
     collection_id, from_account_id, to_account_id, qty_delta, block_hash, tx_hash, source_event_id, sub_index, blob_ref)
select e.block_number, e.event_time, e.network_id, e.event_index, e.event_kind, e.finality_status, e.is_reverted, e.id,
       coalesce(d.asset_id, e.asset_id), e.collection_id, d.from_account_id, d.to_account_id, d.qty_delta, e.block_hash,
       e.tx_hash, e.source_event_id, e.sub_index, e.blob_ref
  from ledger.normalized_events__old e
  left join ledger.normalized_event_deltas d on d.normalized_event_id = e.id
 order by e.id;

drop table ledger.normalized_events__old, ledger.normalized_event_keys, ledger.normalized_event_deltas;

alter table ledger.normalized_events add constraint normalized_events_pkey primary key (id);
-- Only what may still change: small whatever the history.
create index normalized_events_open on ledger.normalized_events (network_id, block_number)
    where finality_status <> 'finalized';
create index normalized_events_reverted on ledger.normalized_events (network_id, block_number) where is_reverted;
-- Columns that no statement looks for: sampling them is most of what an analyze costs.
alter table ledger.normalized_events
    alter column source_event_id set statistics 0, alter column tx_hash set statistics 0,
    alter column block_hash set statistics 0;

-- Those that a long history does without come back with it.
do $$
declare
    by_asset constant text :=
        'create index normalized_events_by_asset on ledger.normalized_events (asset_id) where qty_delta is not null';
    by_time constant text :=
        'create index normalized_events_by_time on ledger.normalized_events (network_id, event_time desc)';
    is_away boolean;
begin
    with away as (
        delete from system.deferred_indexes
         where name in ('ledger.normalized_event_deltas_by_asset', 'ledger.normalized_events_by_time') returning 1)
    select count(*) > 0 into is_away from away;
    if is_away then
        insert into system.deferred_indexes (name, definition)
        values ('ledger.normalized_events_by_asset', by_asset), ('ledger.normalized_events_by_time', by_time);
    else
        execute by_asset;
        execute by_time;
    end if;
end $$;

create view ledger.normalized_event_keys as
    select e.id as normalized_event_id,
           sha256(convert_to(e.source_event_id || ':' || e.sub_index, 'UTF8')) as event_uid,
           e.source_event_id, e.sub_index, e.network_id, e.block_number, e.block_hash, e.finality_status, e.is_reverted
      from ledger.normalized_events e;
create view ledger.normalized_event_deltas as
    select e.id as normalized_event_id, 0 as delta_index, e.asset_id, e.from_account_id, e.to_account_id, e.qty_delta
      from ledger.normalized_events e
     where e.qty_delta is not null;

create view ledger.events_now as
    select e.id, e.source_event_id, e.sub_index, e.network_id, e.event_kind, e.asset_id, e.collection_id,
           e.block_number, e.block_hash, e.tx_hash, e.event_index, e.event_time,
           ledger.status_now(e.is_reverted, e.block_number, p.finalized_height, p.confirmed_height) as finality_status,
           e.is_reverted, e.blob_ref
      from ledger.normalized_events e
      left join ledger.network_progress p on p.network_id = e.network_id;

create or replace function projection.event_origin(event uuid)
    returns table (network_id integer, height bigint, tx_hash bytea, event_index integer, source_event_id text,
                   finality_status text, is_reverted boolean)
    language sql stable security definer
    set search_path = pg_catalog, pg_temp
as $$
    select e.network_id, e.block_number, e.tx_hash, e.event_index, e.source_event_id,
           e.finality_status::text, e.is_reverted
      from ledger.events_now e
     where e.id = event
$$;
