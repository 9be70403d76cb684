-- The owners of a live block are written on a connection of their own, beside its transfers and cards, and committed right
-- before them (ADR 0029). What they change in accounts and statistics is written down with them: whoever finds it
-- there, because the other commit never came, adds it.
create table projection.owners_ahead (
    id          bigint generated always as identity primary key,
    network_id  int not null,
    accounts    uuid[] not null,
    assets      bigint[] not null,
    collections uuid[] not null,
    owners      bigint[] not null,
    check (cardinality(accounts) = cardinality(assets) and cardinality(collections) = cardinality(owners))
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500,
        autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_scale_factor = 0,
        toast.autovacuum_vacuum_threshold = 5000, toast.autovacuum_vacuum_cost_delay = 0);
comment on table projection.owners_ahead is
    'Assets per account and owners per collection, more or fewer, that owners committed ahead of their block made';
