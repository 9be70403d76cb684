-- A day without its own partition must never refuse an event: the default partitions take it.
-- Day partitions are made ahead (store::buslog::ensure_partitions), so these stay empty in normal life,
-- except for inbox rows of events whose time is long ago.
create table if not exists system.outbox_events_default partition of system.outbox_events default;
create table if not exists system.bus_log_default partition of system.bus_log default;
create table if not exists system.inbox_default partition of system.inbox default;

-- A window with very many rows is numbered in several transactions: its far end and the last sequence done.
-- Rows at or below floor_seq were numbered when a dump was restored; their xids belong to another cluster.
alter table system.relay_cursor add column if not exists window_end text;
alter table system.relay_cursor add column if not exists window_seq bigint;
alter table system.relay_cursor add column if not exists floor_seq bigint not null default 0;

create index if not exists dlq_by_time on system.dlq (failed_at desc);

-- Small rows that move with every batch: room for in-page updates, and vacuum before they spread.
alter table system.relay_cursor set
    (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
alter table system.bus_partitions set
    (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
alter table system.consumer_positions set
    (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
