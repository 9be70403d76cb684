-- Who is alive (issue 4). A process shows its life by a session lock of its own: the kernel closes its
-- connections when it dies, and the server lets go of the lock at that moment. A lease whose holder showed its
-- life so and shows it no more is free at once; every other lease runs out by time. Fencing is the epoch, as
-- ever.
alter table system.relay_cursor add column if not exists session_key bigint;
alter table system.consumer_positions add column if not exists session_key bigint;

-- Processes that want partitions of a handler, also those that hold none: each takes its share.
create table if not exists system.consumer_members (
    handler_kind text not null,
    owner        text not null,
    session_key  bigint,
    expires_at   timestamptz not null,
    primary key (handler_kind, owner)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- Is a session lock with this key held by anybody in this database?
create or replace function system.is_present(key bigint) returns boolean
language sql stable as $$
    select exists (
        select from pg_locks l
        where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
          and l.database = (select d.oid from pg_database d where d.datname = current_database())
          and l.classid = ((key >> 32) & 4294967295)::oid and l.objid = (key & 4294967295)::oid)
$$;
