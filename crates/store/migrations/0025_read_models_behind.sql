-- A long backlog on top of what is stored is also applied to the ledger alone. Its owners, assets, accounts and
-- collections are shown when it is done: what it touched is merged at once, in the order of the keys.
alter table ledger.network_progress add column read_models_height bigint;

comment on column ledger.network_progress.read_models_due is
    'projection.ownership_view, asset_cards, collection_holders, collection_stats and account_summaries are not kept: they stand at read_models_height';
comment on column ledger.network_progress.read_models_height is
    'While read_models_due: the height up to which they hold this network; null if they hold nothing of it';

-- The history of balances begins as one partition of all times. A new one begins when the newest is large, so that
-- what is added touches small indexes.
alter table ledger.ownership_history detach partition ledger.ownership_history_default;
alter table ledger.ownership_history_default rename to ownership_history_0000;
alter index if exists ledger.ownership_history_default_account_id_block_number_idx
    rename to ownership_history_0000_account_id_block_number_idx;
alter index if exists ledger.ownership_history_default_asset_id_block_number_idx
    rename to ownership_history_0000_asset_id_block_number_idx;
alter table ledger.ownership_history attach partition ledger.ownership_history_0000
    for values from (minvalue) to (maxvalue);
