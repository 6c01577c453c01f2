-- table_status(queue): one row a captured table: its state, and the bytes and number of its log segments that hold rows;
-- events: rows written to its logs since they were made, or since the server's statistics were reset.
-- Writes: nothing. Errors: 42704.
create or replace function gdq.table_status(queue text default null)
  returns table (queue_name text, table_name text, mode text, state text, reason text, events bigint, log_bytes bigint, segments integer)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms' set quote_all_identifiers = off
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
    select z.table_id, sum(z.total)::bigint as bytes, count(*)::integer as segments from gdq.log_sizes(wanted, true) z group by 1
  )
  select q.queue_name, coalesce(n.name, ct.table_name), ct.mode, case when r.reason is null then 'ok' else 'resync' end, r.reason,
         coalesce(w.events, 0), coalesce(l.bytes, 0), coalesce(l.segments, 0)
    from gdq.captured_table ct join gdq.queue q using (queue_id)
    left join written w using (table_id)
    left join logs l using (table_id)
    left join (select c.oid, format('%I.%I', nsp.nspname, c.relname) as name from pg_class c join pg_namespace nsp on nsp.oid = c.relnamespace) n on n.oid = ct.relid
   cross join lateral (select case when exists (select from gdq.resync rr where rr.queue_id = ct.queue_id and rr.relid = ct.relid)
                                   then (select o from gdq.open_resync(ct.queue_id, ct.relid, ct.table_id) o) end as reason) r
   where wanted is null or ct.queue_id = wanted order by 1, 2;
end
$$;
comment on function gdq.table_status(text) is 'Captured tables with their state and the size of their logs.';
