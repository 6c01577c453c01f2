-- What is going on: how much is unread, how fast it comes, how far each consumer is behind. Cheap with a thousand
-- captured tables: sizes of files, and a few pages of the logs that hold rows.

-- queue_status(queue): one row a queue (NULL: all): events_per_second: numbers given out over the last minute, or since
-- the oldest tick that there is; bytes and number of the log segments that hold rows; tables_resync: captured tables in
-- resync; open_writers: transactions that have written to its logs and are not over. How much is unread is said for each
-- consumer, by consumer_status(). change_logs false: bytes and number of the event log's segments alone, for who has
-- those of the tables from table_status(). Writes: nothing. Errors: 42704.
create or replace function gdq.queue_status(queue text default null, change_logs boolean default true)
  returns table (queue_name text, last_tick bigint, tick_age interval, events_per_second double precision, last_event bigint, log_bytes bigint, segments integer,
                 tables integer, tables_resync integer, consumers integer, open_writers integer)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
#variable_conflict use_column
declare
  wanted integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
  with logs as materialized (
    select z.queue, sum(z.total)::bigint as bytes, count(*)::integer as segments
      from (select s.queue, s.total from gdq.log_sizes(wanted, true) s where change_logs
            union all
            select q.queue_id, gdq.relation_bytes(e) from gdq.queue q, gdq.event_segments(q.queue_id) e
             where not change_logs and (wanted is null or q.queue_id = wanted) and e <> all (gdq.busy_relations()) and gdq.relation_bytes(e, 'main') > 0) z group by 1
  ), queues as materialized (
    select q.queue_id, q.queue_name, gdq.events_given_out(q.queue_id) as last_event, gdq.retained_tick(q.queue_id, interval '1 minute') as minute
      from gdq.queue q where wanted is null or q.queue_id = wanted
  )
  select q.queue_name, t.tick_id, clock_timestamp() - t.created_at,
         (q.last_event - old.event_seq) / greatest(extract(epoch from clock_timestamp() - old.created_at), 0.001)::double precision,
         q.last_event, coalesce(l.bytes, 0), coalesce(l.segments, 0),
         (select count(*)::integer from gdq.captured_table ct where ct.queue_id = q.queue_id),
         (select count(distinct ct.table_id)::integer from gdq.resync r join gdq.captured_table ct using (queue_id, relid), gdq.open_resync(ct.queue_id, ct.relid, ct.table_id)
           where r.queue_id = q.queue_id),
         (select count(*)::integer from gdq.subscription s where s.queue_id = q.queue_id),
         (select count(distinct w.xid)::integer from gdq.open_writers(q.queue_id) w)
    from queues q
    left join logs l on l.queue = q.queue_id
    left join gdq.tick old on old.tick_id = q.minute
    left join lateral (select tt.tick_id, tt.created_at from gdq.tick tt where tt.queue_id = q.queue_id and not tt.refresh order by tt.tick_id desc limit 1) t on true
   order by 1;
end
$$;
comment on function gdq.queue_status(text, boolean) is 'Queues with their event rate, age of the last tick and size of the logs.';
