-- A first long history is applied to the ledger alone; its owners, assets, accounts and collections are shown when it is
-- done, built from the ledger at once. Until then live waits, and so does the watermark of the read models.
alter table ledger.network_progress add column read_models_due boolean not null default false;

comment on column ledger.network_progress.read_models_due is
    'projection.ownership_view, asset_cards, collection_holders, collection_stats and account_summaries hold nothing of this network yet';
