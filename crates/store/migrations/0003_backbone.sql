-- The event backbone (S2, design.md §6). The outbox is the durable log, append-only and partitioned by day;
-- the relay numbers its rows without gaps per (stream, part) in system.bus_log. Engines hold copies.

create table system.outbox_events (
    seq            bigint generated always as identity,
    day            date not null default (now() at time zone 'utc')::date,
    xid            xid8 not null default pg_current_xact_id(),
    id             uuid not null,            -- the envelope's eventId (a ULID's 128 bits)
    aggregate_type text not null,
    aggregate_id   text not null,
    event_type     text not null,
    topic          text not null,            -- the subject, with version
    stream         text not null,            -- the service
    part           smallint not null,
    partition_key  text not null,
    correlation_id uuid not null,
    retention_class text not null,
    tenant_id      text not null,
    envelope       jsonb not null,
    created_at     timestamptz not null default now(),
    primary key (day, seq)
) partition by range (day);
create index outbox_events_by_xid on system.outbox_events (xid, seq);
create index outbox_events_by_id on system.outbox_events (id);

-- Gapless numbers per (stream, part). A row points into the outbox; the envelope is not copied.
create table system.bus_log (
    stream     text not null,
    part       smallint not null,
    pseq       bigint not null,
    outbox_day date not null,
    outbox_seq bigint not null,
    numbered_at timestamptz not null default now(),
    primary key (stream, part, pseq, outbox_day)
) partition by range (outbox_day);

-- One row: the relay's snapshot window and its fence. `lineage` changes when a dump was restored.
create table system.relay_cursor (
    id          int primary key default 1 check (id = 1),
    snapshot    text not null,               -- pg_snapshot of the last window
    epoch       bigint not null default 0,   -- fencing: grows with every new owner
    owner       text,
    lease_expires_at timestamptz,
    system_identifier text not null,
    updated_at  timestamptz not null default now()
);

-- Next number and what the engine has acknowledged, per (stream, part).
create table system.bus_partitions (
    stream         text not null,
    part           smallint not null,
    next_pseq      bigint not null default 1,
    published_pseq bigint not null default 0,
    engine         text not null default 'postgres',
    primary key (stream, part)
);

-- A stream's partition count is part of its identity.
create table system.bus_streams (
    stream     text primary key,
    parts      smallint not null,
    created_at timestamptz not null default now()
);

-- Where each ordered handler is; moves in the transaction of its effect. Fenced by epoch.
create table system.consumer_positions (
    handler_kind text not null,
    stream       text not null,
    part         smallint not null,
    pseq         bigint not null default 0,
    epoch        bigint not null default 0,
    owner        text,
    lease_expires_at timestamptz,
    updated_at   timestamptz not null default now(),
    primary key (handler_kind, stream, part)
);

-- Declared consumers: retention never drops what one of them still needs.
create table system.consumers (
    handler_kind text primary key,
    subjects     text[] not null,
    side_effects boolean not null,
    declared_at  timestamptz not null default now()
);

create type system.inbox_status as enum ('PENDING', 'ACK', 'FAIL', 'DLQ');
create table system.inbox (
    event_id        uuid not null,
    event_day       date not null,           -- from the ULID's time, so equal for equal ids
    handler_kind    text not null,
    status          system.inbox_status not null default 'PENDING',
    attempts        int not null default 0,
    last_error      text,
    stream          text not null,
    part            smallint not null,
    pseq            bigint not null,
    partition_key   text not null,
    block_number    bigint,
    first_seen_at   timestamptz not null default now(),
    last_attempt_at timestamptz,
    primary key (event_id, handler_kind, event_day)
) partition by range (event_day);
create index inbox_open on system.inbox (handler_kind, status, stream, part, pseq) where status <> 'ACK';

-- A poison event parks its key; followers are parked behind it in order.
create table system.dlq (
    id            bigint generated always as identity primary key,
    handler_kind  text not null,
    source_topic  text not null,
    stream        text not null,
    part          smallint not null,
    pseq          bigint not null,
    partition_key text not null,
    event_id      uuid not null,
    envelope      jsonb not null,
    kind          text not null check (kind in ('poison', 'follower', 'schema')),
    error         text not null,
    error_chain   text[] not null default '{}',
    attempts      int not null,
    versions      jsonb not null default '{}',
    failed_at     timestamptz not null default now(),
    resolved_at   timestamptz,
    resolution    text check (resolution in ('retried', 'released', 'discarded')),
    resolved_by   text,
    resolve_reason text,
    unique (handler_kind, event_id)
);
create index dlq_open on system.dlq (handler_kind, partition_key, pseq) where resolved_at is null;

create table system.parked_keys (
    handler_kind  text not null,
    stream        text not null,
    part          smallint not null,
    partition_key text not null,
    pseq          bigint not null,           -- of the poison event
    parked_at     timestamptz not null default now(),
    primary key (handler_kind, stream, partition_key)
);

create table system.replays (
    id           text primary key,
    handler_kind text not null,
    requested_by text not null,
    reason       text,
    selector     jsonb not null,
    status       text not null,
    events       bigint not null default 0,
    created_at   timestamptz not null default now(),
    finished_at  timestamptz
);
