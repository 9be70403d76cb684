-- Blocks whose events are normalized, kept a little past finality. Two rows at one height mean that the
-- message of a reorg is still on its way; a block found here below finality may never be orphaned.
create table ledger.recent_blocks (
    network_id   int not null,
    block_hash   bytea not null,
    block_number bigint not null,
    primary key (network_id, block_hash)
);
create index recent_blocks_by_height on ledger.recent_blocks (network_id, block_number);

-- What accounts held before our first block, as far as it is known (ADR 0008). The amount itself moves
-- through an event of kind `opening`; a row here says that the question was asked or answered.
create table ledger.openings (
    asset_id   uuid not null,
    account_id uuid not null,
    network_id int not null,
    qty        numeric(78, 0) not null,
    state      text not null check (state in ('known', 'implied', 'unknown')),
    parts      int not null default 0,     -- opening events made so far; the next one's sub_index
    primary key (asset_id, account_id)
);
