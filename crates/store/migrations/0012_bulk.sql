-- Secondary indexes that are away while a first, large history is built in bulk; restored when it is done.
create table system.deferred_indexes (
    name       text primary key,
    definition text not null,
    dropped_at timestamptz not null default now()
);

-- Balances older than a network's start block that the chain was asked for: one question per pair, ever.
create table ledger.openings (
    asset_id   uuid not null,
    account_id uuid not null,
    network_id int not null,
    qty        numeric(78, 0),   -- null: the node cannot tell
    asked_at   timestamptz not null default now(),
    primary key (asset_id, account_id)
);
