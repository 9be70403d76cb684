-- What the API may read. Its role sees projection.* and nothing else; the few reads that need history, the
-- backbone or raw rows go through the functions below: owned by us, by key only, bounded, read-only.

-- The role of the API. Where we may not create roles, an administrator makes it before migrating.
do $$
begin
    if not exists (select 1 from pg_roles where rolname = 'tidemark_api') then
        create role tidemark_api nologin;
    end if;
exception
    when duplicate_object or unique_violation or insufficient_privilege then null;
end $$;
-- Our login may act as it (`set role`); a superuser may anyway.
do $$
begin
    execute format('grant tidemark_api to %I', current_user);
exception
    when others then raise notice 'tidemark_api could not be granted to %: %', current_user, sqlerrm;
end $$;

-- Prefix search. The name indexes are partial: stubs have no name and cost nothing.
create index collection_stats_by_name on projection.collection_stats (lower(name) text_pattern_ops)
    where name is not null;
create index collection_stats_by_address on projection.collection_stats (address text_pattern_ops);
create index asset_cards_by_name on projection.asset_cards (lower(name) text_pattern_ops) where name is not null;

-- Owners of an asset as they were when block `at_height` was final. ownership_history holds finalized legs.
create function projection.owners_at(asset uuid, at_height bigint, after_account uuid, rows_max int)
returns table (account_id uuid, qty numeric, since_height bigint, since timestamptz)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select h.account_id, sum(h.qty_delta), max(h.block_number), max(h.event_time)
      from ledger.ownership_history h
     where h.asset_id = asset and h.block_number <= at_height and h.account_id > after_account
     group by h.account_id
    having sum(h.qty_delta) > 0
     order by h.account_id
     limit least(rows_max, 101)
$$;

-- Assets of an account as they were when block `at_height` was final.
create function projection.holdings_at(account uuid, at_height bigint, after_asset uuid, rows_max int)
returns table (asset_id uuid, qty numeric)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select h.asset_id, sum(h.qty_delta)
      from ledger.ownership_history h
     where h.account_id = account and h.block_number <= at_height and h.asset_id > after_asset
     group by h.asset_id
    having sum(h.qty_delta) > 0
     order by h.asset_id
     limit least(rows_max, 101)
$$;

-- The highest known block at or before `at`. Block times grow with height, so this is a binary search over
-- the primary key: some forty index probes and no index on time.
create function projection.height_at(network int, at timestamptz) returns bigint
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
    low bigint; high bigint; middle bigint; seen bigint; seen_time timestamptz;
begin
    select b.height, b.block_time into low, seen_time
      from projection.block_cards b where b.network_id = network order by b.height limit 1;
    if low is null or seen_time > at then return null; end if;
    select b.height into high
      from projection.block_cards b where b.network_id = network order by b.height desc limit 1;
    -- Invariant: the block at `low` is not after `at`; every block above `high` is.
    while low < high loop
        middle := low + (high - low + 1) / 2;
        select b.height, b.block_time into seen, seen_time
          from projection.block_cards b
         where b.network_id = network and b.height <= middle order by b.height desc limit 1;
        if seen_time <= at then
            if seen <= low then
                -- Nothing between low and middle: look above it.
                select b.height into seen from projection.block_cards b
                 where b.network_id = network and b.height > middle and b.height <= high
                 order by b.height limit 1;
                if seen is null then return low; end if;
                select b.block_time into seen_time from projection.block_cards b
                 where b.network_id = network and b.height = seen;
                if seen_time > at then return low; end if;
            end if;
            low := seen;
        else
            high := seen - 1;
        end if;
    end loop;
    return low;
end $$;

-- The live stream: what the relay numbered of stream `projection`, in order, without holes.
create function projection.stream_read(after bigint, rows_max int)
returns table (pseq bigint, topic text, payload jsonb, at timestamptz)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select l.pseq, o.topic, o.envelope -> 'payload', o.created_at
      from (select b.pseq, b.outbox_day, b.outbox_seq
              from system.bus_log b
             where b.stream = 'projection' and b.part = 0 and b.pseq > after
             order by b.pseq
             limit least(rows_max, 1000)) l
      -- Lateral with a limit: one probe per row, never a scan of a day's outbox.
     cross join lateral (select e.topic, e.envelope, e.created_at from system.outbox_events e
                          where e.day = l.outbox_day and e.seq = l.outbox_seq limit 1) o
     order by l.pseq
$$;

