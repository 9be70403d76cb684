-- Database roles: each part of the system connects with the least it needs (`set role`, DbOptions::role).
--   tidemark_ingest  raw.*, and the cursors, heads, leases and outbox of ingestion
--   tidemark_worker  everything past raw.*, which it only reads
--   tidemark_api     reads projection.* and ref.*; raw rows by key through functions in schema projection;
--                   nothing of ledger, catalog, market, system, app
--   tidemark_admin   everything
-- Tables belong to whoever migrates; partitions are made by that user too, so roles never need ownership.
-- A login without the right to create roles works without them: it then does everything itself.

do $$
declare
    wanted text;
begin
    foreach wanted in array array['tidemark_ingest', 'tidemark_worker', 'tidemark_api', 'tidemark_admin'] loop
        if not exists (select from pg_roles where rolname = wanted) then
            begin
                execute format('create role %I nologin', wanted);
            exception
                when duplicate_object or unique_violation then null; -- another database of this server was faster
                when insufficient_privilege then
                    raise notice 'role % is not created: % may not create roles', wanted, current_user;
            end;
        end if;
        if exists (select from pg_roles where rolname = wanted) and not pg_has_role(current_user, wanted, 'member') then
            begin
                execute format('grant %I to current_user', wanted);
            exception when others then
                raise notice '% cannot become %: %', current_user, wanted, sqlerrm;
            end;
        end if;
    end loop;
end $$;

do $$
declare
    all_schemas constant text := 'ref, raw, ledger, catalog, market, projection, system, app';
    worker_schemas constant text := 'ledger, catalog, market, projection, system, app';
begin
    if exists (select from pg_roles where rolname = 'tidemark_ingest') then
        execute 'grant usage on schema ref, raw, system, app to tidemark_ingest';
        execute 'grant select, insert, update, delete on all tables in schema raw to tidemark_ingest';
        execute 'grant select, insert, update on all tables in schema ref to tidemark_ingest';
        execute 'grant select, insert, update, delete on system.sync_cursors, system.network_heads,
                 system.reorg_checkpoints, system.processes, system.job_runs to tidemark_ingest';
        execute 'grant select, insert on system.outbox_events, system.bus_streams, system.audit_log to tidemark_ingest';
        execute 'grant select, insert, update, delete on app.indexing_checkpoints, app.worker_leases,
                 app.indexing_errors to tidemark_ingest';
        execute 'alter default privileges in schema raw grant select, insert, update, delete on tables to tidemark_ingest';
    end if;
    if exists (select from pg_roles where rolname = 'tidemark_worker') then
        execute format('grant usage on schema %s to tidemark_worker', all_schemas);
        execute format('grant select, insert, update, delete on all tables in schema %s to tidemark_worker', worker_schemas);
        execute format('grant execute on all functions in schema %s to tidemark_worker', worker_schemas);
        execute 'grant select on all tables in schema raw, ref to tidemark_worker';
        execute format('alter default privileges in schema %s grant select, insert, update, delete on tables to tidemark_worker', worker_schemas);
        execute 'alter default privileges in schema raw, ref grant select on tables to tidemark_worker';
    end if;
    if exists (select from pg_roles where rolname = 'tidemark_api') then
        execute 'grant usage on schema projection, ref to tidemark_api';
        execute 'grant select on all tables in schema projection, ref to tidemark_api';
        execute 'grant execute on all functions in schema projection to tidemark_api';
        execute 'alter default privileges in schema projection, ref grant select on tables to tidemark_api';
        execute 'alter default privileges in schema projection grant execute on functions to tidemark_api';
    end if;
    if exists (select from pg_roles where rolname = 'tidemark_admin') then
        execute format('grant all on schema %s to tidemark_admin', all_schemas);
        execute format('grant all on all tables in schema %s to tidemark_admin', all_schemas);
        execute format('grant all on all sequences in schema %s to tidemark_admin', all_schemas);
        execute format('grant execute on all functions in schema %s to tidemark_admin', all_schemas);
        execute format('alter default privileges in schema %s grant all on tables to tidemark_admin', all_schemas);
        execute format('alter default privileges in schema %s grant all on sequences to tidemark_admin', all_schemas);
    end if;
end $$;
