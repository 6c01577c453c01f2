-- Sizes of logs and control tables.

-- log_sizes(queue_id, with_total): the log segments of a queue (NULL: of all) that hold rows, with their sizes.
-- Result: table_id: NULL for the event log; bytes: without indexes and out-of-line values; total: with them, only if
-- with_total, since that takes seven times as long. A segment that is gone or locked is left out. All sizes are taken
-- in one statement; only when that meets such a segment, one by one, which takes three times as long. Writes: nothing.
create or replace function gdq.log_sizes(queue_id integer, with_total boolean default false)
  returns table (queue integer, table_id integer, segment regclass, bytes bigint, total bigint)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
#variable_conflict use_column
declare
  busy oid[] := gdq.busy_relations();
  queues integer[];
  tables integer[];
  segments regclass[];
  sizes bigint[];
  totals bigint[];
begin
  select array_agg(l.q), array_agg(l.t), array_agg(l.s) into queues, tables, segments
    from (select ct.queue_id as q, ct.table_id as t, g.segment as s
            from gdq.captured_table ct
            join gdq.table_version tv using (table_id)
            join gdq.log_segment g using (version_id)
          union all
          select q.queue_id, null, e from gdq.queue q, gdq.event_segments(q.queue_id) e) l
   where (log_sizes.queue_id is null or l.q = log_sizes.queue_id) and l.s <> all (busy);
  begin
    sizes := array(select pg_relation_size(s) from unnest(segments) with ordinality u(s, n) order by n);
    totals := array(select case when with_total and b > 0 then pg_total_relation_size(s) end
                      from unnest(segments, sizes) with ordinality u(s, b, n) order by n);
  exception when lock_not_available or undefined_table or internal_error then
    sizes := array(select gdq.relation_bytes(s, 'main') from unnest(segments) with ordinality u(s, n) order by n);
    totals := array(select case when with_total and b > 0 then gdq.relation_bytes(s) end
                      from unnest(segments, sizes) with ordinality u(s, b, n) order by n);
  end;
  return query select * from unnest(queues, tables, segments, sizes, totals) l(q, t, s, b, a) where l.b > 0;
end
$$;
comment on function gdq.log_sizes(integer, boolean) is 'The log segments of a queue that hold rows, with their sizes.';

-- filled_logs(queue_id): the log segments of a queue (NULL: of all) that hold rows, with the sizes of log_sizes().
-- Result: written: rows are written to the segment now; next: they will be after the next switch. table_id: NULL for
-- the event log. Writes: nothing.
create or replace function gdq.filled_logs(queue_id integer)
  returns table (queue_id integer, table_id integer, segment regclass, bytes bigint, total bigint, written boolean,
                 next boolean)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  with sizes as materialized (
    select * from gdq.log_sizes(filled_logs.queue_id, true)
  ), newest as materialized (
    -- the log of a table that is gone, or captured through its root now, is not written any more
    select v.table_id, max(v.version_id) as version_id
      from gdq.captured_table ct join gdq.table_version v using (table_id)
     where not exists (select from gdq.resync r
                        where r.queue_id = ct.queue_id and r.relid = ct.relid and r.kind in ('dropped', 'covered'))
        or gdq.capture_state(ct.queue_id, ct.relid) not in ('dropped', 'covered')
     group by 1
  )
  select z.queue, z.table_id, z.segment, z.bytes, z.total,
         coalesce(g.slot = r.current_slot, false), coalesce(g.slot = (r.current_slot + 1) % 3, false)
    from sizes z
    join gdq.log_segment g using (segment)
    left join newest n on n.version_id = g.version_id
    left join gdq.log_ring r on r.version_id = n.version_id
   where z.table_id is not null
  union all
  select z.queue, null, z.segment, z.bytes, z.total, z.segment = e.current, z.segment = e.next
    from sizes z
    join (select er.queue_id,
                 to_regclass(format('gdq_log.q%s_s%s', er.queue_id, er.current_slot)) as current,
                 to_regclass(format('gdq_log.q%s_s%s', er.queue_id, (er.current_slot + 1) % 3)) as next
            from gdq.event_ring er) e on e.queue_id = z.queue
   where z.table_id is null
$$;
comment on function gdq.filled_logs(integer) is
  'The log segments of a queue that hold rows, and which of them are written.';

-- log_name(queue_id, table_id): the name of a log in the texts of doctor(): that of its table, or of the queue for the
-- event log (table_id NULL). Writes: nothing.
create or replace function gdq.log_name(queue_id integer, table_id integer) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return coalesce((select coalesce(gdq.table_name(ct.relid), ct.table_name)
                     from gdq.captured_table ct where ct.table_id = log_name.table_id),
                  (select format('queue %I', q.queue_name) from gdq.queue q where q.queue_id = log_name.queue_id));
end
$$;
comment on function gdq.log_name(integer, integer) is 'The name of a log in the texts of doctor().';

-- unsummarised_pages(segment): the pages of a log segment that its BRIN index does not describe: every search reads
-- them, which EXPLAIN shows for a number that no row has. Writes: nothing.
create or replace function gdq.unsummarised_pages(segment regclass) returns bigint
language plpgsql volatile security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set max_parallel_workers_per_gather = 0
as $$
declare
  plan json;
begin
  execute format('explain (analyze, timing off, summary off, format json) select from %s where ev_txid = -1',
                 gdq.table_name(segment)) into plan;
  return coalesce((plan->0->'Plan'->>'Lossy Heap Blocks')::bigint, 0);
end
$$;
comment on function gdq.unsummarised_pages(regclass) is 'Pages of a log segment that its BRIN index does not describe.';

-- control_sizes(): bytes of the control tables that rotate, with both slots. Writes: nothing.
create or replace function gdq.control_sizes() returns table (name text, bytes bigint)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select c.oid::regclass::text,
         (select sum(pg_relation_size(i.inhrelid)) from pg_inherits i where i.inhparent = c.oid)::bigint
    from pg_class c
   where c.relnamespace = 'gdq'::regnamespace and c.relkind = 'p'
$$;
comment on function gdq.control_sizes() is 'Bytes of the control tables that rotate.';
