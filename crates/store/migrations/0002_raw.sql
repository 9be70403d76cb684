-- The raw store (S1, design.md §4). LIST by network, then RANGE by height; partitions are made on demand by
-- the partition manager. Ids are the chain's own bytes. Only primary keys here: secondary indexes of a
-- partition are built when its backfill is done (S1 §5.5, `raw.partitions.indexed_at`).

create table raw.blocks (
    network_id   int not null,
    height       bigint not null,
    hash         bytea not null,
    parent_hash  bytea not null,
    block_time   timestamptz not null,
    tx_count     int,
    event_count  int not null,
    payload      jsonb,
    payload_hash bytea,
    payload_ref  text,
    primary key (network_id, height)
) partition by list (network_id);

create table raw.transactions (
    network_id   int not null,
    block_height bigint not null,
    id           bytea not null,
    tx_index     int not null,
    sender       bytea not null,
    receiver     bytea,
    value        numeric(78, 0) not null,
    succeeded    boolean,
    payload      jsonb,
    payload_hash bytea,
    payload_ref  text,
    primary key (network_id, block_height, id)
) partition by list (network_id);

create table raw.events (
    network_id   int not null,
    block_height bigint not null,
    tx_id        bytea not null,
    event_index  int not null,           -- within the block on EVM
    tx_index     int not null,
    block_hash   bytea not null,
    emitter      bytea not null,
    topics       bytea not null,         -- 32 bytes each, one after another
    data         bytea,                  -- null when offloaded
    payload      jsonb,
    payload_hash bytea,
    payload_ref  text,
    -- The index is unique within the block; the transaction is in the key as S1 §5.1 asks.
    primary key (network_id, block_height, event_index, tx_id)
) partition by list (network_id);

-- Lookups by id (S1 §5.2). Partitioned like the rest, so that history appends and indexes late; a lookup
-- probes one index per partition. Secondary index: (id).
create table raw.tx_lookup (
    network_id   int not null,
    block_height bigint not null,
    id           bytea not null,
    tx_index     int not null,
    block_time   timestamptz not null,
    evm_hash     bytea
) partition by list (network_id);

create table raw.block_lookup (
    network_id int not null,
    height     bigint not null,
    id         bytea not null,
    block_time timestamptz not null
) partition by list (network_id);

-- What the partition manager made, and whether its secondary indexes exist yet.
create table raw.partitions (
    parent      text not null,           -- e.g. raw.events
    network_id  int not null,
    name        text not null,           -- e.g. raw.events_1_00000000
    from_height bigint not null,
    to_height   bigint not null,
    indexed_at  timestamptz,
    created_at  timestamptz not null default now(),
    primary key (parent, network_id, from_height)
);

-- Why each accepted range may be believed. Ranges of one shard tile the history without overlap.
create table raw.range_evidence (
    network_id  int not null,
    shard       int not null default 0,
    from_height bigint not null,
    to_height   bigint not null,         -- exclusive
    provider    text not null,
    head_seen   bigint not null,
    records     bigint not null,
    foreign_records bigint not null,
    requests    bigint not null,
    checks      text[] not null,
    coverage    text not null,
    accepted_at timestamptz not null default now(),
    primary key (network_id, shard, from_height),
    check (from_height < to_height)
);

-- Orphaned rows are kept aside until finality passes their height (pitfall F72).
create table raw.orphaned_blocks (
    network_id  int not null,
    height      bigint not null,
    hash        bytea not null,
    parent_hash bytea not null,
    block_time  timestamptz not null,
    events      jsonb not null,          -- the raw.events rows of the block
    orphaned_at timestamptz not null default now(),
    primary key (network_id, hash)
);

-- The one source of truth for adapter positions (S0 §8.6, S3 cursors).
create table system.sync_cursors (
    id                   text primary key,   -- 'evm:1:shard-0'
    network_id           int not null,
    cursor_type          text not null,      -- 'height'
    start_height         bigint not null,
    last_processed_block bigint not null,    -- start_height - 1 while nothing is processed
    last_processed_hash  bytea,
    updated_at           timestamptz not null default now()
);

-- The chain as the nodes report it, one row per network; the ingester writes it.
create table system.network_heads (
    network_id       int primary key,
    latest_height    bigint not null,
    latest_hash      bytea not null,
    safe_height      bigint,
    finalized_height bigint,                 -- monotone
    finalized_hash   bytea,
    halted_reason    text,                   -- not null: this network is stopped, the others go on
    halted_at        timestamptz,
    updated_at       timestamptz not null default now()
);

create table system.reorg_checkpoints (
    network_id   int not null,
    block_number bigint not null,
    block_hash   bytea not null,
    checked_at   timestamptz not null default now(),
    is_canonical boolean not null,
    reorg_id     text not null,              -- event id of chain.reorg.detected.v1
    primary key (network_id, block_hash, reorg_id)
);
