-- The schemas of S0 §8.1 that this round needs, and what everything else refers to.
-- The same migrations run on both databases (DB_RAW_URL and DB_APP_URL); tables of the other side stay empty.

create schema if not exists ref;
create schema if not exists raw;
create schema if not exists ledger;
create schema if not exists catalog;
create schema if not exists market;
create schema if not exists projection;
create schema if not exists system;
create schema if not exists app;

create type ledger.event_finality_status as enum ('pending', 'confirmed', 'finalized', 'reverted');
create type ledger.event_kind as enum
    ('transfer', 'mint', 'burn', 'listing', 'sale', 'offer', 'cancel', 'opening', 'metadata');

create table ref.networks (
    id             int primary key,
    slug           text not null unique,
    family         text not null,
    start_block    bigint not null,
    confirmations  bigint not null,
    chain_identity text,                 -- chain id and genesis hash as first seen; another one is refused
    created_at     timestamptz not null default now()
);

create table ref.standards (
    id                text primary key,
    is_fungible_class boolean not null
);
insert into ref.standards (id, is_fungible_class) values ('erc721', false), ('erc1155', true);

-- One row per (worker, network): the contiguous watermark, never max(done) (S1 §6.1).
create table app.indexing_checkpoints (
    worker_name text not null,
    network_id  int not null,
    height      bigint not null,         -- everything at or below is done
    updated_at  timestamptz not null default now(),
    primary key (worker_name, network_id)
);

-- S1 §6.2. Ranges are [from_height, to_height). `epoch` fences: it grows at every claim.
create table app.worker_leases (
    id               bigint generated always as identity primary key,
    worker_type      text not null,
    network_id       int not null,
    from_height      bigint not null,
    to_height        bigint not null,
    status           text not null check (status in ('ACTIVE', 'COMPLETED', 'FAILED')),
    leased_by        text not null,
    lease_expires_at timestamptz not null,
    attempt          int not null default 0,
    epoch            bigint not null default 1,
    last_error       text,
    created_at       timestamptz not null default now(),
    updated_at       timestamptz not null default now(),
    unique (worker_type, network_id, from_height),
    check (from_height < to_height)
);
create index worker_leases_open on app.worker_leases (worker_type, network_id, from_height) where status <> 'COMPLETED';

-- S1 §7.1, with dedupe and truncation.
create table app.indexing_errors (
    id             bigint generated always as identity primary key,
    worker_name    text not null,
    network_id     int not null,
    block_height   bigint not null,
    transaction_id bytea not null default '',
    error_hash     bytea not null,
    severity       text not null check (severity in ('FATAL', 'WARN')),
    message        text not null,
    raw_data       text,
    raw_ref        text,
    occurrences    bigint not null default 1,
    resolved       boolean not null default false,
    created_at     timestamptz not null default now(),
    last_seen_at   timestamptz not null default now(),
    unique (worker_name, network_id, block_height, transaction_id, error_hash)
);
create index indexing_errors_triage on app.indexing_errors (resolved, worker_name, created_at desc);
create index indexing_errors_height on app.indexing_errors (block_height);

-- Roles and tasks of running processes, for `status` and the operator page.
create table system.processes (
    instance     text not null,
    role         text not null,
    state        text not null,          -- starting | running | restarting | stopped | halted
    restarts     bigint not null default 0,
    last_error   text,
    started_at   timestamptz not null default now(),
    heartbeat_at timestamptz not null default now(),
    primary key (instance, role)
);

create table system.job_runs (
    id          bigint generated always as identity primary key,
    job_type    text not null,
    job_id      text not null,
    attempt     int not null default 1,
    status      text not null,
    detail      jsonb,
    started_at  timestamptz not null default now(),
    finished_at timestamptz,
    last_error  text
);
create index job_runs_by_type on system.job_runs (job_type, started_at desc);

create table system.audit_log (
    id     bigint generated always as identity primary key,
    at     timestamptz not null default now(),
    actor  text not null,
    action text not null,
    target text not null,
    reason text,
    detail jsonb
);
