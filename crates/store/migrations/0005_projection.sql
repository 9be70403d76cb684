-- Read models (S0 §8.5, design.md §7): the only tables the API reads for the on-chain domain. Written by the
-- projectors alone, rebuilt by key from the ledger.

create table projection.network_status (
    network_id       int primary key,
    slug             text not null,
    family           text not null,
    start_block      bigint not null,
    confirmations    bigint not null,
    head_height      bigint,
    head_time        timestamptz,
    ingested_height  bigint,
    normalized_height bigint,
    finalized_height bigint,
    projected_height bigint,
    finalized_at     timestamptz,
    halted_reason    text,
    events_total     bigint not null default 0,
    reorgs_total     bigint not null default 0,
    updated_at       timestamptz not null default now()
);

-- Events per ten seconds of projection time, for sparklines.
create table projection.network_activity (
    network_id int not null,
    bucket     timestamptz not null,
    events     bigint not null,
    primary key (network_id, bucket)
);

create table projection.asset_cards (
    asset_id        uuid primary key,
    network_id      int not null,
    collection_id   uuid not null,
    token_id        text not null,
    standard        text not null,
    name            text,
    image_url       text,
    is_stub         boolean not null,
    is_burned       boolean not null,
    supply          numeric(78, 0) not null,
    history         text not null,
    floor_price_usd numeric,
    last_sale_usd   numeric,
    composite_score numeric,
    finality_status ledger.event_finality_status not null,
    last_height     bigint not null,
    updated_at      timestamptz not null
);
create index asset_cards_by_collection on projection.asset_cards (collection_id, asset_id);

create table projection.ownership_view (
    asset_id        uuid not null,
    account_id      uuid not null,
    network_id      int not null,
    collection_id   uuid not null,
    qty             numeric(78, 0) not null,   -- latest known
    qty_finalized   numeric(78, 0) not null,
    finality_status ledger.event_finality_status not null,   -- weakest of what contributed
    updated_at      timestamptz not null,
    primary key (asset_id, account_id)
);
create index ownership_view_by_account on projection.ownership_view (account_id, finality_status, asset_id);
create index ownership_view_by_account_asset on projection.ownership_view (account_id, asset_id);

create table projection.collection_holders (
    collection_id uuid not null,
    account_id    uuid not null,
    asset_count   bigint not null,
    qty           numeric not null,
    primary key (collection_id, account_id)
);
create index collection_holders_rank on projection.collection_holders (collection_id, asset_count desc, account_id);
create index collection_holders_by_account on projection.collection_holders (account_id, collection_id);

create table projection.collection_stats (
    collection_id   uuid primary key,
    network_id      int not null,
    address         text not null,
    standard        text not null,
    slug            text,
    name            text,
    verified        boolean not null default false,
    is_stub         boolean not null,
    reliability     text not null default 'ok',
    unreliable_reason text,
    floor_price_usd numeric,
    volume_24h_usd  numeric,
    volume_7d_usd   numeric,
    volume_30d_usd  numeric,
    listed_count    bigint,
    owners_count    bigint not null default 0,
    asset_count     bigint not null default 0,
    total_supply    numeric not null default 0,
    stub_count      bigint not null default 0,
    transfer_count  bigint not null default 0,
    last_height     bigint not null default 0,
    updated_at      timestamptz not null
);
create index collection_stats_rank on projection.collection_stats (network_id, transfer_count desc, collection_id);
create index collection_stats_rank_all on projection.collection_stats (transfer_count desc, collection_id);

create table projection.account_summaries (
    account_id     uuid primary key,
    network_id     int not null,
    address        text not null,
    asset_count    bigint not null default 0,
    transfer_count bigint not null default 0,
    first_seen_at  timestamptz not null,
    last_seen_at   timestamptz not null,
    updated_at     timestamptz not null
);
create index account_summaries_by_address on projection.account_summaries (address text_pattern_ops, network_id);

-- One row per canonical event that moves something. Finality is read off the network's line, so rows are not
-- touched when they become final. LIST by network, RANGE by height, secondary indexes per partition when full.
create table projection.transfers (
    network_id    int not null,
    height        bigint not null,
    event_index   int not null,
    sub_index     int not null,
    event_id      uuid not null,
    kind          ledger.event_kind not null,
    asset_id      uuid not null,
    collection_id uuid not null,
    from_account  uuid,
    to_account    uuid,
    qty           numeric(78, 0) not null,
    tx_hash       bytea not null,
    block_hash    bytea not null,
    event_time    timestamptz not null,
    is_reverted   boolean not null default false,
    primary key (network_id, height, event_index, sub_index, event_id)
) partition by list (network_id);

create table projection.block_cards (
    network_id  int not null,
    height      bigint not null,
    hash        bytea not null,
    parent_hash bytea not null,
    block_time  timestamptz not null,
    tx_count    int,
    event_count int not null,
    primary key (network_id, height)
);
create index block_cards_by_hash on projection.block_cards (hash);

-- Pre-joined portfolio (S0 §8.5), by account. A view: a third copy of each balance would only be a third
-- thing to keep right.
create view projection.portfolio_assets as
    select o.account_id, o.asset_id, o.network_id, o.collection_id, o.qty, o.qty_finalized, o.finality_status,
           o.updated_at, c.token_id, c.standard, c.name, c.image_url, c.is_stub, c.is_burned, c.history,
           null::numeric as estimated_value_usd
      from projection.ownership_view o
      join projection.asset_cards c on c.asset_id = o.asset_id;

create table system.reconciliation_runs (
    id              bigint generated always as identity primary key,
    projection      text not null,
    sample_size     bigint not null,
    mismatches_found bigint not null,
    mismatch_rate   double precision not null,
    detail          jsonb,
    checked_at      timestamptz not null default now()
);
