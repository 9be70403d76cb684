-- An envelope is written once and read as a whole: kept as the text it came in, it is not taken apart to be stored and put
-- together again to be read (ADR 0021).
alter table system.outbox_events alter column envelope type json using envelope::json;

create or replace function projection.stream_read(after bigint, rows_max int)
returns table (pseq bigint, topic text, payload jsonb, at timestamptz)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select l.pseq, o.topic, (o.envelope -> 'payload')::jsonb, o.created_at
      from (select greatest(after, coalesce((select b.pseq - 1 from system.bus_log b
                                              where b.stream = 'projection' and b.part = 0
                                              order by b.pseq limit 1), after)) as low) f
     cross join lateral (select b.pseq, b.outbox_day, b.outbox_seq
                           from system.bus_log b
                          where b.stream = 'projection' and b.part = 0
                            and b.pseq > f.low and b.pseq <= f.low + least(rows_max, 1000)
                          order by b.pseq
                          limit 1000) l
      -- Lateral with a limit: one probe per row, never a scan of a day's outbox.
     cross join lateral (select e.topic, e.envelope, e.created_at from system.outbox_events e
                          where e.day = l.outbox_day and e.seq = l.outbox_seq limit 1) o
     order by l.pseq
$$;
