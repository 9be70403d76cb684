-- ADDR_SHARDS (S3): a network's contracts in parts, each with a cursor of its own.
alter table system.sync_cursors add column shard int not null default 0;

-- What each shard gave of a block, where there are several: raw.blocks.event_count is their sum.
create table raw.shard_blocks (
    network_id  int not null,
    shard       int not null,
    height      bigint not null,
    event_count int not null,
    primary key (network_id, shard, height)
);
