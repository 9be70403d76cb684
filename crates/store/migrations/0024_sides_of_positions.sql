-- What becomes final is found by the positions of the events between two lines, and each says whose rows it is about.
-- Before, every open leg of every asset of such an event was compared, and empty rows had an index of their own, which
-- every change of a quantity touched (ADR 0022).
alter table projection.transfer_positions
    add column asset_id uuid, add column from_account uuid, add column to_account uuid;
update projection.transfer_positions p
   set asset_id = d.asset_id, from_account = d.from_account_id, to_account = d.to_account_id
  from ledger.normalized_event_deltas d
 where d.normalized_event_id = p.event_id and d.delta_index = 0;
drop index projection.ownership_view_empty;
