-- table_info(queue): one row for each captured table of a queue (NULL: of all queues) with its state, the size of its
-- logs and its options of add_table(). Waits for no lock longer than 100 ms, as queue_info().
-- Result: state: resync while capture is off or some subscription has not passed a gap, else ok; reason: the latest.
-- events: rows written to the table's logs since these were made, or since the server's statistics were reset.
-- log_bytes and segments: of log segments that hold rows. Writes: nothing. Errors: 42704.
create or replace function gdq.table_info(queue text default null)
  returns table (queue_name text, table_name text, mode text, format text, key text[], columns text[], version bigint,
                 state text, reason text, events bigint, log_bytes bigint, segments integer, "where" text,
                 operations text[], granularity text, always boolean, origin boolean, pin_search_path boolean,
                 allow_rls boolean, unchanged text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
  set quote_all_identifiers = off
as $$
#variable_conflict use_column
declare
  wanted integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
  with written as materialized (
    select tv.table_id, sum(pg_stat_get_tuples_inserted(g.segment))::bigint as events
      from gdq.table_version tv join gdq.log_segment g using (version_id) group by 1
  ), logs as materialized (
    select z.table_id, sum(z.total)::bigint as bytes, count(*)::integer as segments
      from gdq.log_sizes(wanted, true) z group by 1
  ), present as (
    select c.oid, format('%I.%I', n.nspname, c.relname) as name
      from pg_class c join pg_namespace n on n.oid = c.relnamespace
  )
  select q.queue_name, coalesce(p.name, gdq.last_table_name(ct.table_id)), ct.mode, ct.format,
         (select array_agg(c->>'name') from jsonb_array_elements(v.columns) c where (c->>'key')::boolean),
         (select array_agg(c->>'name') from jsonb_array_elements(v.columns) c),
         v.version_id, case when r.reason is null then 'ok' else 'resync' end, r.reason,
         coalesce(w.events, 0), coalesce(l.bytes, 0), coalesce(l.segments, 0), ct.row_filter->>'text',
         ct.operations, ct.granularity, ct.always, ct.origin, ct.pin_search_path, ct.allow_rls,
         ct.unchanged
    from gdq.captured_table ct
    join gdq.queue q using (queue_id)
    join lateral (select tv.version_id, tv.columns from gdq.table_version tv
                   where tv.table_id = ct.table_id order by tv.version_id desc limit 1) v on true
    left join written w using (table_id)
    left join logs l using (table_id)
    left join present p on p.oid = ct.relid
   cross join lateral (select case when exists (select from gdq.resync rr
                                                 where rr.queue_id = ct.queue_id and rr.relid = ct.relid)
                                   then (select o from gdq.open_resync(ct.queue_id, ct.relid, ct.table_id) o)
                              end as reason) r
   where wanted is null or ct.queue_id = wanted order by 1, 2;
end
$$;
comment on function gdq.table_info(text) is
  'Captured tables with their state, the size of their logs and their options.';
