-- Claims are written in the order of time, so the archive job finds the old ones by blocks, not by reading all.
create index applied_events_by_age on ledger.applied_events using brin (applied_at);
