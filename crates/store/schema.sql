-- Made by `make bless` with pg_dump 15. Read it; change the migrations.

CREATE SCHEMA app;

CREATE SCHEMA catalog;

CREATE SCHEMA ledger;

CREATE SCHEMA market;

CREATE SCHEMA projection;

CREATE SCHEMA raw;

CREATE SCHEMA ref;

CREATE SCHEMA system;

CREATE TYPE ledger.event_finality_status AS ENUM (
    'pending',
    'confirmed',
    'finalized',
    'reverted'
);

CREATE TYPE ledger.event_kind AS ENUM (
    'transfer',
    'mint',
    'burn',
    'listing',
    'sale',
    'offer',
    'cancel',
    'opening',
    'metadata'
);

CREATE TYPE system.inbox_status AS ENUM (
    'PENDING',
    'ACK',
    'FAIL',
    'DLQ'
);

CREATE FUNCTION ledger.status_now(reverted boolean, block_number bigint, finalized_height bigint, confirmed_height bigint) RETURNS ledger.event_finality_status
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN reverted THEN 'reverted'::ledger.event_finality_status WHEN (block_number <= finalized_height) THEN 'finalized'::ledger.event_finality_status WHEN (block_number <= confirmed_height) THEN 'confirmed'::ledger.event_finality_status ELSE 'pending'::ledger.event_finality_status END;

CREATE FUNCTION projection.event_origin(event uuid) RETURNS TABLE(network_id integer, height bigint, tx_hash bytea, event_index integer, source_event_id text, finality_status text, is_reverted boolean)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    select e.network_id, e.block_number, e.tx_hash, e.event_index, e.source_event_id,
           e.finality_status::text, e.is_reverted
      from ledger.events_now e
     where e.id = event
$$;

CREATE FUNCTION projection.height_at(network integer, at timestamp with time zone) RETURNS bigint
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

CREATE FUNCTION projection.holdings_at(account uuid, at_height bigint, after_asset uuid, rows_max integer) RETURNS TABLE(asset_id uuid, qty numeric)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    select h.asset_id, sum(h.qty_delta)
      from ledger.ownership_history h
     where h.account_id = account and h.block_number <= at_height and h.asset_id > after_asset
     group by h.asset_id
    having sum(h.qty_delta) > 0
     order by h.asset_id
     limit least(rows_max, 101)
$$;

CREATE FUNCTION projection.operator_facts() RETURNS jsonb
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

CREATE FUNCTION projection.owners_at(asset uuid, at_height bigint, after_account uuid, rows_max integer) RETURNS TABLE(account_id uuid, qty numeric, since_height bigint, since timestamp with time zone)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    select h.account_id, sum(h.qty_delta), max(h.block_number), max(h.event_time)
      from ledger.ownership_history h
     where h.asset_id = asset and h.block_number <= at_height and h.account_id > after_account
     group by h.account_id
    having sum(h.qty_delta) > 0
     order by h.account_id
     limit least(rows_max, 101)
$$;

CREATE FUNCTION projection.raw_block_hash(network integer, at_height bigint) RETURNS bytea
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    select b.hash from raw.blocks b where b.network_id = network and b.height = at_height
$$;

CREATE FUNCTION projection.raw_events(network integer, at_height bigint, hash bytea, after_index integer, rows_max integer) RETURNS TABLE(event_index integer, tx_id bytea, tx_index integer, block_hash bytea, emitter bytea, topics bytea, data bytea, payload jsonb, payload_ref text)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    select e.event_index, e.tx_id, e.tx_index, e.block_hash, e.emitter, e.topics, e.data, e.payload, e.payload_ref
      from raw.events e
     where e.network_id = network and e.block_height = at_height and e.event_index > after_index
       and (hash is null or e.tx_id = hash)
     order by e.event_index
     limit least(rows_max, 101)
$$;

CREATE FUNCTION projection.raw_transaction(network integer, at_height bigint, hash bytea) RETURNS TABLE(tx_index integer, sender bytea, receiver bytea, value numeric, succeeded boolean, payload jsonb, payload_ref text)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    select t.tx_index, t.sender, t.receiver, t.value, t.succeeded, t.payload, t.payload_ref
      from raw.transactions t where t.network_id = network and t.block_height = at_height and t.id = hash
$$;

CREATE FUNCTION projection.raw_tx_lookup(network integer, hash bytea) RETURNS TABLE(height bigint, tx_index integer, block_time timestamp with time zone)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    select l.block_height, l.tx_index, l.block_time
      from raw.tx_lookup l where l.network_id = network and l.id = hash
     order by l.block_height desc limit 1
$$;

CREATE FUNCTION projection.stream_bounds() RETURNS TABLE(oldest bigint, newest bigint)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    select (select b.pseq from system.bus_log b where b.stream = 'projection' and b.part = 0
             order by b.pseq limit 1),
           greatest(
               coalesce((select b.pseq from system.bus_log b where b.stream = 'projection' and b.part = 0
                          order by b.pseq desc limit 1), 0),
               coalesce((select p.next_pseq - 1 from system.bus_partitions p
                          where p.stream = 'projection' and p.part = 0), 0))
$$;

CREATE FUNCTION projection.stream_read(after bigint, rows_max integer) RETURNS TABLE(pseq bigint, topic text, payload jsonb, at timestamp with time zone)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    select l.pseq, o.topic, (o.envelope -> 'payload')::jsonb, o.created_at
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

CREATE FUNCTION system.is_present(key bigint) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select exists (
        select from pg_locks l
        where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
          and l.database = (select d.oid from pg_database d where d.datname = current_database())
          and l.classid = ((key >> 32) & 4294967295)::oid and l.objid = (key & 4294967295)::oid)
$$;