-- Oldest and newest number still there; null and 0 for an empty log.
create function projection.stream_bounds() returns table (oldest bigint, newest bigint)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select (select b.pseq from system.bus_log b where b.stream = 'projection' and b.part = 0
             order by b.pseq limit 1),
           greatest(
               coalesce((select b.pseq from system.bus_log b where b.stream = 'projection' and b.part = 0
                          order by b.pseq desc limit 1), 0),
               coalesce((select p.next_pseq - 1 from system.bus_partitions p
                          where p.stream = 'projection' and p.part = 0), 0))
$$;

-- Raw rows, lookup first, then partition (S1 §6.5). These read the raw database.
create function projection.raw_tx_lookup(network int, hash bytea)
returns table (height bigint, tx_index int, block_time timestamptz)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select l.block_height, l.tx_index, l.block_time
      from raw.tx_lookup l where l.network_id = network and l.id = hash
     order by l.block_height desc limit 1
$$;

create function projection.raw_transaction(network int, at_height bigint, hash bytea)
returns table (tx_index int, sender bytea, receiver bytea, value numeric, succeeded boolean, payload jsonb,
               payload_ref text)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select t.tx_index, t.sender, t.receiver, t.value, t.succeeded, t.payload, t.payload_ref
      from raw.transactions t where t.network_id = network and t.block_height = at_height and t.id = hash
$$;

-- `hash` null: all events of the block.
create function projection.raw_events(network int, at_height bigint, hash bytea, after_index int, rows_max int)
returns table (event_index int, tx_id bytea, tx_index int, block_hash bytea, emitter bytea, topics bytea,
               data bytea, payload jsonb, payload_ref text)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select e.event_index, e.tx_id, e.tx_index, e.block_hash, e.emitter, e.topics, e.data, e.payload, e.payload_ref
      from raw.events e
     where e.network_id = network and e.block_height = at_height and e.event_index > after_index
       and (hash is null or e.tx_id = hash)
     order by e.event_index
     limit least(rows_max, 101)
$$;

-- Where a canonical event stands on chain, so that its raw row can be read by key.
create function projection.event_origin(event uuid)
returns table (network_id int, height bigint, tx_hash bytea, event_index int, source_event_id text,
               finality_status text, is_reverted boolean)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select e.network_id, e.block_number, e.tx_hash, e.event_index, e.source_event_id,
           e.finality_status::text, e.is_reverted
      from ledger.normalized_event_keys k
      join ledger.normalized_events e on e.network_id = k.network_id and e.id = k.normalized_event_id
     where k.normalized_event_id = event
$$;

-- Everything the operator page shows, as one document. Called on both databases; each knows its own side.
create function projection.operator_facts() returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
    waiting bigint;
