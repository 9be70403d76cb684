-- What the API learned to ask.

-- Assets of a collection are listed by token id. Canonical decimals have no leading zeros, so "shorter first,
-- then by byte" is their numeric order, and it is a total order for token ids that are no numbers too.
create index asset_cards_by_token on projection.asset_cards
    (collection_id, length(token_id), (token_id collate "C"), asset_id);
drop index projection.asset_cards_by_collection;
-- The same without stubs, for require_metadata; stubs cost nothing here.
create index asset_cards_by_token_named on projection.asset_cards
    (collection_id, length(token_id), (token_id collate "C"), asset_id) where not is_stub;
-- Collections of a network by id, the order that no write changes.
create index collection_stats_by_network on projection.collection_stats (network_id, collection_id);

-- Which block the watermark stands on: after a reorg of the same height it is still that of the old branch.
alter table projection.network_status add column projected_hash bytea;

-- What the operator page counts and lists stays cheap however much was resolved.
create index quarantine_open on ledger.quarantine (quarantined_at desc) where resolved_at is null;
create index reorg_checkpoints_recent on system.reorg_checkpoints (checked_at desc) where not is_canonical;

create function projection.raw_block_hash(network int, at_height bigint) returns bytea
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select b.hash from raw.blocks b where b.network_id = network and b.height = at_height
$$;

-- Everything the operator page shows, as one document. Called on both databases; each knows its own side.
create or replace function projection.operator_facts() returns jsonb
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
            -- Where Postgres is the bus, what is numbered is published.
            from (select b.stream, sum(b.next_pseq - 1) as written,
                         sum(case when b.engine = 'postgres' then b.next_pseq - 1 else b.published_pseq end)
                             as published
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
                    from (select * from system.reorg_checkpoints where not is_canonical
                           order by checked_at desc limit 2000) c
                   group by c.network_id, c.reorg_id order by max(c.checked_at) desc limit 20) r),
        'errors_open', (select count(*) from app.indexing_errors e where not e.resolved),
        'errors', (select coalesce(jsonb_agg(jsonb_build_object(
                'worker_name', e.worker_name, 'network_id', e.network_id, 'block_height', e.block_height,
                'severity', e.severity, 'message', left(e.message, 300), 'occurrences', e.occurrences,
                'last_seen_at', e.last_seen_at)), '[]')
            from (select * from app.indexing_errors where not resolved
                   order by worker_name, created_at desc limit 20) e));
end $$;

-- Numbers have no holes, so a page is a range of them: one index range whatever the planner believes. `after` may
-- lie before the oldest number still kept.
create or replace function projection.stream_read(after bigint, rows_max int)
returns table (pseq bigint, topic text, payload jsonb, at timestamptz)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select l.pseq, o.topic, o.envelope -> 'payload', o.created_at
      from (select greatest(after, coalesce((select b.pseq - 1 from system.bus_log b
                                              where b.stream = 'projection' and b.part = 0
                                              order by b.pseq limit 1), after)) as low) f
     cross join lateral (select b.pseq, b.outbox_day, b.outbox_seq
                           from system.bus_log b
                          where b.stream = 'projection' and b.part = 0
                            and b.pseq > f.low and b.pseq <= f.low + least(rows_max, 1000)
                          order by b.pseq
                          limit 1000) l
      -- Lateral with a limit: one probe per row, never a scan of a day's outbox.
     cross join lateral (select e.topic, e.envelope, e.created_at from system.outbox_events e
                          where e.day = l.outbox_day and e.seq = l.outbox_seq limit 1) o
     order by l.pseq
$$;

revoke execute on all functions in schema projection from public;
do $$
begin
    grant execute on all functions in schema projection to tidemark_api;
exception
    when undefined_object or insufficient_privilege then null;
end $$;
