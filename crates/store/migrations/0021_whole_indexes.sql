-- After a first long history, indexes of partitioned tables came back for the parent alone, without those of its
-- partitions. Such shells go, and are built by the next worker that finds history done.
do $$
declare
    shell record;
begin
    for shell in
        select format('%I.%I', n.nspname, i.relname) as name, pg_get_indexdef(i.oid) as definition
          from pg_index x
          join pg_class i on i.oid = x.indexrelid
          join pg_namespace n on n.oid = i.relnamespace
         where i.relkind = 'I' and not x.indisvalid and n.nspname in ('ledger', 'catalog', 'projection')
    loop
        insert into system.deferred_indexes (name, definition) values (shell.name, shell.definition)
        on conflict (name) do nothing;
        execute format('drop index %s', shell.name);
    end loop;
end $$;

update system.deferred_indexes set definition = replace(definition, ' ON ONLY ', ' ON ')
 where definition like '% ON ONLY %';