begin
    -- Outbox rows the relay has not numbered: those outside its last snapshot window.
    begin
        select count(*) into waiting from (
            select 1 from system.relay_cursor r
              join system.outbox_events o
                on o.xid >= pg_snapshot_xmin(r.snapshot::pg_snapshot)
               and not pg_visible_in_snapshot(o.xid, r.snapshot::pg_snapshot)
             limit 10001) w;
    exception when others then
        waiting := null;
    end;
    return jsonb_build_object(
        'outbox_waiting', waiting,
        'relay', (select jsonb_build_object('owner', r.owner, 'updated_at', r.updated_at) from system.relay_cursor r),
        'heads', (select coalesce(jsonb_agg(jsonb_build_object(
                'network_id', h.network_id, 'latest_height', h.latest_height, 'finalized_height', h.finalized_height,
                'halted_reason', h.halted_reason, 'updated_at', h.updated_at) order by h.network_id), '[]')
            from system.network_heads h),
        'cursors', (select coalesce(jsonb_agg(jsonb_build_object(
                'network_id', c.network_id, 'id', c.id, 'height', c.last_processed_block,
                'updated_at', c.updated_at) order by c.id), '[]')
            from (select * from system.sync_cursors order by id limit 100) c),
        'ledger', (select coalesce(jsonb_agg(jsonb_build_object(
                'network_id', p.network_id, 'head_height', p.head_height, 'finalized_height', p.finalized_height,
                'history_height', p.history_height, 'updated_at', p.updated_at) order by p.network_id), '[]')
            from ledger.network_progress p),
        'streams', (select coalesce(jsonb_agg(jsonb_build_object(
                'stream', s.stream, 'written', s.written, 'published', s.published) order by s.stream), '[]')
            from (select b.stream, sum(b.next_pseq - 1) as written, sum(b.published_pseq) as published
                    from system.bus_partitions b group by b.stream) s),
        'consumers', (select coalesce(jsonb_agg(jsonb_build_object(
                'handler_kind', c.handler_kind, 'stream', c.stream, 'depth', c.depth, 'owners', c.owners,
                'updated_at', c.updated_at) order by c.handler_kind, c.stream), '[]')
            from (select p.handler_kind, p.stream,
                         sum(greatest(coalesce(b.next_pseq - 1, 0) - p.pseq, 0)) as depth,
                         count(distinct p.owner) as owners, max(p.updated_at) as updated_at
                    from system.consumer_positions p
                    left join system.bus_partitions b on b.stream = p.stream and b.part = p.part
                   group by p.handler_kind, p.stream) c),
        'leases', (select coalesce(jsonb_agg(jsonb_build_object(
                'worker_type', l.worker_type, 'network_id', l.network_id, 'active', l.active,
                'failed', l.failed, 'from_height', l.from_height, 'to_height', l.to_height)
                order by l.worker_type, l.network_id), '[]')
            from (select w.worker_type, w.network_id, count(*) filter (where w.status = 'ACTIVE') as active,
                         count(*) filter (where w.status = 'FAILED') as failed,
                         min(w.from_height) as from_height, max(w.to_height) as to_height
                    from app.worker_leases w where w.status <> 'COMPLETED'
                   group by w.worker_type, w.network_id) l),
        'processes', (select coalesce(jsonb_agg(jsonb_build_object(
                'instance', p.instance, 'role', p.role, 'state', p.state, 'restarts', p.restarts,
                'last_error', left(p.last_error, 300), 'heartbeat_at', p.heartbeat_at)
                order by p.role, p.instance), '[]')
            from (select * from system.processes order by heartbeat_at desc limit 100) p),
        'dlq_open', (select count(*) from system.dlq d where d.resolved_at is null),
        'dlq', (select coalesce(jsonb_agg(jsonb_build_object(
                'id', d.id, 'handler_kind', d.handler_kind, 'topic', d.source_topic, 'key', d.partition_key,
                'kind', d.kind, 'error', left(d.error, 300), 'attempts', d.attempts, 'failed_at', d.failed_at)), '[]')
            from (select * from system.dlq where resolved_at is null
                   order by handler_kind, partition_key, pseq limit 20) d),
        'parked', (select coalesce(jsonb_agg(jsonb_build_object(
                'handler_kind', k.handler_kind, 'stream', k.stream, 'key', k.partition_key, 'pseq', k.pseq,
                'parked_at', k.parked_at)), '[]')
            from (select * from system.parked_keys order by handler_kind, stream, partition_key limit 50) k),
        'quarantine_open', (select count(*) from ledger.quarantine q where q.resolved_at is null),
        'quarantine', (select coalesce(jsonb_agg(jsonb_build_object(
                'network_id', q.network_id, 'block_number', q.block_number, 'consumer', q.consumer,
                'source_event_id', q.source_event_id, 'reason', left(q.reason, 300),
                'quarantined_at', q.quarantined_at)), '[]')
            from (select * from ledger.quarantine where resolved_at is null
                   order by quarantined_at desc limit 20) q),
        'reorgs', (select coalesce(jsonb_agg(jsonb_build_object(
                'network_id', r.network_id, 'reorg_id', r.reorg_id, 'from_height', r.from_height,
                'to_height', r.to_height, 'blocks', r.blocks, 'checked_at', r.checked_at)), '[]')
            from (select c.network_id, c.reorg_id, min(c.block_number) as from_height,
                         max(c.block_number) as to_height, count(*) as blocks, max(c.checked_at) as checked_at
                    from system.reorg_checkpoints c where not c.is_canonical
                   group by c.network_id, c.reorg_id order by max(c.checked_at) desc limit 20) r),
        'errors_open', (select count(*) from app.indexing_errors e where not e.resolved),
        'errors', (select coalesce(jsonb_agg(jsonb_build_object(
                'worker_name', e.worker_name, 'network_id', e.network_id, 'block_height', e.block_height,
                'severity', e.severity, 'message', left(e.message, 300), 'occurrences', e.occurrences,
                'last_seen_at', e.last_seen_at)), '[]')
            from (select * from app.indexing_errors where not resolved
                   order by worker_name, created_at desc limit 20) e));
end $$;

-- Functions are open to everybody unless said otherwise; these see more than their caller.
revoke execute on all functions in schema projection from public;
do $$
begin
    grant usage on schema projection to tidemark_api;
    grant select on all tables in schema projection to tidemark_api;
    grant execute on all functions in schema projection to tidemark_api;
    -- Tables the projectors make later (rebuilds beside the live table) are readable too.
    alter default privileges in schema projection grant select on tables to tidemark_api;
exception
    when undefined_object or insufficient_privilege then null;
end $$;
