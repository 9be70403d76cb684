-- Indexes whose keys are hashes, and which history builds at its end, are built with room for what comes next (ADR 0030). With
-- pages that are nine tenths full nearly each of them is split by the next tenth of rows: all at once, and right when a
-- long history is shown. What stands stays as it is; it counts where pages are made.
do $$
declare
    one text;
begin
    foreach one in array array[
        'ledger.normalized_events_by_asset', 'ledger.ownership_current_by_account', 'ledger.accounts_by_address',
        'projection.ownership_view_pkey', 'projection.ownership_view_by_account',
        'projection.collection_holders_pkey', 'projection.collection_holders_by_account',
        'projection.collection_holders_rank', 'projection.asset_cards_pkey', 'projection.asset_cards_by_token',
        'projection.account_summaries_pkey', 'projection.account_summaries_by_address']
    loop
        execute format('alter index if exists %s set (fillfactor = 75)', one);
        -- Those that history took away come back so.
        update system.deferred_indexes
           set definition = regexp_replace(definition, '( WHERE |$)', ' WITH (fillfactor=''75'')\1')
         where name = one and definition not like '%fillfactor%';
    end loop;
end
$$;
-- A fifth of the cards gets a newer transfer with the next tenth of events: room for them where they stand.
alter table projection.asset_cards set (fillfactor = 80);
