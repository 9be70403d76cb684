-- An event of the log is final when its block is at or below its network's line and did not leave the chain. Writing it
-- again when it is confirmed, and once more when it is final, touched every index of it twice (ADR 0021).
alter table ledger.network_progress add column confirmed_height bigint not null default -1;
comment on column ledger.network_progress.confirmed_height is
    'canonical events at or below are confirmed: enough blocks are above them';

comment on column ledger.normalized_event_keys.finality_status is
    'as it was when the row was written: ledger.events_now says what it is now';
comment on column ledger.normalized_events.finality_status is
    'as it was when the row was written: ledger.events_now says what it is now';

-- Rows that live wrote stay in normalized_event_keys_open; statements ask for blocks above the line.
drop index ledger.normalized_event_keys_pending;
create index normalized_event_keys_reverted on ledger.normalized_event_keys (network_id, block_number) where is_reverted;

create function ledger.status_now(reverted boolean, block_number bigint, finalized_height bigint, confirmed_height bigint)
    returns ledger.event_finality_status
    language sql immutable parallel safe
    -- Each label is cast by itself: so the body is immutable too, and is expanded where it is called.
    return case when reverted then 'reverted'::ledger.event_finality_status
                when block_number <= finalized_height then 'finalized'::ledger.event_finality_status
                when block_number <= confirmed_height then 'confirmed'::ledger.event_finality_status
                else 'pending'::ledger.event_finality_status end;

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
      from ledger.normalized_event_keys k
      join ledger.events_now e on e.network_id = k.network_id and e.id = k.normalized_event_id
     where k.normalized_event_id = event
$$;
