-- Asset cards are caught up beside owners, on a connection of their own that commits first. What they change in their
-- collections' statistics is noted here, until the transaction that catches up the rest adds it.
create table projection.stats_to_come (
    network_id    integer not null,
    collection_id uuid not null,
    assets        bigint not null,
    supply        numeric not null,
    stubs         bigint not null,
    primary key (network_id, collection_id)
);
comment on table projection.stats_to_come is
    'What cards that are caught up change in collection_stats, until it is added there';

-- Rows that a long history built and that change with every transfer: with some room on their pages they change in
-- place, without an entry in every index.
alter table catalog.assets set (fillfactor = 85);
alter table projection.asset_cards set (fillfactor = 90);
alter table projection.ownership_view set (fillfactor = 90);
alter table projection.account_summaries set (fillfactor = 80);

-- Indexes of the history of balances belong to its partitions, not to the whole: the newest partition does without
-- while a long backlog goes in, and gets them at its end.
do $$
declare
    part record;
begin
    create temp table parts on commit drop as
        select c.oid::regclass::text as name, c.relname::text as relname, pg_get_expr(c.relpartbound, c.oid) as bound
          from pg_inherits i join pg_class c on c.oid = i.inhrelid
         where i.inhparent = 'ledger.ownership_history'::regclass;
    -- A first long history may be on its way without them.
    insert into system.deferred_indexes (name, definition)
    select format('ledger.%I', p.relname || '_' || x.suffix),
           format('CREATE INDEX %I ON ledger.%I USING btree %s', p.relname || '_' || x.suffix, p.relname, x.columns)
      from parts p
      cross join (values ('ledger.ownership_history_by_account', 'account_id_block_number_idx', '(account_id, block_number)'),
                         ('ledger.ownership_history_by_asset', 'asset_id_block_number_idx', '(asset_id, block_number)'))
                 x (parent, suffix, columns)
     where x.parent in (select d.name from system.deferred_indexes d)
    on conflict (name) do nothing;
    delete from system.deferred_indexes
     where name in ('ledger.ownership_history_by_account', 'ledger.ownership_history_by_asset');
    for part in select * from parts loop
        execute format('alter table ledger.ownership_history detach partition %s', part.name);
    end loop;
    drop index if exists ledger.ownership_history_by_account;
    drop index if exists ledger.ownership_history_by_asset;
    for part in select * from parts loop
        execute format('alter table ledger.ownership_history attach partition %s %s', part.name, part.bound);
    end loop;
end $$;
