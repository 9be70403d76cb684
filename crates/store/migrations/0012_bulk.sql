-- Secondary indexes that are away while a first, large history is built in bulk; restored when it is done.
create table system.deferred_indexes (
    name       text primary key,
    definition text not null,
    dropped_at timestamptz not null default now()
);
