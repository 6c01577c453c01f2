-- doctor_flow(queue_id, patience): the part of doctor() about what should move: ticks, consumers. Writes: nothing.
create or replace function gdq.doctor_flow(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set intervalstyle = postgres
as $$
#variable_conflict use_column
begin
  return query
  select 'error', 'ticker_silent', q.queue_name, format('queue %I has had no tick for %s, though one is due', q.queue_name, date_trunc('second', t.age)),
         'Start gdq ticker, or look at its log.', false
    from gdq.queue q, lateral (select clock_timestamp() - tt.created_at as age, tt.event_seq from gdq.tick tt
                                where tt.queue_id = q.queue_id and not tt.refresh order by tt.tick_id desc limit 1) t
   where (doctor_flow.queue_id is null or q.queue_id = doctor_flow.queue_id)
     and t.age > patience + case when gdq.events_given_out(q.queue_id) > t.event_seq then q.ticker_max_lag else q.ticker_idle_period end;
  return query
  with behind as materialized (
    select c.*, q.rotation_bytes, p.batch_no, p.finished_at
      from gdq.queue q, gdq.consumer_status(q.queue_name) c
      join gdq.consumer n using (consumer_name) join gdq.subscription s using (consumer_id)
      left join lateral (select pp.batch_no, pp.finished_at from gdq.position pp where pp.subscription_id = s.subscription_id order by pp.batch_no desc limit 1) p on true
     where s.queue_id = q.queue_id and (doctor_flow.queue_id is null or q.queue_id = doctor_flow.queue_id)
  )
  select 'warning', 'consumer_never_seen', b.consumer_name,
         format('consumer %I of queue %I was registered %s ago and has never asked for a batch; its changes are kept', b.consumer_name, b.queue_name,
                date_trunc('second', clock_timestamp() - b.finished_at)),
         'Start it, or unregister it.', false
    from behind b where b.batch_no = 0 and b.batch_age is null and clock_timestamp() - b.finished_at > patience
  union all
  select 'warning', 'consumer_lagging', b.consumer_name,
         format('consumer %I of queue %I is %s, %s events and %s behind%s', b.consumer_name, b.queue_name, date_trunc('second', b.lag), b.unread_events,
                pg_size_pretty(b.unread_bytes), ', last seen ' || date_trunc('second', clock_timestamp() - b.last_seen) || ' ago'),
         'See whether it runs and keeps up; unregister it when it is not needed: its changes are kept.', false
    from behind b where not (b.batch_no = 0 and b.batch_age is null) and (b.lag > patience or b.unread_bytes > 2 * b.rotation_bytes)
  union all
  select 'warning', 'dead_letters', b.consumer_name, format('consumer %I of queue %I has given up %s events', b.consumer_name, b.queue_name, b.dead_letters),
         'See gdq.dead_letters(); replay or purge them.', false
    from behind b where b.dead_letters > 0;
end
$$;
comment on function gdq.doctor_flow(integer, interval) is 'The part of doctor() about ticks and consumers.';

-- doctor_logs(queue_id, patience): the part of doctor() about logs: segments that everybody has read and somebody's lock
-- keeps from being emptied, logs that cannot rotate, indexes that are behind. Writes: nothing.
create or replace function gdq.doctor_logs(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  log record;
  behind bigint;
  busy oid[] := gdq.busy_relations();
  block constant bigint := current_setting('block_size')::bigint;
  behind_max constant bigint := 16777216;
begin
  return query
  select 'warning', 'rotation_blocked', coalesce(gdq.table_name(ct.relid), ct.table_name),
         format('the log of %s holds %s and cannot switch: its next segment still holds rows', coalesce(gdq.table_name(ct.relid), ct.table_name), pg_size_pretty(cur.total)),
         'See which consumer lags, the queue''s retention, and what holds the segment.', false
    from gdq.queue q join gdq.captured_table ct using (queue_id)
    join gdq.log_ring r on r.version_id = gdq.current_version(ct.table_id)
   cross join lateral (select sum(gdq.relation_bytes(s.segment)) as total from gdq.log_segment s
                        where s.version_id = r.version_id and s.slot = r.current_slot and s.segment <> all (busy)) cur
   where (doctor_logs.queue_id is null or q.queue_id = doctor_logs.queue_id) and cur.total > 2 * q.rotation_bytes
     and exists (select from gdq.log_segment s where s.version_id = r.version_id and s.slot = (r.current_slot + 1) % 3
                    and s.segment <> all (busy) and pg_relation_size(s.segment) > 0);
  for log in select i.queue_id, i.table_id, i.segment, h.holders
               from gdq.idle_segments() i
              cross join lateral gdq.segment_holders(i.segment, patience) h(holders)
              where (doctor_logs.queue_id is null or i.queue_id = doctor_logs.queue_id) and i.segment <> all (busy) and h.holders is not null loop
    if gdq.segment_is_consumed(log.segment, gdq.held_snapshot(log.queue_id, log.table_id)) then
      return query select 'warning', 'truncation_blocked', log.segment::text, format('segment %s is read by all and cannot be emptied: held by %s', log.segment, log.holders),
        'End that transaction: select pg_terminate_backend(pid), or COMMIT or ROLLBACK PREPARED.', false;
    end if;
  end loop;
  for log in select z.segment from gdq.log_sizes(doctor_logs.queue_id) z where z.bytes > behind_max loop
    behind := gdq.unsummarised_pages(log.segment) * block;
    if behind > behind_max then
      return query select 'warning', 'index_behind', log.segment::text,
        format('%s of segment %s are not in the summary of its index: every batch reads them whole', pg_size_pretty(behind), log.segment),
        'Start gdq ticker, which keeps it up to date.', true;
    end if;
  end loop;
end
$$;
comment on function gdq.doctor_logs(integer, interval) is 'The part of doctor() about logs that cannot be emptied or are slow to read.';

-- segment_holders(segment, patience): who has held a lock on a segment for longer than patience, as text; NULL when
-- nobody. Where the age of a transaction is hidden from the caller, it counts. Writes: nothing.
create or replace function gdq.segment_holders(segment regclass, patience interval) returns text
language sql volatile security definer set search_path = pg_catalog, pg_temp set intervalstyle = postgres
as $$
  select string_agg(distinct case when l.pid is null then format('prepared transaction %L of %s', p.gid, p.owner)
                                  else format('pid %s%s%s%s', l.pid, ' of ' || a.usename, ', ' || a.state, ' for ' || date_trunc('second', clock_timestamp() - a.xact_start)) end, '; ')
    from pg_locks l
    left join pg_stat_activity a on a.pid = l.pid
    left join pg_prepared_xacts p on l.pid is null and l.virtualtransaction = '-1/' || p.transaction
   where l.locktype = 'relation' and l.relation = segment and l.granted and l.pid is distinct from pg_backend_pid()
     and l.database = (select d.oid from pg_database d where d.datname = current_database())
     and coalesce(a.xact_start, p.prepared, '-infinity') < clock_timestamp() - patience
$$;
comment on function gdq.segment_holders(regclass, interval) is 'Who has held a lock on a segment for long.';

-- unsummarised_pages(segment): pages of a log segment that its BRIN index does not describe: what a look for a number
-- that no row has must read all the same. Writes: nothing.
create or replace function gdq.unsummarised_pages(segment regclass) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set max_parallel_workers_per_gather = 0
as $$
declare
  plan json;
begin
  execute format('explain (analyze, timing off, summary off, format json) select from %s where ev_txid = -1', gdq.table_name(segment)) into plan;
  return coalesce((plan->0->'Plan'->>'Lossy Heap Blocks')::bigint, 0);
end
$$;
comment on function gdq.unsummarised_pages(regclass) is 'Pages of a log segment that its BRIN index does not describe.';

-- doctor_writers(queue_id, patience): the part of doctor() about transactions that have changed captured tables, or are
-- prepared, and do not end: their changes reach nobody, and the segments that they wrote to cannot be emptied.
-- Writes: nothing.
create or replace function gdq.doctor_writers(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set intervalstyle = postgres
as $$
#variable_conflict use_column
begin
  return query
  select 'warning', 'long_writer', 'pid ' || w.pid,
         format('the transaction of pid %s (user %s%s) is open for at least %s: its changes reach nobody, and %s log segments cannot be emptied', w.pid, w.owner,
                (select ', ' || a.state from pg_stat_activity a where a.pid = w.pid), date_trunc('second', clock_timestamp() - w.since), cardinality(w.segments)),
         format('End it: select pg_terminate_backend(%s)', w.pid), false
    from (select w.pid, min(w.owner) as owner, min(w.since) as since, array_agg(s) as segments
            from gdq.queue q, gdq.open_writers(q.queue_id) w, unnest(w.segments) s
           where w.pid is not null and (doctor_writers.queue_id is null or q.queue_id = doctor_writers.queue_id) group by 1) w
   where w.since < clock_timestamp() - patience;
  return query
  select 'warning', 'prepared_transaction', p.gid,
         format('transaction %L of user %s is prepared since %s and not over%s', p.gid, p.owner, date_trunc('second', p.prepared),
                case when w.xid is not null then ': its changes reach nobody, and log segments that it wrote to cannot be emptied' end),
         format('COMMIT PREPARED %L or ROLLBACK PREPARED %1$L', p.gid), false
    from pg_prepared_xacts p
    left join (select distinct w.xid::xid as xid from gdq.queue q, gdq.open_writers(q.queue_id) w where w.pid is null) w on w.xid = p.transaction
   where p.database = current_database() and p.prepared < clock_timestamp() - patience;
end
$$;
comment on function gdq.doctor_writers(integer, interval) is 'The part of doctor() about writers that do not end.';
