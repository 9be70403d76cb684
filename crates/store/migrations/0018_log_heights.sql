-- History appends the log of a segment in a transaction beside the one that moves the ledger's head. A log that is
-- ahead of the head was left by a process that died between the two commits.
create table ledger.log_heights (
    network_id integer primary key,
    height bigint not null default -1
);
insert into ledger.log_heights (network_id) select network_id from ledger.network_progress;
