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
);

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
);

CREATE TABLE ledger.network_progress (
    network_id integer NOT NULL,
    head_height bigint DEFAULT '-1'::integer NOT NULL,
    finalized_height bigint DEFAULT '-1'::integer NOT NULL,
    reported_finalized bigint DEFAULT '-1'::integer NOT NULL,
    history_height bigint DEFAULT '-1'::integer NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE ledger.normalized_event_deltas (
    normalized_event_id uuid NOT NULL,
    delta_index integer NOT NULL,
    asset_id uuid NOT NULL,
    from_account_id uuid,
    to_account_id uuid,
    qty_delta numeric(78,0) NOT NULL
);

CREATE TABLE ledger.normalized_event_keys (
    normalized_event_id uuid NOT NULL,
    event_uid bytea NOT NULL,
    source_event_id text NOT NULL,
    sub_index text NOT NULL,
    network_id integer NOT NULL,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL
);

CREATE TABLE ledger.normalized_events (
    id uuid NOT NULL,
    source_event_id text NOT NULL,
    sub_index text NOT NULL,
    network_id integer NOT NULL,
    event_kind ledger.event_kind NOT NULL,
    asset_id uuid,
    collection_id uuid,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    tx_hash bytea NOT NULL,
    event_index integer NOT NULL,
    event_time timestamp with time zone NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL,
    blob_ref text
)
PARTITION BY HASH (network_id);

CREATE TABLE ledger.normalized_events_0 (
    id uuid NOT NULL,
    source_event_id text NOT NULL,
    sub_index text NOT NULL,
    network_id integer NOT NULL,
    event_kind ledger.event_kind NOT NULL,
    asset_id uuid,
    collection_id uuid,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    tx_hash bytea NOT NULL,
    event_index integer NOT NULL,
    event_time timestamp with time zone NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL,
    blob_ref text
);

CREATE TABLE ledger.normalized_events_1 (
    id uuid NOT NULL,
    source_event_id text NOT NULL,
    sub_index text NOT NULL,
    network_id integer NOT NULL,
    event_kind ledger.event_kind NOT NULL,
    asset_id uuid,
    collection_id uuid,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    tx_hash bytea NOT NULL,
    event_index integer NOT NULL,
    event_time timestamp with time zone NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL,
    blob_ref text
);

CREATE TABLE ledger.normalized_events_2 (
    id uuid NOT NULL,
    source_event_id text NOT NULL,
    sub_index text NOT NULL,
    network_id integer NOT NULL,
    event_kind ledger.event_kind NOT NULL,
    asset_id uuid,
    collection_id uuid,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    tx_hash bytea NOT NULL,
    event_index integer NOT NULL,
    event_time timestamp with time zone NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL,
    blob_ref text
);

CREATE TABLE ledger.normalized_events_3 (
    id uuid NOT NULL,
    source_event_id text NOT NULL,
    sub_index text NOT NULL,
    network_id integer NOT NULL,
    event_kind ledger.event_kind NOT NULL,
    asset_id uuid,
    collection_id uuid,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    tx_hash bytea NOT NULL,
    event_index integer NOT NULL,
    event_time timestamp with time zone NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL,
    blob_ref text
);

CREATE TABLE ledger.normalized_events_4 (
    id uuid NOT NULL,
    source_event_id text NOT NULL,
    sub_index text NOT NULL,
    network_id integer NOT NULL,
    event_kind ledger.event_kind NOT NULL,
    asset_id uuid,
    collection_id uuid,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    tx_hash bytea NOT NULL,
    event_index integer NOT NULL,
    event_time timestamp with time zone NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL,
    blob_ref text
);

CREATE TABLE ledger.normalized_events_5 (
    id uuid NOT NULL,
    source_event_id text NOT NULL,
    sub_index text NOT NULL,
    network_id integer NOT NULL,
    event_kind ledger.event_kind NOT NULL,
    asset_id uuid,
    collection_id uuid,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    tx_hash bytea NOT NULL,
    event_index integer NOT NULL,
    event_time timestamp with time zone NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL,
    blob_ref text
);

CREATE TABLE ledger.normalized_events_6 (
    id uuid NOT NULL,
    source_event_id text NOT NULL,
    sub_index text NOT NULL,
    network_id integer NOT NULL,
    event_kind ledger.event_kind NOT NULL,
    asset_id uuid,
    collection_id uuid,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    tx_hash bytea NOT NULL,
    event_index integer NOT NULL,
    event_time timestamp with time zone NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL,
    blob_ref text
);

CREATE TABLE ledger.normalized_events_7 (
    id uuid NOT NULL,
    source_event_id text NOT NULL,
    sub_index text NOT NULL,
    network_id integer NOT NULL,
    event_kind ledger.event_kind NOT NULL,
    asset_id uuid,
    collection_id uuid,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    tx_hash bytea NOT NULL,
    event_index integer NOT NULL,
    event_time timestamp with time zone NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    is_reverted boolean DEFAULT false NOT NULL,
    blob_ref text
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

CREATE TABLE ledger.ownership_history_default (
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

CREATE TABLE ledger.unfinalized_deltas (
    asset_id uuid NOT NULL,
    account_id uuid NOT NULL,
    normalized_event_id uuid NOT NULL,
    leg smallint NOT NULL,
    network_id integer NOT NULL,
    block_number bigint NOT NULL,
    qty_delta numeric(78,0) NOT NULL
);

CREATE TABLE projection.account_summaries (
    account_id uuid NOT NULL,
    network_id integer NOT NULL,
    address text NOT NULL,
    asset_count bigint DEFAULT 0 NOT NULL,
    transfer_count bigint DEFAULT 0 NOT NULL,
    first_seen_at timestamp with time zone NOT NULL,
    last_seen_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL
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
    updated_at timestamp with time zone NOT NULL
);

CREATE TABLE projection.block_cards (
    network_id integer NOT NULL,
    height bigint NOT NULL,
    hash bytea NOT NULL,
    parent_hash bytea NOT NULL,
    block_time timestamp with time zone NOT NULL,
    tx_count integer,
    event_count integer NOT NULL
);

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
);

CREATE TABLE projection.network_activity (
    network_id integer NOT NULL,
    bucket timestamp with time zone NOT NULL,
    events bigint NOT NULL
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
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE projection.ownership_view (
    asset_id uuid NOT NULL,
    account_id uuid NOT NULL,
    network_id integer NOT NULL,
    collection_id uuid NOT NULL,
    qty numeric(78,0) NOT NULL,
    qty_finalized numeric(78,0) NOT NULL,
    finality_status ledger.event_finality_status NOT NULL,
    updated_at timestamp with time zone NOT NULL
);

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
   FROM (projection.ownership_view o
     JOIN projection.asset_cards c ON ((c.asset_id = o.asset_id)));

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

CREATE TABLE system.bus_partitions (
    stream text NOT NULL,
    part smallint NOT NULL,
    next_pseq bigint DEFAULT 1 NOT NULL,
    published_pseq bigint DEFAULT 0 NOT NULL,
    engine text DEFAULT 'postgres'::text NOT NULL
);

CREATE TABLE system.bus_streams (
    stream text NOT NULL,
    parts smallint NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE system.consumer_positions (
    handler_kind text NOT NULL,
    stream text NOT NULL,
    part smallint NOT NULL,
    pseq bigint DEFAULT 0 NOT NULL,
    epoch bigint DEFAULT 0 NOT NULL,
    owner text,
    lease_expires_at timestamp with time zone,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE system.consumers (
    handler_kind text NOT NULL,
    subjects text[] NOT NULL,
    side_effects boolean NOT NULL,
    declared_at timestamp with time zone DEFAULT now() NOT NULL
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
    envelope jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
)
PARTITION BY RANGE (day);

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
    CONSTRAINT relay_cursor_id_check CHECK ((id = 1))
);

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
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

ALTER TABLE ONLY ledger.normalized_events ATTACH PARTITION ledger.normalized_events_0 FOR VALUES WITH (modulus 8, remainder 0);

ALTER TABLE ONLY ledger.normalized_events ATTACH PARTITION ledger.normalized_events_1 FOR VALUES WITH (modulus 8, remainder 1);

ALTER TABLE ONLY ledger.normalized_events ATTACH PARTITION ledger.normalized_events_2 FOR VALUES WITH (modulus 8, remainder 2);

ALTER TABLE ONLY ledger.normalized_events ATTACH PARTITION ledger.normalized_events_3 FOR VALUES WITH (modulus 8, remainder 3);

ALTER TABLE ONLY ledger.normalized_events ATTACH PARTITION ledger.normalized_events_4 FOR VALUES WITH (modulus 8, remainder 4);

ALTER TABLE ONLY ledger.normalized_events ATTACH PARTITION ledger.normalized_events_5 FOR VALUES WITH (modulus 8, remainder 5);

ALTER TABLE ONLY ledger.normalized_events ATTACH PARTITION ledger.normalized_events_6 FOR VALUES WITH (modulus 8, remainder 6);

ALTER TABLE ONLY ledger.normalized_events ATTACH PARTITION ledger.normalized_events_7 FOR VALUES WITH (modulus 8, remainder 7);

ALTER TABLE ONLY ledger.ownership_history ATTACH PARTITION ledger.ownership_history_default DEFAULT;

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

ALTER TABLE ONLY ledger.network_progress
    ADD CONSTRAINT network_progress_pkey PRIMARY KEY (network_id);

ALTER TABLE ONLY ledger.normalized_event_deltas
    ADD CONSTRAINT normalized_event_deltas_pkey PRIMARY KEY (normalized_event_id, delta_index);

ALTER TABLE ONLY ledger.normalized_event_keys
    ADD CONSTRAINT normalized_event_keys_pkey PRIMARY KEY (normalized_event_id);

ALTER TABLE ONLY ledger.normalized_events
    ADD CONSTRAINT normalized_events_pkey PRIMARY KEY (network_id, id);

ALTER TABLE ONLY ledger.normalized_events_0
    ADD CONSTRAINT normalized_events_0_pkey PRIMARY KEY (network_id, id);

ALTER TABLE ONLY ledger.normalized_events_1
    ADD CONSTRAINT normalized_events_1_pkey PRIMARY KEY (network_id, id);

ALTER TABLE ONLY ledger.normalized_events_2
    ADD CONSTRAINT normalized_events_2_pkey PRIMARY KEY (network_id, id);

ALTER TABLE ONLY ledger.normalized_events_3
    ADD CONSTRAINT normalized_events_3_pkey PRIMARY KEY (network_id, id);

ALTER TABLE ONLY ledger.normalized_events_4
    ADD CONSTRAINT normalized_events_4_pkey PRIMARY KEY (network_id, id);

ALTER TABLE ONLY ledger.normalized_events_5
    ADD CONSTRAINT normalized_events_5_pkey PRIMARY KEY (network_id, id);

ALTER TABLE ONLY ledger.normalized_events_6
    ADD CONSTRAINT normalized_events_6_pkey PRIMARY KEY (network_id, id);

ALTER TABLE ONLY ledger.normalized_events_7
    ADD CONSTRAINT normalized_events_7_pkey PRIMARY KEY (network_id, id);

ALTER TABLE ONLY ledger.orphaned_blocks
    ADD CONSTRAINT orphaned_blocks_pkey PRIMARY KEY (network_id, block_hash);

ALTER TABLE ONLY ledger.ownership_current
    ADD CONSTRAINT ownership_current_pkey PRIMARY KEY (asset_id, account_id);

ALTER TABLE ONLY ledger.quarantine
    ADD CONSTRAINT quarantine_pkey PRIMARY KEY (consumer, normalized_event_id);

ALTER TABLE ONLY ledger.unfinalized_deltas
    ADD CONSTRAINT unfinalized_deltas_pkey PRIMARY KEY (asset_id, account_id, normalized_event_id, leg);

ALTER TABLE ONLY projection.account_summaries
    ADD CONSTRAINT account_summaries_pkey PRIMARY KEY (account_id);

ALTER TABLE ONLY projection.asset_cards
    ADD CONSTRAINT asset_cards_pkey PRIMARY KEY (asset_id);

ALTER TABLE ONLY projection.block_cards
    ADD CONSTRAINT block_cards_pkey PRIMARY KEY (network_id, height);

ALTER TABLE ONLY projection.collection_holders
    ADD CONSTRAINT collection_holders_pkey PRIMARY KEY (collection_id, account_id);

ALTER TABLE ONLY projection.collection_stats
    ADD CONSTRAINT collection_stats_pkey PRIMARY KEY (collection_id);

ALTER TABLE ONLY projection.network_activity
    ADD CONSTRAINT network_activity_pkey PRIMARY KEY (network_id, bucket);

ALTER TABLE ONLY projection.network_status
    ADD CONSTRAINT network_status_pkey PRIMARY KEY (network_id);

ALTER TABLE ONLY projection.ownership_view
    ADD CONSTRAINT ownership_view_pkey PRIMARY KEY (asset_id, account_id);

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

ALTER TABLE ONLY system.bus_partitions
    ADD CONSTRAINT bus_partitions_pkey PRIMARY KEY (stream, part);

ALTER TABLE ONLY system.bus_streams
    ADD CONSTRAINT bus_streams_pkey PRIMARY KEY (stream);

ALTER TABLE ONLY system.consumer_positions
    ADD CONSTRAINT consumer_positions_pkey PRIMARY KEY (handler_kind, stream, part);

ALTER TABLE ONLY system.consumers
    ADD CONSTRAINT consumers_pkey PRIMARY KEY (handler_kind);

ALTER TABLE ONLY system.dlq
    ADD CONSTRAINT dlq_handler_kind_event_id_key UNIQUE (handler_kind, event_id);

ALTER TABLE ONLY system.dlq
    ADD CONSTRAINT dlq_pkey PRIMARY KEY (id);

ALTER TABLE ONLY system.inbox
    ADD CONSTRAINT inbox_pkey PRIMARY KEY (event_id, handler_kind, event_day);

ALTER TABLE ONLY system.job_runs
    ADD CONSTRAINT job_runs_pkey PRIMARY KEY (id);

ALTER TABLE ONLY system.migrations
    ADD CONSTRAINT migrations_pkey PRIMARY KEY (name);

ALTER TABLE ONLY system.network_heads
    ADD CONSTRAINT network_heads_pkey PRIMARY KEY (network_id);

ALTER TABLE ONLY system.outbox_events
    ADD CONSTRAINT outbox_events_pkey PRIMARY KEY (day, seq);

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

CREATE INDEX accounts_by_address ON ledger.accounts USING btree (network_id, address_normalized);

CREATE INDEX normalized_event_deltas_by_asset ON ledger.normalized_event_deltas USING btree (asset_id);

CREATE INDEX normalized_event_keys_open ON ledger.normalized_event_keys USING btree (network_id, block_number) WHERE (finality_status <> 'finalized'::ledger.event_finality_status);

CREATE INDEX normalized_events_by_time ON ONLY ledger.normalized_events USING btree (network_id, event_time DESC);

CREATE INDEX normalized_events_0_network_id_event_time_idx ON ledger.normalized_events_0 USING btree (network_id, event_time DESC);

CREATE INDEX normalized_events_1_network_id_event_time_idx ON ledger.normalized_events_1 USING btree (network_id, event_time DESC);

CREATE INDEX normalized_events_2_network_id_event_time_idx ON ledger.normalized_events_2 USING btree (network_id, event_time DESC);

CREATE INDEX normalized_events_3_network_id_event_time_idx ON ledger.normalized_events_3 USING btree (network_id, event_time DESC);

CREATE INDEX normalized_events_4_network_id_event_time_idx ON ledger.normalized_events_4 USING btree (network_id, event_time DESC);

CREATE INDEX normalized_events_5_network_id_event_time_idx ON ledger.normalized_events_5 USING btree (network_id, event_time DESC);

CREATE INDEX normalized_events_6_network_id_event_time_idx ON ledger.normalized_events_6 USING btree (network_id, event_time DESC);

CREATE INDEX normalized_events_7_network_id_event_time_idx ON ledger.normalized_events_7 USING btree (network_id, event_time DESC);

CREATE INDEX ownership_current_by_account ON ledger.ownership_current USING btree (account_id, finality_status);

CREATE INDEX ownership_history_by_account ON ONLY ledger.ownership_history USING btree (account_id, block_number);

CREATE INDEX ownership_history_by_asset ON ONLY ledger.ownership_history USING btree (asset_id, block_number);

CREATE INDEX ownership_history_default_account_id_block_number_idx ON ledger.ownership_history_default USING btree (account_id, block_number);

CREATE INDEX ownership_history_default_asset_id_block_number_idx ON ledger.ownership_history_default USING btree (asset_id, block_number);

CREATE INDEX unfinalized_deltas_by_event ON ledger.unfinalized_deltas USING btree (normalized_event_id);

CREATE INDEX account_summaries_by_address ON projection.account_summaries USING btree (address text_pattern_ops, network_id);

CREATE INDEX asset_cards_by_collection ON projection.asset_cards USING btree (collection_id, asset_id);

CREATE INDEX block_cards_by_hash ON projection.block_cards USING btree (hash);

CREATE INDEX collection_holders_by_account ON projection.collection_holders USING btree (account_id, collection_id);

CREATE INDEX collection_holders_rank ON projection.collection_holders USING btree (collection_id, asset_count DESC, account_id);

CREATE INDEX collection_stats_rank ON projection.collection_stats USING btree (network_id, transfer_count DESC, collection_id);

CREATE INDEX collection_stats_rank_all ON projection.collection_stats USING btree (transfer_count DESC, collection_id);

CREATE INDEX ownership_view_by_account ON projection.ownership_view USING btree (account_id, finality_status, asset_id);

CREATE INDEX ownership_view_by_account_asset ON projection.ownership_view USING btree (account_id, asset_id);

CREATE INDEX dlq_open ON system.dlq USING btree (handler_kind, partition_key, pseq) WHERE (resolved_at IS NULL);

CREATE INDEX inbox_open ON ONLY system.inbox USING btree (handler_kind, status, stream, part, pseq) WHERE (status <> 'ACK'::system.inbox_status);

CREATE INDEX job_runs_by_type ON system.job_runs USING btree (job_type, started_at DESC);

CREATE INDEX outbox_events_by_id ON ONLY system.outbox_events USING btree (id);

CREATE INDEX outbox_events_by_xid ON ONLY system.outbox_events USING btree (xid, seq);

ALTER INDEX ledger.normalized_events_by_time ATTACH PARTITION ledger.normalized_events_0_network_id_event_time_idx;

ALTER INDEX ledger.normalized_events_pkey ATTACH PARTITION ledger.normalized_events_0_pkey;

ALTER INDEX ledger.normalized_events_by_time ATTACH PARTITION ledger.normalized_events_1_network_id_event_time_idx;

ALTER INDEX ledger.normalized_events_pkey ATTACH PARTITION ledger.normalized_events_1_pkey;

ALTER INDEX ledger.normalized_events_by_time ATTACH PARTITION ledger.normalized_events_2_network_id_event_time_idx;

ALTER INDEX ledger.normalized_events_pkey ATTACH PARTITION ledger.normalized_events_2_pkey;

ALTER INDEX ledger.normalized_events_by_time ATTACH PARTITION ledger.normalized_events_3_network_id_event_time_idx;

ALTER INDEX ledger.normalized_events_pkey ATTACH PARTITION ledger.normalized_events_3_pkey;

ALTER INDEX ledger.normalized_events_by_time ATTACH PARTITION ledger.normalized_events_4_network_id_event_time_idx;

ALTER INDEX ledger.normalized_events_pkey ATTACH PARTITION ledger.normalized_events_4_pkey;

ALTER INDEX ledger.normalized_events_by_time ATTACH PARTITION ledger.normalized_events_5_network_id_event_time_idx;

ALTER INDEX ledger.normalized_events_pkey ATTACH PARTITION ledger.normalized_events_5_pkey;

ALTER INDEX ledger.normalized_events_by_time ATTACH PARTITION ledger.normalized_events_6_network_id_event_time_idx;

ALTER INDEX ledger.normalized_events_pkey ATTACH PARTITION ledger.normalized_events_6_pkey;

ALTER INDEX ledger.normalized_events_by_time ATTACH PARTITION ledger.normalized_events_7_network_id_event_time_idx;

ALTER INDEX ledger.normalized_events_pkey ATTACH PARTITION ledger.normalized_events_7_pkey;

ALTER INDEX ledger.ownership_history_by_account ATTACH PARTITION ledger.ownership_history_default_account_id_block_number_idx;

ALTER INDEX ledger.ownership_history_by_asset ATTACH PARTITION ledger.ownership_history_default_asset_id_block_number_idx;

ALTER TABLE ONLY catalog.contracts
    ADD CONSTRAINT contracts_standard_id_fkey FOREIGN KEY (standard_id) REFERENCES ref.standards(id);