CREATE TABLE app.indexing_checkpoints (
    worker_name text NOT NULL,
    network_id integer NOT NULL,
    height bigint NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE app.indexing_errors (
    id bigint NOT NULL,
    worker_name text NOT NULL,
    network_id integer NOT NULL,
    block_height bigint NOT NULL,
    transaction_id bytea DEFAULT '\x'::bytea NOT NULL,
    error_hash bytea NOT NULL,
    severity text NOT NULL,
    message text NOT NULL,
    raw_data text,
    raw_ref text,
    occurrences bigint DEFAULT 1 NOT NULL,
    resolved boolean DEFAULT false NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    last_seen_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT indexing_errors_severity_check CHECK ((severity = ANY (ARRAY['FATAL'::text, 'WARN'::text])))
);

ALTER TABLE app.indexing_errors ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME app.indexing_errors_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE app.worker_leases (
    id bigint NOT NULL,
    worker_type text NOT NULL,
    network_id integer NOT NULL,
    from_height bigint NOT NULL,
    to_height bigint NOT NULL,
    status text NOT NULL,
    leased_by text NOT NULL,
    lease_expires_at timestamp with time zone NOT NULL,
    attempt integer DEFAULT 0 NOT NULL,
    epoch bigint DEFAULT 1 NOT NULL,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT worker_leases_check CHECK ((from_height < to_height)),
    CONSTRAINT worker_leases_status_check CHECK ((status = ANY (ARRAY['ACTIVE'::text, 'COMPLETED'::text, 'FAILED'::text])))
);

ALTER TABLE app.worker_leases ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME app.worker_leases_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE catalog.assets (
    id uuid NOT NULL,
    network_id integer NOT NULL,
    collection_id uuid NOT NULL,
    token_id_raw text NOT NULL,
    token_id_num numeric(78,0),
    standard_id text NOT NULL,
    is_fungible_class boolean NOT NULL,
    is_burned boolean DEFAULT false NOT NULL,
    supply numeric(78,0) DEFAULT 0 NOT NULL,
    history text DEFAULT 'complete'::text NOT NULL,
    is_stub boolean DEFAULT true NOT NULL,
    first_seen_block bigint NOT NULL,
    current_metadata_version_id uuid,
    created_at timestamp with time zone NOT NULL,
    CONSTRAINT assets_history_check CHECK ((history = ANY (ARRAY['complete'::text, 'partial'::text])))
)
WITH (fillfactor='85');

CREATE TABLE catalog.collections (
    id uuid NOT NULL,
    network_id integer NOT NULL,
    contract_id uuid NOT NULL,
    slug text,
    name text,
    verified boolean DEFAULT false NOT NULL,
    is_stub boolean DEFAULT true NOT NULL,
    created_at timestamp with time zone NOT NULL
);

CREATE TABLE catalog.contracts (
    id uuid NOT NULL,
    network_id integer NOT NULL,
    address_normalized text NOT NULL,
    standard_id text NOT NULL,
    deployed_at_block bigint,
    is_verified boolean DEFAULT false NOT NULL,
    reliability text DEFAULT 'ok'::text NOT NULL,
    unreliable_reason text,
    CONSTRAINT contracts_reliability_check CHECK ((reliability = ANY (ARRAY['ok'::text, 'unreliable'::text])))
);

CREATE TABLE ledger.accounts (
    id uuid NOT NULL,
    network_id integer NOT NULL,
    address_normalized text NOT NULL,
    label text,
    is_contract boolean,
    first_seen_at timestamp with time zone NOT NULL
);

CREATE TABLE ledger.applied_events (
    consumer text NOT NULL,
    normalized_event_id uuid NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE ledger.applied_events_archive (
    consumer text NOT NULL,
    normalized_event_id uuid NOT NULL,
    applied_at timestamp with time zone NOT NULL
);

CREATE TABLE ledger.digest_history (
    network_id integer NOT NULL,
    height bigint NOT NULL,
    digest numeric(78,0) NOT NULL
);

CREATE TABLE ledger.digests (
    network_id integer NOT NULL,
    bucket smallint NOT NULL,
    digest numeric(78,0) NOT NULL,
    height bigint NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0');

CREATE TABLE ledger.network_progress (
    network_id integer NOT NULL,
    head_height bigint DEFAULT '-1'::integer NOT NULL,
    finalized_height bigint DEFAULT '-1'::integer NOT NULL,
    reported_finalized bigint DEFAULT '-1'::integer NOT NULL,
    history_height bigint DEFAULT '-1'::integer NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    read_models_due boolean DEFAULT false NOT NULL,
    confirmed_height bigint DEFAULT '-1'::integer NOT NULL,
    read_models_height bigint
);

COMMENT ON COLUMN ledger.network_progress.read_models_due IS 'projection.ownership_view, asset_cards, collection_holders, collection_stats and account_summaries are not kept: they stand at read_models_height';

COMMENT ON COLUMN ledger.network_progress.confirmed_height IS 'canonical events at or below are confirmed: enough blocks are above them';

COMMENT ON COLUMN ledger.network_progress.read_models_height IS 'While read_models_due: the height up to which they hold this network; null if they hold nothing of it';

CREATE TABLE ledger.normalized_events (
    block_number bigint NOT NULL,
    event_time timestamp with time zone NOT NULL,
    network_id integer NOT NULL,
    event_index integer NOT NULL,
    event_kind ledger.event_kind NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL,
    id uuid NOT NULL,
    asset_id uuid,
    collection_id uuid,
    from_account_id uuid,
    to_account_id uuid,
    qty_delta numeric(78,0),
    block_hash bytea NOT NULL,
    tx_hash bytea NOT NULL,
    source_event_id text NOT NULL,
    sub_index text NOT NULL,
    blob_ref text,
    CONSTRAINT normalized_events_movement CHECK (
CASE
    WHEN (qty_delta IS NULL) THEN ((from_account_id IS NULL) AND (to_account_id IS NULL))
    ELSE (asset_id IS NOT NULL)
END)
);
ALTER TABLE ONLY ledger.normalized_events ALTER COLUMN block_hash SET STATISTICS 0;
ALTER TABLE ONLY ledger.normalized_events ALTER COLUMN tx_hash SET STATISTICS 0;
ALTER TABLE ONLY ledger.normalized_events ALTER COLUMN source_event_id SET STATISTICS 0;

COMMENT ON COLUMN ledger.normalized_events.finality_status IS 'as it was when the row was written: ledger.events_now says what it is now';

CREATE VIEW ledger.events_now AS
 SELECT e.id,
    e.source_event_id,
    e.sub_index,
    e.network_id,
    e.event_kind,
    e.asset_id,
    e.collection_id,
    e.block_number,
    e.block_hash,
    e.tx_hash,
    e.event_index,
    e.event_time,
    ledger.status_now(e.is_reverted, e.block_number, p.finalized_height, p.confirmed_height) AS finality_status,
    e.is_reverted,
    e.blob_ref
   FROM (ledger.normalized_events e
     LEFT JOIN ledger.network_progress p ON ((p.network_id = e.network_id)));

CREATE TABLE ledger.log_heights (
    network_id integer NOT NULL,
    height bigint DEFAULT '-1'::integer NOT NULL
);

CREATE VIEW ledger.normalized_event_deltas AS
 SELECT e.id AS normalized_event_id,
    0 AS delta_index,
    e.asset_id,
    e.from_account_id,
    e.to_account_id,
    e.qty_delta
   FROM ledger.normalized_events e
  WHERE (e.qty_delta IS NOT NULL);

CREATE VIEW ledger.normalized_event_keys AS
 SELECT e.id AS normalized_event_id,
    sha256(convert_to(((e.source_event_id || ':'::text) || e.sub_index), 'UTF8'::name)) AS event_uid,
    e.source_event_id,
    e.sub_index,
    e.network_id,
    e.block_number,
    e.block_hash,
    e.finality_status,
    e.is_reverted
   FROM ledger.normalized_events e;

CREATE TABLE ledger.openings (
    asset_id uuid NOT NULL,
    account_id uuid NOT NULL,
    network_id integer NOT NULL,
    qty numeric(78,0) NOT NULL,
    state text NOT NULL,
    parts integer DEFAULT 0 NOT NULL,
    CONSTRAINT openings_state_check CHECK ((state = ANY (ARRAY['known'::text, 'implied'::text, 'unknown'::text])))
);

CREATE TABLE ledger.orphaned_blocks (
    network_id integer NOT NULL,
    block_hash bytea NOT NULL,
    block_number bigint NOT NULL,
    orphaned_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE ledger.ownership_current (
    asset_id uuid NOT NULL,
    account_id uuid NOT NULL,
    network_id integer NOT NULL,
    qty numeric(78,0) NOT NULL,
    finality_status ledger.event_finality_status DEFAULT 'finalized'::ledger.event_finality_status NOT NULL,
    updated_at timestamp with time zone NOT NULL
);

CREATE TABLE ledger.ownership_history (
    asset_id uuid NOT NULL,
    account_id uuid NOT NULL,
    network_id integer NOT NULL,
    block_number bigint NOT NULL,
    event_index integer NOT NULL,
    qty_delta numeric(78,0) NOT NULL,
    event_time timestamp with time zone NOT NULL,
    normalized_event_id uuid NOT NULL,
    leg smallint NOT NULL
)
PARTITION BY RANGE (event_time);

CREATE TABLE ledger.ownership_history_0000 (
    asset_id uuid NOT NULL,
    account_id uuid NOT NULL,
    network_id integer NOT NULL,
    block_number bigint NOT NULL,
    event_index integer NOT NULL,
    qty_delta numeric(78,0) NOT NULL,
    event_time timestamp with time zone NOT NULL,
    normalized_event_id uuid NOT NULL,
    leg smallint NOT NULL
);

CREATE TABLE ledger.quarantine (
    normalized_event_id uuid NOT NULL,
    consumer text NOT NULL,
    network_id integer NOT NULL,
    source_event_id text NOT NULL,
    block_number bigint NOT NULL,
    asset_id uuid,
    reason text NOT NULL,
    evidence jsonb NOT NULL,
    quarantined_at timestamp with time zone DEFAULT now() NOT NULL,
    resolved_at timestamp with time zone
);

CREATE TABLE ledger.recent_blocks (
    network_id integer NOT NULL,
    block_hash bytea NOT NULL,
    block_number bigint NOT NULL
);

CREATE TABLE ledger.unfinalized_deltas (
    asset_id uuid NOT NULL,
    account_id uuid NOT NULL,
    normalized_event_id uuid NOT NULL,
    leg smallint NOT NULL,
    network_id integer NOT NULL,
    block_number bigint NOT NULL,
    qty_delta numeric(78,0) NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');

CREATE TABLE projection.account_summaries (
    account_id uuid NOT NULL,
    network_id integer NOT NULL,
    address text NOT NULL,
    asset_count bigint DEFAULT 0 NOT NULL,
    transfer_count bigint DEFAULT 0 NOT NULL,
    first_seen_at timestamp with time zone NOT NULL,
    last_seen_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL
)
WITH (fillfactor='80');

CREATE TABLE projection.accounts_to_come (
    network_id integer NOT NULL,
    account_id uuid NOT NULL,
    assets bigint NOT NULL,
    id bigint NOT NULL
);

COMMENT ON TABLE projection.accounts_to_come IS 'What holdings that are caught up change in account_summaries, until it is added there';

ALTER TABLE projection.accounts_to_come ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME projection.accounts_to_come_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE projection.asset_cards (
    asset_id uuid NOT NULL,
    network_id integer NOT NULL,
    collection_id uuid NOT NULL,
    token_id text NOT NULL,
    standard text NOT NULL,
    name text,
    image_url text,
    is_stub boolean NOT NULL,
    is_burned boolean NOT NULL,
    supply numeric(78,0) NOT NULL,
    history text NOT NULL,
    floor_price_usd numeric,
    last_sale_usd numeric,
    composite_score numeric,
    finality_status ledger.event_finality_status NOT NULL,
    last_height bigint NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    open_height bigint
)
WITH (fillfactor='80');

COMMENT ON COLUMN projection.asset_cards.finality_status IS 'as it was when the row was written: cards_now says what it is now';

CREATE TABLE projection.block_cards (
    network_id integer NOT NULL,
    height bigint NOT NULL,
    hash bytea NOT NULL,
    parent_hash bytea NOT NULL,
    block_time timestamp with time zone NOT NULL,
    tx_count integer,
    event_count integer NOT NULL
);

CREATE TABLE projection.finality_lines (
    network_id integer NOT NULL,
    height bigint NOT NULL
);

CREATE TABLE projection.network_status (
    network_id integer NOT NULL,
    slug text NOT NULL,
    family text NOT NULL,
    start_block bigint NOT NULL,
    confirmations bigint NOT NULL,
    head_height bigint,
    head_time timestamp with time zone,
    ingested_height bigint,
    normalized_height bigint,
    finalized_height bigint,
    projected_height bigint,
    finalized_at timestamp with time zone,
    halted_reason text,
    events_total bigint DEFAULT 0 NOT NULL,
    reorgs_total bigint DEFAULT 0 NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    projected_hash bytea
);

CREATE VIEW projection.cards_now AS
 SELECT c.asset_id,
    c.network_id,
    c.collection_id,
    c.token_id,
    c.standard,
    c.name,
    c.image_url,
    c.is_stub,
    c.is_burned,
    c.supply,
    c.history,
    (
        CASE
            WHEN ((c.open_height IS NULL) OR (c.open_height <= COALESCE(l.height, ('-1'::integer)::bigint))) THEN 'finalized'::text
            WHEN (c.open_height <= (COALESCE(n.head_height, n.projected_height) - n.confirmations)) THEN 'confirmed'::text
            ELSE 'pending'::text
        END)::ledger.event_finality_status AS finality_status,
        CASE
            WHEN (c.open_height > COALESCE(l.height, ('-1'::integer)::bigint)) THEN c.open_height
            ELSE NULL::bigint
        END AS open_height,
    c.last_height,
    c.updated_at
   FROM ((projection.asset_cards c
     LEFT JOIN projection.finality_lines l ON ((l.network_id = c.network_id)))
     LEFT JOIN projection.network_status n ON ((n.network_id = c.network_id)));

CREATE TABLE projection.collection_holders (
    collection_id uuid NOT NULL,
    account_id uuid NOT NULL,
    asset_count bigint NOT NULL,
    qty numeric NOT NULL
);

CREATE TABLE projection.collection_stats (
    collection_id uuid NOT NULL,
    network_id integer NOT NULL,
    address text NOT NULL,
    standard text NOT NULL,
    slug text,
    name text,
    verified boolean DEFAULT false NOT NULL,
    is_stub boolean NOT NULL,
    reliability text DEFAULT 'ok'::text NOT NULL,
    unreliable_reason text,
    floor_price_usd numeric,
    volume_24h_usd numeric,
    volume_7d_usd numeric,
    volume_30d_usd numeric,
    listed_count bigint,
    owners_count bigint DEFAULT 0 NOT NULL,
    asset_count bigint DEFAULT 0 NOT NULL,
    total_supply numeric DEFAULT 0 NOT NULL,
    stub_count bigint DEFAULT 0 NOT NULL,
    transfer_count bigint DEFAULT 0 NOT NULL,
    last_height bigint DEFAULT 0 NOT NULL,
    updated_at timestamp with time zone NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0');

CREATE TABLE projection.network_activity (
    network_id integer NOT NULL,
    bucket timestamp with time zone NOT NULL,
    events bigint NOT NULL
);

CREATE TABLE projection.owners_ahead (
    id bigint NOT NULL,
    network_id integer NOT NULL,
    accounts uuid[] NOT NULL,
    assets bigint[] NOT NULL,
    collections uuid[] NOT NULL,
    owners bigint[] NOT NULL,
    CONSTRAINT owners_ahead_check CHECK (((cardinality(accounts) = cardinality(assets)) AND (cardinality(collections) = cardinality(owners))))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500', autovacuum_vacuum_cost_delay='0', toast.autovacuum_vacuum_scale_factor='0', toast.autovacuum_vacuum_threshold='5000', toast.autovacuum_vacuum_cost_delay='0');

COMMENT ON TABLE projection.owners_ahead IS 'Assets per account and owners per collection, more or fewer, that owners committed ahead of their block made';

ALTER TABLE projection.owners_ahead ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME projection.owners_ahead_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE projection.ownership_view (
    asset_id uuid NOT NULL,
    account_id uuid NOT NULL,
    network_id integer NOT NULL,
    collection_id uuid NOT NULL,
    qty numeric(78,0) NOT NULL,
    qty_finalized numeric(78,0) NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    open_height bigint
)
WITH (fillfactor='90');

COMMENT ON COLUMN projection.ownership_view.finality_status IS 'as it was when the row was written: ownership_now says what it is now';

CREATE VIEW projection.ownership_now AS
 SELECT o.asset_id,
    o.account_id,
    o.network_id,
    o.collection_id,
    o.qty,
        CASE
            WHEN (o.open_height > COALESCE(l.height, ('-1'::integer)::bigint)) THEN o.qty_finalized
            ELSE o.qty
        END AS qty_finalized,
    (
        CASE
            WHEN ((o.open_height IS NULL) OR (o.open_height <= COALESCE(l.height, ('-1'::integer)::bigint))) THEN 'finalized'::text
            WHEN (o.open_height <= (COALESCE(n.head_height, n.projected_height) - n.confirmations)) THEN 'confirmed'::text
            ELSE 'pending'::text
        END)::ledger.event_finality_status AS finality_status,
        CASE
            WHEN (o.open_height > COALESCE(l.height, ('-1'::integer)::bigint)) THEN o.open_height
            ELSE NULL::bigint
        END AS open_height,
    o.updated_at
   FROM ((projection.ownership_view o
     LEFT JOIN projection.finality_lines l ON ((l.network_id = o.network_id)))
     LEFT JOIN projection.network_status n ON ((n.network_id = o.network_id)));

CREATE VIEW projection.portfolio_assets AS
 SELECT o.account_id,
    o.asset_id,
    o.network_id,
    o.collection_id,
    o.qty,
    o.qty_finalized,
    o.finality_status,
    o.updated_at,
    c.token_id,
    c.standard,
    c.name,
    c.image_url,
    c.is_stub,
    c.is_burned,
    c.history,
    NULL::numeric AS estimated_value_usd
   FROM (projection.ownership_now o
     JOIN projection.asset_cards c ON ((c.asset_id = o.asset_id)));

CREATE TABLE projection.stats_to_come (
    network_id integer NOT NULL,
    collection_id uuid NOT NULL,
    assets bigint DEFAULT 0 NOT NULL,
    supply numeric DEFAULT 0 NOT NULL,
    stubs bigint DEFAULT 0 NOT NULL,
    owners bigint DEFAULT 0 NOT NULL,
    id bigint NOT NULL
);

COMMENT ON TABLE projection.stats_to_come IS 'What holders and cards that are caught up change in collection_stats, until it is added there';

ALTER TABLE projection.stats_to_come ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME projection.stats_to_come_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE projection.transfer_positions (
    event_id uuid NOT NULL,
    network_id integer NOT NULL,
    height bigint NOT NULL,
    event_index integer NOT NULL,
    sub_index integer NOT NULL,
    turn bigint DEFAULT 0 NOT NULL,
    asset_id uuid,
    from_account uuid,
    to_account uuid
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');

CREATE TABLE projection.transfers (
    network_id integer NOT NULL,
    height bigint NOT NULL,
    event_index integer NOT NULL,
    sub_index integer NOT NULL,
    event_id uuid NOT NULL,
    kind ledger.event_kind NOT NULL,
    asset_id uuid NOT NULL,
    collection_id uuid NOT NULL,
    from_account uuid,
    to_account uuid,
    qty numeric(78,0) NOT NULL,
    tx_hash bytea NOT NULL,
    block_hash bytea NOT NULL,
    event_time timestamp with time zone NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL
)
PARTITION BY LIST (network_id);

CREATE TABLE raw.block_lookup (
    network_id integer NOT NULL,
    height bigint NOT NULL,
    id bytea NOT NULL,
    block_time timestamp with time zone NOT NULL
)
PARTITION BY LIST (network_id);

CREATE TABLE raw.blocks (
    network_id integer NOT NULL,
    height bigint NOT NULL,
    hash bytea NOT NULL,
    parent_hash bytea NOT NULL,
    block_time timestamp with time zone NOT NULL,
    tx_count integer,
    event_count integer NOT NULL,
    payload jsonb,
    payload_hash bytea,
    payload_ref text
)
PARTITION BY LIST (network_id);

CREATE TABLE raw.events (
    network_id integer NOT NULL,
    block_height bigint NOT NULL,
    tx_id bytea NOT NULL,
    event_index integer NOT NULL,
    tx_index integer NOT NULL,
    block_hash bytea NOT NULL,
    emitter bytea NOT NULL,
    topics bytea NOT NULL,
    data bytea,
    payload jsonb,
    payload_hash bytea,
    payload_ref text
)
PARTITION BY LIST (network_id);

CREATE TABLE raw.orphaned_blocks (
    network_id integer NOT NULL,
    height bigint NOT NULL,
    hash bytea NOT NULL,
    parent_hash bytea NOT NULL,
    block_time timestamp with time zone NOT NULL,
    events jsonb NOT NULL,
    orphaned_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE raw.partitions (
    parent text NOT NULL,
    network_id integer NOT NULL,
    name text NOT NULL,
    from_height bigint NOT NULL,
    to_height bigint NOT NULL,
    indexed_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE raw.range_evidence (
    network_id integer NOT NULL,
    shard integer DEFAULT 0 NOT NULL,
    from_height bigint NOT NULL,
    to_height bigint NOT NULL,
    provider text NOT NULL,
    head_seen bigint NOT NULL,
    records bigint NOT NULL,
    foreign_records bigint NOT NULL,
    requests bigint NOT NULL,
    checks text[] NOT NULL,
    coverage text NOT NULL,
    accepted_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT range_evidence_check CHECK ((from_height < to_height))
);

CREATE TABLE raw.shard_blocks (
    network_id integer NOT NULL,
    shard integer NOT NULL,
    height bigint NOT NULL,
    event_count integer NOT NULL
);

CREATE TABLE raw.transactions (
    network_id integer NOT NULL,
    block_height bigint NOT NULL,
    id bytea NOT NULL,
    tx_index integer NOT NULL,
    sender bytea NOT NULL,
    receiver bytea,
    value numeric(78,0) NOT NULL,
    succeeded boolean,
    payload jsonb,
    payload_hash bytea,
    payload_ref text
)
PARTITION BY LIST (network_id);

CREATE TABLE raw.tx_lookup (
    network_id integer NOT NULL,
    block_height bigint NOT NULL,
    id bytea NOT NULL,
    tx_index integer NOT NULL,
    block_time timestamp with time zone NOT NULL,
    evm_hash bytea
)
PARTITION BY LIST (network_id);

CREATE TABLE ref.networks (
    id integer NOT NULL,
    slug text NOT NULL,
    family text NOT NULL,
    start_block bigint NOT NULL,
    confirmations bigint NOT NULL,
    chain_identity text,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE ref.standards (
    id text NOT NULL,
    is_fungible_class boolean NOT NULL
);

CREATE TABLE system.audit_log (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    target text NOT NULL,
    reason text,
    detail jsonb
);

ALTER TABLE system.audit_log ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME system.audit_log_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE system.bus_log (
    stream text NOT NULL,
    part smallint NOT NULL,
    pseq bigint NOT NULL,
    outbox_day date NOT NULL,
    outbox_seq bigint NOT NULL,
    numbered_at timestamp with time zone DEFAULT now() NOT NULL
)
PARTITION BY RANGE (outbox_day);

CREATE TABLE system.bus_log_default (
    stream text NOT NULL,
    part smallint NOT NULL,
    pseq bigint NOT NULL,
    outbox_day date NOT NULL,
    outbox_seq bigint NOT NULL,
    numbered_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE system.bus_partitions (
    stream text NOT NULL,
    part smallint NOT NULL,
    next_pseq bigint DEFAULT 1 NOT NULL,
    published_pseq bigint DEFAULT 0 NOT NULL,
    engine text DEFAULT 'postgres'::text NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

CREATE TABLE system.bus_streams (
    stream text NOT NULL,
    parts smallint NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE system.consumer_members (
    handler_kind text NOT NULL,
    owner text NOT NULL,
    session_key bigint,
    expires_at timestamp with time zone NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

CREATE TABLE system.consumer_positions (
    handler_kind text NOT NULL,
    stream text NOT NULL,
    part smallint NOT NULL,
    pseq bigint DEFAULT 0 NOT NULL,
    epoch bigint DEFAULT 0 NOT NULL,
    owner text,
    lease_expires_at timestamp with time zone,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    session_key bigint
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

CREATE TABLE system.consumers (
    handler_kind text NOT NULL,
    subjects text[] NOT NULL,
    side_effects boolean NOT NULL,
    declared_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE system.deferred_indexes (
    name text NOT NULL,
    definition text NOT NULL,
    dropped_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE system.dlq (
    id bigint NOT NULL,
    handler_kind text NOT NULL,
    source_topic text NOT NULL,
    stream text NOT NULL,
    part smallint NOT NULL,
    pseq bigint NOT NULL,
    partition_key text NOT NULL,
    event_id uuid NOT NULL,
    envelope jsonb NOT NULL,
    kind text NOT NULL,
    error text NOT NULL,
    error_chain text[] DEFAULT '{}'::text[] NOT NULL,
    attempts integer NOT NULL,
    versions jsonb DEFAULT '{}'::jsonb NOT NULL,
    failed_at timestamp with time zone DEFAULT now() NOT NULL,
    resolved_at timestamp with time zone,
    resolution text,
    resolved_by text,
    resolve_reason text,
    CONSTRAINT dlq_kind_check CHECK ((kind = ANY (ARRAY['poison'::text, 'follower'::text, 'schema'::text]))),
    CONSTRAINT dlq_resolution_check CHECK ((resolution = ANY (ARRAY['retried'::text, 'released'::text, 'discarded'::text])))
);

ALTER TABLE system.dlq ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME system.dlq_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE system.inbox (
    event_id uuid NOT NULL,
    event_day date NOT NULL,
    handler_kind text NOT NULL,
    status system.inbox_status DEFAULT 'PENDING'::system.inbox_status NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    last_error text,
    stream text NOT NULL,
    part smallint NOT NULL,
    pseq bigint NOT NULL,
    partition_key text NOT NULL,
    block_number bigint,
    first_seen_at timestamp with time zone DEFAULT now() NOT NULL,
    last_attempt_at timestamp with time zone
)
PARTITION BY RANGE (event_day);

CREATE TABLE system.inbox_default (
    event_id uuid NOT NULL,
    event_day date NOT NULL,
    handler_kind text NOT NULL,
    status system.inbox_status DEFAULT 'PENDING'::system.inbox_status NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    last_error text,
    stream text NOT NULL,
    part smallint NOT NULL,
    pseq bigint NOT NULL,
    partition_key text NOT NULL,
    block_number bigint,
    first_seen_at timestamp with time zone DEFAULT now() NOT NULL,
    last_attempt_at timestamp with time zone
);

CREATE TABLE system.job_runs (
    id bigint NOT NULL,
    job_type text NOT NULL,
    job_id text NOT NULL,
    attempt integer DEFAULT 1 NOT NULL,
    status text NOT NULL,
    detail jsonb,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    last_error text
);

ALTER TABLE system.job_runs ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME system.job_runs_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE system.migrations (
    name text NOT NULL,
    checksum bytea NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE system.network_heads (
    network_id integer NOT NULL,
    latest_height bigint NOT NULL,
    latest_hash bytea NOT NULL,
    safe_height bigint,
    finalized_height bigint,
    finalized_hash bytea,
    halted_reason text,
    halted_at timestamp with time zone,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE system.outbox_events (
    seq bigint NOT NULL,
    day date DEFAULT ((now() AT TIME ZONE 'utc'::text))::date NOT NULL,
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    id uuid NOT NULL,
    aggregate_type text NOT NULL,
    aggregate_id text NOT NULL,
    event_type text NOT NULL,
    topic text NOT NULL,
    stream text NOT NULL,
    part smallint NOT NULL,
    partition_key text NOT NULL,
    correlation_id uuid NOT NULL,
    retention_class text NOT NULL,
    tenant_id text NOT NULL,
    envelope json NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
)
PARTITION BY RANGE (day);

CREATE TABLE system.outbox_events_default (
    seq bigint NOT NULL,
    day date DEFAULT ((now() AT TIME ZONE 'utc'::text))::date NOT NULL,
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    id uuid NOT NULL,
    aggregate_type text NOT NULL,
    aggregate_id text NOT NULL,
    event_type text NOT NULL,
    topic text NOT NULL,
    stream text NOT NULL,
    part smallint NOT NULL,
    partition_key text NOT NULL,
    correlation_id uuid NOT NULL,
    retention_class text NOT NULL,
    tenant_id text NOT NULL,
    envelope json NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);
ALTER TABLE ONLY system.outbox_events_default ALTER COLUMN envelope SET STATISTICS 0;

ALTER TABLE system.outbox_events ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME system.outbox_events_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE system.parked_keys (
    handler_kind text NOT NULL,
    stream text NOT NULL,
    part smallint NOT NULL,
    partition_key text NOT NULL,
    pseq bigint NOT NULL,
    parked_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE system.processes (
    instance text NOT NULL,
    role text NOT NULL,
    state text NOT NULL,
    restarts bigint DEFAULT 0 NOT NULL,
    last_error text,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    heartbeat_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE system.reconciliation_runs (
    id bigint NOT NULL,
    projection text NOT NULL,
    sample_size bigint NOT NULL,
    mismatches_found bigint NOT NULL,
    mismatch_rate double precision NOT NULL,
    detail jsonb,
    checked_at timestamp with time zone DEFAULT now() NOT NULL
);

ALTER TABLE system.reconciliation_runs ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME system.reconciliation_runs_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE system.relay_cursor (
    id integer DEFAULT 1 NOT NULL,
    snapshot text NOT NULL,
    epoch bigint DEFAULT 0 NOT NULL,
    owner text,
    lease_expires_at timestamp with time zone,
    system_identifier text NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    window_end text,
    window_seq bigint,
    floor_seq bigint DEFAULT 0 NOT NULL,
    session_key bigint,
    CONSTRAINT relay_cursor_id_check CHECK ((id = 1))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

CREATE TABLE system.reorg_checkpoints (
    network_id integer NOT NULL,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    checked_at timestamp with time zone DEFAULT now() NOT NULL,
    is_canonical boolean NOT NULL,
    reorg_id text NOT NULL
);

CREATE TABLE system.replays (
    id text NOT NULL,
    handler_kind text NOT NULL,
    requested_by text NOT NULL,
    reason text,
    selector jsonb NOT NULL,
    status text NOT NULL,
    events bigint DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone
);

CREATE TABLE system.sync_cursors (
    id text NOT NULL,
    network_id integer NOT NULL,
    cursor_type text NOT NULL,
    start_height bigint NOT NULL,
    last_processed_block bigint NOT NULL,
    last_processed_hash bytea,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    shard integer DEFAULT 0 NOT NULL
);

ALTER TABLE ONLY ledger.ownership_history ATTACH PARTITION ledger.ownership_history_0000 FOR VALUES FROM (MINVALUE) TO (MAXVALUE);

ALTER TABLE ONLY system.bus_log ATTACH PARTITION system.bus_log_default DEFAULT;

ALTER TABLE ONLY system.inbox ATTACH PARTITION system.inbox_default DEFAULT;

ALTER TABLE ONLY system.outbox_events ATTACH PARTITION system.outbox_events_default DEFAULT;

ALTER TABLE ONLY app.indexing_checkpoints
    ADD CONSTRAINT indexing_checkpoints_pkey PRIMARY KEY (worker_name, network_id);

ALTER TABLE ONLY app.indexing_errors
    ADD CONSTRAINT indexing_errors_pkey PRIMARY KEY (id);

ALTER TABLE ONLY app.indexing_errors
    ADD CONSTRAINT indexing_errors_worker_name_network_id_block_height_transac_key UNIQUE (worker_name, network_id, block_height, transaction_id, error_hash);

ALTER TABLE ONLY app.worker_leases
    ADD CONSTRAINT worker_leases_pkey PRIMARY KEY (id);

ALTER TABLE ONLY app.worker_leases
    ADD CONSTRAINT worker_leases_worker_type_network_id_from_height_key UNIQUE (worker_type, network_id, from_height);

ALTER TABLE ONLY catalog.assets
    ADD CONSTRAINT assets_pkey PRIMARY KEY (id);

ALTER TABLE ONLY catalog.collections
    ADD CONSTRAINT collections_pkey PRIMARY KEY (id);

ALTER TABLE ONLY catalog.contracts
    ADD CONSTRAINT contracts_pkey PRIMARY KEY (id);

ALTER TABLE ONLY ledger.accounts
    ADD CONSTRAINT accounts_pkey PRIMARY KEY (id);

ALTER TABLE ONLY ledger.applied_events_archive
    ADD CONSTRAINT applied_events_archive_pkey PRIMARY KEY (consumer, normalized_event_id);

ALTER TABLE ONLY ledger.applied_events
    ADD CONSTRAINT applied_events_pkey PRIMARY KEY (consumer, normalized_event_id);

ALTER TABLE ONLY ledger.digest_history
    ADD CONSTRAINT digest_history_pkey PRIMARY KEY (network_id, height);

ALTER TABLE ONLY ledger.digests
    ADD CONSTRAINT digests_pkey PRIMARY KEY (network_id, bucket);

ALTER TABLE ONLY ledger.log_heights
    ADD CONSTRAINT log_heights_pkey PRIMARY KEY (network_id);

ALTER TABLE ONLY ledger.network_progress
    ADD CONSTRAINT network_progress_pkey PRIMARY KEY (network_id);

ALTER TABLE ONLY ledger.normalized_events
    ADD CONSTRAINT normalized_events_pkey PRIMARY KEY (id);

ALTER TABLE ONLY ledger.openings
    ADD CONSTRAINT openings_pkey PRIMARY KEY (asset_id, account_id);

ALTER TABLE ONLY ledger.orphaned_blocks
    ADD CONSTRAINT orphaned_blocks_pkey PRIMARY KEY (network_id, block_hash);

ALTER TABLE ONLY ledger.ownership_current
    ADD CONSTRAINT ownership_current_pkey PRIMARY KEY (asset_id, account_id);

ALTER TABLE ONLY ledger.quarantine
    ADD CONSTRAINT quarantine_pkey PRIMARY KEY (consumer, normalized_event_id);

ALTER TABLE ONLY ledger.recent_blocks
    ADD CONSTRAINT recent_blocks_pkey PRIMARY KEY (network_id, block_hash);

ALTER TABLE ONLY ledger.unfinalized_deltas
    ADD CONSTRAINT unfinalized_deltas_pkey PRIMARY KEY (asset_id, account_id, normalized_event_id, leg);

ALTER TABLE ONLY projection.account_summaries
    ADD CONSTRAINT account_summaries_pkey PRIMARY KEY (account_id) WITH (fillfactor='75');

ALTER TABLE ONLY projection.accounts_to_come
    ADD CONSTRAINT accounts_to_come_pkey PRIMARY KEY (id);

ALTER TABLE ONLY projection.asset_cards
    ADD CONSTRAINT asset_cards_pkey PRIMARY KEY (asset_id) WITH (fillfactor='75');

ALTER TABLE ONLY projection.block_cards
    ADD CONSTRAINT block_cards_pkey PRIMARY KEY (network_id, height);

ALTER TABLE ONLY projection.collection_holders
    ADD CONSTRAINT collection_holders_pkey PRIMARY KEY (collection_id, account_id) WITH (fillfactor='75');

ALTER TABLE ONLY projection.collection_stats
    ADD CONSTRAINT collection_stats_pkey PRIMARY KEY (collection_id);

ALTER TABLE ONLY projection.finality_lines
    ADD CONSTRAINT finality_lines_pkey PRIMARY KEY (network_id);

ALTER TABLE ONLY projection.network_activity
    ADD CONSTRAINT network_activity_pkey PRIMARY KEY (network_id, bucket);

ALTER TABLE ONLY projection.network_status
    ADD CONSTRAINT network_status_pkey PRIMARY KEY (network_id);

ALTER TABLE ONLY projection.owners_ahead
    ADD CONSTRAINT owners_ahead_pkey PRIMARY KEY (id);

ALTER TABLE ONLY projection.ownership_view
    ADD CONSTRAINT ownership_view_pkey PRIMARY KEY (asset_id, account_id) WITH (fillfactor='75');

ALTER TABLE ONLY projection.stats_to_come
    ADD CONSTRAINT stats_to_come_pkey PRIMARY KEY (id);

ALTER TABLE ONLY projection.transfer_positions
    ADD CONSTRAINT transfer_positions_pkey PRIMARY KEY (event_id);

ALTER TABLE ONLY projection.transfers
    ADD CONSTRAINT transfers_pkey PRIMARY KEY (network_id, height, event_index, sub_index, event_id);

ALTER TABLE ONLY raw.blocks
    ADD CONSTRAINT blocks_pkey PRIMARY KEY (network_id, height);

ALTER TABLE ONLY raw.events
    ADD CONSTRAINT events_pkey PRIMARY KEY (network_id, block_height, event_index, tx_id);

ALTER TABLE ONLY raw.orphaned_blocks
    ADD CONSTRAINT orphaned_blocks_pkey PRIMARY KEY (network_id, hash);

ALTER TABLE ONLY raw.partitions
    ADD CONSTRAINT partitions_pkey PRIMARY KEY (parent, network_id, from_height);

ALTER TABLE ONLY raw.range_evidence
    ADD CONSTRAINT range_evidence_pkey PRIMARY KEY (network_id, shard, from_height);

ALTER TABLE ONLY raw.shard_blocks
    ADD CONSTRAINT shard_blocks_pkey PRIMARY KEY (network_id, shard, height);

ALTER TABLE ONLY raw.transactions
    ADD CONSTRAINT transactions_pkey PRIMARY KEY (network_id, block_height, id);

ALTER TABLE ONLY ref.networks
    ADD CONSTRAINT networks_pkey PRIMARY KEY (id);

ALTER TABLE ONLY ref.networks
    ADD CONSTRAINT networks_slug_key UNIQUE (slug);

ALTER TABLE ONLY ref.standards
    ADD CONSTRAINT standards_pkey PRIMARY KEY (id);

ALTER TABLE ONLY system.audit_log
    ADD CONSTRAINT audit_log_pkey PRIMARY KEY (id);

ALTER TABLE ONLY system.bus_log
    ADD CONSTRAINT bus_log_pkey PRIMARY KEY (stream, part, pseq, outbox_day);

ALTER TABLE ONLY system.bus_log_default
    ADD CONSTRAINT bus_log_default_pkey PRIMARY KEY (stream, part, pseq, outbox_day);

ALTER TABLE ONLY system.bus_partitions
    ADD CONSTRAINT bus_partitions_pkey PRIMARY KEY (stream, part);

ALTER TABLE ONLY system.bus_streams
    ADD CONSTRAINT bus_streams_pkey PRIMARY KEY (stream);

ALTER TABLE ONLY system.consumer_members
    ADD CONSTRAINT consumer_members_pkey PRIMARY KEY (handler_kind, owner);

ALTER TABLE ONLY system.consumer_positions
    ADD CONSTRAINT consumer_positions_pkey PRIMARY KEY (handler_kind, stream, part);

ALTER TABLE ONLY system.consumers
    ADD CONSTRAINT consumers_pkey PRIMARY KEY (handler_kind);

ALTER TABLE ONLY system.deferred_indexes
    ADD CONSTRAINT deferred_indexes_pkey PRIMARY KEY (name);

ALTER TABLE ONLY system.dlq
    ADD CONSTRAINT dlq_handler_kind_event_id_key UNIQUE (handler_kind, event_id);

ALTER TABLE ONLY system.dlq
    ADD CONSTRAINT dlq_pkey PRIMARY KEY (id);

ALTER TABLE ONLY system.inbox
    ADD CONSTRAINT inbox_pkey PRIMARY KEY (event_id, handler_kind, event_day);

ALTER TABLE ONLY system.inbox_default
    ADD CONSTRAINT inbox_default_pkey PRIMARY KEY (event_id, handler_kind, event_day);

ALTER TABLE ONLY system.job_runs
    ADD CONSTRAINT job_runs_pkey PRIMARY KEY (id);

ALTER TABLE ONLY system.migrations
    ADD CONSTRAINT migrations_pkey PRIMARY KEY (name);

ALTER TABLE ONLY system.network_heads
    ADD CONSTRAINT network_heads_pkey PRIMARY KEY (network_id);

ALTER TABLE ONLY system.outbox_events
    ADD CONSTRAINT outbox_events_pkey PRIMARY KEY (day, seq);

ALTER TABLE ONLY system.outbox_events_default
    ADD CONSTRAINT outbox_events_default_pkey PRIMARY KEY (day, seq);

ALTER TABLE ONLY system.parked_keys
    ADD CONSTRAINT parked_keys_pkey PRIMARY KEY (handler_kind, stream, partition_key);

ALTER TABLE ONLY system.processes
    ADD CONSTRAINT processes_pkey PRIMARY KEY (instance, role);

ALTER TABLE ONLY system.reconciliation_runs
    ADD CONSTRAINT reconciliation_runs_pkey PRIMARY KEY (id);

ALTER TABLE ONLY system.relay_cursor
    ADD CONSTRAINT relay_cursor_pkey PRIMARY KEY (id);

ALTER TABLE ONLY system.reorg_checkpoints
    ADD CONSTRAINT reorg_checkpoints_pkey PRIMARY KEY (network_id, block_hash, reorg_id);

ALTER TABLE ONLY system.replays
    ADD CONSTRAINT replays_pkey PRIMARY KEY (id);

ALTER TABLE ONLY system.sync_cursors
    ADD CONSTRAINT sync_cursors_pkey PRIMARY KEY (id);

CREATE INDEX indexing_errors_height ON app.indexing_errors USING btree (block_height);

CREATE INDEX indexing_errors_triage ON app.indexing_errors USING btree (resolved, worker_name, created_at DESC);

CREATE INDEX worker_leases_open ON app.worker_leases USING btree (worker_type, network_id, from_height) WHERE (status <> 'COMPLETED'::text);

CREATE INDEX assets_browse ON catalog.assets USING btree (collection_id, is_stub, is_burned);

CREATE UNIQUE INDEX collections_by_slug ON catalog.collections USING btree (lower(slug)) WHERE (slug IS NOT NULL);

CREATE INDEX contracts_by_address ON catalog.contracts USING btree (network_id, address_normalized);

CREATE INDEX accounts_by_address ON ledger.accounts USING btree (network_id, address_normalized) WITH (fillfactor='75');

CREATE INDEX applied_events_by_age ON ledger.applied_events USING brin (applied_at);

CREATE INDEX normalized_events_by_asset ON ledger.normalized_events USING btree (asset_id) WITH (fillfactor='75') WHERE (qty_delta IS NOT NULL);

CREATE INDEX normalized_events_by_time ON ledger.normalized_events USING btree (network_id, event_time DESC);

CREATE INDEX normalized_events_open ON ledger.normalized_events USING btree (network_id, block_number) WHERE (finality_status <> 'finalized'::ledger.event_finality_status);

CREATE INDEX normalized_events_reverted ON ledger.normalized_events USING btree (network_id, block_number) WHERE is_reverted;

CREATE INDEX ownership_current_by_account ON ledger.ownership_current USING btree (account_id, finality_status) WITH (fillfactor='75');

CREATE INDEX ownership_history_0000_account_id_block_number_idx ON ledger.ownership_history_0000 USING btree (account_id, block_number);

CREATE INDEX ownership_history_0000_asset_id_block_number_idx ON ledger.ownership_history_0000 USING btree (asset_id, block_number);

CREATE INDEX quarantine_open ON ledger.quarantine USING btree (quarantined_at DESC) WHERE (resolved_at IS NULL);

CREATE INDEX recent_blocks_by_height ON ledger.recent_blocks USING btree (network_id, block_number);

CREATE INDEX account_summaries_by_address ON projection.account_summaries USING btree (address text_pattern_ops, network_id) WITH (fillfactor='75');

CREATE INDEX asset_cards_by_name ON projection.asset_cards USING btree (lower(name) text_pattern_ops) WHERE (name IS NOT NULL);

CREATE INDEX asset_cards_by_token ON projection.asset_cards USING btree (collection_id, length(token_id), token_id COLLATE "C", asset_id) WITH (fillfactor='75');

CREATE INDEX asset_cards_by_token_named ON projection.asset_cards USING btree (collection_id, length(token_id), token_id COLLATE "C", asset_id) WHERE (NOT is_stub);

CREATE INDEX block_cards_by_hash ON projection.block_cards USING btree (hash);

CREATE INDEX collection_holders_by_account ON projection.collection_holders USING btree (account_id, collection_id) WITH (fillfactor='75');

CREATE INDEX collection_holders_rank ON projection.collection_holders USING btree (collection_id, asset_count DESC, account_id) WITH (fillfactor='75');

CREATE INDEX collection_stats_by_address ON projection.collection_stats USING btree (address text_pattern_ops);

CREATE INDEX collection_stats_by_name ON projection.collection_stats USING btree (lower(name) text_pattern_ops) WHERE (name IS NOT NULL);

CREATE INDEX collection_stats_by_network ON projection.collection_stats USING btree (network_id, collection_id);

CREATE INDEX collection_stats_rank ON projection.collection_stats USING btree (network_id, transfer_count DESC, collection_id);

CREATE INDEX collection_stats_rank_all ON projection.collection_stats USING btree (transfer_count DESC, collection_id);

CREATE INDEX ownership_view_by_account ON projection.ownership_view USING btree (account_id, finality_status, asset_id) WITH (fillfactor='75');

CREATE INDEX transfer_positions_by_height ON projection.transfer_positions USING btree (network_id, height);

CREATE INDEX dlq_by_time ON system.dlq USING btree (failed_at DESC);

CREATE INDEX dlq_open ON system.dlq USING btree (handler_kind, partition_key, pseq) WHERE (resolved_at IS NULL);

CREATE INDEX inbox_open ON ONLY system.inbox USING btree (handler_kind, status, stream, part, pseq) WHERE (status <> 'ACK'::system.inbox_status);

CREATE INDEX inbox_default_handler_kind_status_stream_part_pseq_idx ON system.inbox_default USING btree (handler_kind, status, stream, part, pseq) WHERE (status <> 'ACK'::system.inbox_status);

CREATE INDEX job_runs_by_type ON system.job_runs USING btree (job_type, started_at DESC);

CREATE INDEX outbox_events_by_id ON ONLY system.outbox_events USING btree (id);

CREATE INDEX outbox_events_by_xid ON ONLY system.outbox_events USING btree (xid, seq);

CREATE INDEX outbox_events_default_id_idx ON system.outbox_events_default USING btree (id);

CREATE INDEX outbox_events_default_xid_seq_idx ON system.outbox_events_default USING btree (xid, seq);

CREATE INDEX reorg_checkpoints_recent ON system.reorg_checkpoints USING btree (checked_at DESC) WHERE (NOT is_canonical);

ALTER INDEX system.bus_log_pkey ATTACH PARTITION system.bus_log_default_pkey;

ALTER INDEX system.inbox_open ATTACH PARTITION system.inbox_default_handler_kind_status_stream_part_pseq_idx;

ALTER INDEX system.inbox_pkey ATTACH PARTITION system.inbox_default_pkey;

ALTER INDEX system.outbox_events_by_id ATTACH PARTITION system.outbox_events_default_id_idx;

ALTER INDEX system.outbox_events_pkey ATTACH PARTITION system.outbox_events_default_pkey;

ALTER INDEX system.outbox_events_by_xid ATTACH PARTITION system.outbox_events_default_xid_seq_idx;

ALTER TABLE ONLY catalog.contracts
    ADD CONSTRAINT contracts_standard_id_fkey FOREIGN KEY (standard_id) REFERENCES ref.standards(id);
