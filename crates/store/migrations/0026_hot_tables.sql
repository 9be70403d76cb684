-- Small tables whose rows are written again or come and go with every block. Vacuum comes to them by the number of dead
-- rows, not by their share, and finishes at once: they are in memory, and every walk over their dead rows is one of a
-- live block.
alter table projection.collection_stats set (
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0);
alter table ledger.digests set (
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0);
alter table projection.transfer_positions set (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
alter table ledger.unfinalized_deltas set (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

-- A leg is found by its movement, and the rows that rest on something open by the positions of events: what served for
-- that was written with every leg and every owner.
drop index ledger.unfinalized_deltas_by_event;
drop index projection.ownership_view_open;
