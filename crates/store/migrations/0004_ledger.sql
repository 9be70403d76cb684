-- The ledger (S0 §2-§6, §8.2, §8.3, §9; design.md §5). Ids are uuidv5 of natural keys, so the primary key on
-- the id IS the uniqueness of the natural key; second unique indexes on the text are not built (ADR 0006).

create table ledger.normalized_event_keys (
    normalized_event_id uuid primary key,    -- uuidv5(source_event_id:sub_index)
    event_uid       bytea not null,          -- sha256 of the same pair
    source_event_id text not null,
    sub_index       text not null,
    network_id      int not null,
    block_number    bigint not null,
    block_hash      bytea not null,
    finality_status ledger.event_finality_status not null,
    is_reverted     boolean not null default false
);
-- Only what may still change: small whatever the history.
create index normalized_event_keys_open on ledger.normalized_event_keys (network_id, block_number)
    where finality_status <> 'finalized';

create table ledger.normalized_events (
    id              uuid not null,
    source_event_id text not null,
    sub_index       text not null,
    network_id      int not null,
    event_kind      ledger.event_kind not null,
    asset_id        uuid,
    collection_id   uuid,
    block_number    bigint not null,
    block_hash      bytea not null,
    tx_hash         bytea not null,
    event_index     int not null,
    event_time      timestamptz not null,
    finality_status ledger.event_finality_status not null,
    is_reverted     boolean not null default false,
    blob_ref        text,
    primary key (network_id, id)
) partition by hash (network_id);
do $$
begin
    for part in 0..7 loop
        execute format('create table ledger.normalized_events_%s partition of ledger.normalized_events
                        for values with (modulus 8, remainder %s)', part, part);
    end loop;
end $$;
create index normalized_events_by_time on ledger.normalized_events (network_id, event_time desc);

create table ledger.normalized_event_deltas (
    normalized_event_id uuid not null,
    delta_index         int not null,
    asset_id            uuid not null,
    from_account_id     uuid,
    to_account_id       uuid,
    qty_delta           numeric(78, 0) not null,   -- negative for burns (design.md §5)
    primary key (normalized_event_id, delta_index)
);
create index normalized_event_deltas_by_asset on ledger.normalized_event_deltas (asset_id);

-- Signed legs of events above finality: what ownership_view adds to ownership_current. Rows leave when
-- their event is finalized or reverted, so the cost of an answer does not grow with an asset's history.
create table ledger.unfinalized_deltas (
    asset_id            uuid not null,
    account_id          uuid not null,
    normalized_event_id uuid not null,
    leg                 smallint not null,         -- 0 lost, 1 gained
    network_id          int not null,
    block_number        bigint not null,
    qty_delta           numeric(78, 0) not null,
    primary key (asset_id, account_id, normalized_event_id, leg)
);
create index unfinalized_deltas_by_event on ledger.unfinalized_deltas (normalized_event_id);

create table ledger.applied_events (
    consumer            text not null,
    normalized_event_id uuid not null,
    applied_at          timestamptz not null default now(),
    primary key (consumer, normalized_event_id)
);
create table ledger.applied_events_archive (
    consumer            text not null,
    normalized_event_id uuid not null,
    applied_at          timestamptz not null,
    primary key (consumer, normalized_event_id)
);

create table ledger.accounts (
    id                 uuid primary key,
    network_id         int not null,
    address_normalized text not null,
    label              text,
    is_contract        boolean,
    first_seen_at      timestamptz not null
);
create index accounts_by_address on ledger.accounts (network_id, address_normalized);

create table ledger.ownership_current (
    asset_id        uuid not null,
    account_id      uuid not null,
    network_id      int not null,
    qty             numeric(78, 0) not null,
    finality_status ledger.event_finality_status not null default 'finalized',
    updated_at      timestamptz not null,
    primary key (asset_id, account_id)
);
create index ownership_current_by_account on ledger.ownership_current (account_id, finality_status);

create table ledger.ownership_history (
    asset_id            uuid not null,
    account_id          uuid not null,
    network_id          int not null,
    block_number        bigint not null,
    event_index         int not null,
    qty_delta           numeric(78, 0) not null,
    event_time          timestamptz not null,
    normalized_event_id uuid not null,
    leg                 smallint not null
) partition by range (event_time);
create table ledger.ownership_history_default partition of ledger.ownership_history default;
create index ownership_history_by_asset on ledger.ownership_history (asset_id, block_number);
create index ownership_history_by_account on ledger.ownership_history (account_id, block_number);

-- Blocks that left the canonical chain: an event that comes late from one of them is stored reverted.
create table ledger.orphaned_blocks (
    network_id   int not null,
    block_hash   bytea not null,
    block_number bigint not null,
    orphaned_at  timestamptz not null default now(),
    primary key (network_id, block_hash)
);

-- What the ledger believes of each network; monotone.
create table ledger.network_progress (
    network_id        int primary key,
    head_height       bigint not null default -1,   -- newest block whose events are normalized
    finalized_height  bigint not null default -1,   -- applied to ownership_current up to here
    reported_finalized bigint not null default -1,  -- as the chain reports it
    history_height    bigint not null default -1,   -- applied in bulk up to here: applied without claim rows
    updated_at        timestamptz not null default now()
);

-- Events that would make a balance negative, or that their adapter could not read, with the evidence.
create table ledger.quarantine (
    normalized_event_id uuid not null,
    consumer            text not null,
    network_id          int not null,
    source_event_id     text not null,
    block_number        bigint not null,
    asset_id            uuid,
    reason              text not null,
    evidence            jsonb not null,
    quarantined_at      timestamptz not null default now(),
    resolved_at         timestamptz,
    primary key (consumer, normalized_event_id)
);

-- Σ qty · H(asset, account) mod p, per bucket; see model::digest.
create table ledger.digests (
    network_id int not null,
    bucket     smallint not null,
    digest     numeric(78, 0) not null,
    height     bigint not null,
    primary key (network_id, bucket)
);
-- The total at heights where finality moved, so that two databases can be compared at an old height.
create table ledger.digest_history (
    network_id int not null,
    height     bigint not null,
    digest     numeric(78, 0) not null,
    primary key (network_id, height)
);

create table catalog.contracts (
    id                 uuid primary key,
    network_id         int not null,
    address_normalized text not null,
    standard_id        text not null references ref.standards (id),
    deployed_at_block  bigint,
    is_verified        boolean not null default false,
    reliability        text not null default 'ok' check (reliability in ('ok', 'unreliable')),
    unreliable_reason  text
);
create index contracts_by_address on catalog.contracts (network_id, address_normalized);

create table catalog.collections (
    id          uuid primary key,
    network_id  int not null,
    contract_id uuid not null,
    slug        text,
    name        text,
    verified    boolean not null default false,
    is_stub     boolean not null default true,
    created_at  timestamptz not null
);
create unique index collections_by_slug on catalog.collections (lower(slug)) where slug is not null;

create table catalog.assets (
    id                uuid primary key,
    network_id        int not null,
    collection_id     uuid not null,
    token_id_raw      text not null,
    token_id_num      numeric(78, 0),
    standard_id       text not null,
    is_fungible_class boolean not null,
    is_burned         boolean not null default false,
    supply            numeric(78, 0) not null default 0,   -- finalized
    history           text not null default 'complete' check (history in ('complete', 'partial')),
    is_stub           boolean not null default true,
    first_seen_block  bigint not null,
    current_metadata_version_id uuid,
    created_at        timestamptz not null
);
create index assets_browse on catalog.assets (collection_id, is_stub, is_burned);
