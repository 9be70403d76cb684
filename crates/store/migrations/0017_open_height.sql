-- What becomes confirmed with a new block is found without a look at all that waits for finality.
create index normalized_event_keys_pending on ledger.normalized_event_keys (network_id, block_number)
 where finality_status = 'pending';

-- A row that rests on something above finality says on which height. Whether that is confirmed by now follows
-- from the head, so no row has to be written again for it: finality_status here is pending or finalized.
alter table projection.ownership_view add column open_height bigint;
alter table projection.asset_cards add column open_height bigint;

update projection.ownership_view v
   set finality_status = 'pending',
       open_height = (select max(d.block_number) from ledger.unfinalized_deltas d
                       where d.asset_id = v.asset_id and d.account_id = v.account_id)
 where v.finality_status <> 'finalized';
update projection.asset_cards c
   set finality_status = 'pending',
       open_height = (select max(d.block_number) from ledger.unfinalized_deltas d where d.asset_id = c.asset_id)
 where c.finality_status <> 'finalized';

create or replace view projection.portfolio_assets as
    select o.account_id, o.asset_id, o.network_id, o.collection_id, o.qty, o.qty_finalized,
           case when o.finality_status = 'pending'
                 and o.open_height <= (select coalesce(n.head_height, n.projected_height) - n.confirmations
                                         from projection.network_status n where n.network_id = o.network_id)
                then 'confirmed' else o.finality_status end as finality_status,
           o.updated_at, c.token_id, c.standard, c.name, c.image_url, c.is_stub, c.is_burned, c.history,
           null::numeric as estimated_value_usd
      from projection.ownership_view o
      join projection.asset_cards c on c.asset_id = o.asset_id;

-- Columns that no statement looks for: sampling them is most of what an analyze of these tables costs.
alter table ledger.normalized_event_keys
    alter column event_uid set statistics 0, alter column source_event_id set statistics 0;
do $$
begin
    for part in 0..7 loop
        execute format('alter table ledger.normalized_events_%s alter column source_event_id set statistics 0,
            alter column tx_hash set statistics 0, alter column block_hash set statistics 0', part);
    end loop;
end $$;
alter table system.outbox_events_default alter column envelope set statistics 0;
