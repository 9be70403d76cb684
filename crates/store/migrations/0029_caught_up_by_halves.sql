-- Two connections catch up read models side by side, one half of the collections each (ADR 0027). Both note what they
-- changed: rows that are added and never updated, so that neither waits for the other.
alter table projection.stats_to_come
    drop constraint stats_to_come_pkey,
    add column owners bigint not null default 0,
    add column id bigint generated always as identity primary key,
    alter column assets set default 0,
    alter column supply set default 0,
    alter column stubs set default 0;
comment on table projection.stats_to_come is
    'What holders and cards that are caught up change in collection_stats, until it is added there';

create table projection.accounts_to_come (
    network_id int not null,
    account_id uuid not null,
    assets     bigint not null,
    id         bigint generated always as identity primary key
);
comment on table projection.accounts_to_come is
    'What holdings that are caught up change in account_summaries, until it is added there';
