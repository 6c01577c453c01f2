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

-- consumer_status(queue): one row a subscription. lag: how old the oldest change that it has not finished is at most; 0
-- when no number was given out after its position. unread_events: by number, so those rolled back and those of tables
-- that it does not take count too. unread_bytes: of the logs that it takes, to a page. batch_age: since its oldest open
-- batch was opened, NULL when none is. retries: events that wait to come again. Writes: nothing. Errors: 42704.
create or replace function gdq.consumer_status(queue text default null)
  returns table (queue_name text, consumer_name text, lag interval, unread_events bigint, unread_bytes bigint, last_seen timestamptz, batch_age interval,
                 tables_resync integer, retries bigint, dead_letters bigint)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
#variable_conflict use_column
declare
  wanted integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
  with subscriptions as materialized (
    select s, q.queue_id, q.queue_name, c.consumer_name, p.batch_no, p.tick_id, p.snapshot, p.event_seq, p.finished_at,
           greatest(gdq.events_given_out(q.queue_id) - p.event_seq, 0) as unread
      from gdq.subscription s join gdq.queue q using (queue_id) join gdq.consumer c using (consumer_id)
      left join lateral (select pp.* from gdq.position pp where pp.subscription_id = s.subscription_id order by pp.batch_no desc limit 1) p on true
     where wanted is null or s.queue_id = wanted
  ), depth as materialized (
    select u.queue_id, d.* from (select queue_id, array_agg(distinct event_seq) as positions from subscriptions where unread > 0 group by 1) u,
                    gdq.log_depth(u.queue_id, u.positions) d
  )
  select u.queue_name, u.consumer_name,
         case when u.unread > 0 then greatest(clock_timestamp() - coalesce(first_tick.created_at, last_tick.created_at, u.finished_at), interval '0')
              when u.unread = 0 then interval '0' end,
         u.unread, (select coalesce(sum(d.bytes), 0)::bigint from depth d where d.queue_id = u.queue_id and d.event_seq = u.event_seq
                       and ((u.s).all_tables or gdq.takes_table(u.s, d.table_id))),
         greatest(u.finished_at, b.granted_at), clock_timestamp() - b.opened_at,
         (select count(*)::integer from gdq.resync_tables((u.s).subscription_id) r where r.relid is not null),
         (select count(*) from gdq.waiting_retries((u.s).subscription_id, 'infinity', null)), (select count(*) from gdq.dead_letter dl where dl.subscription_id = (u.s).subscription_id)
    from subscriptions u
    left join lateral (select t.created_at from gdq.tick t where t.queue_id = u.queue_id and not t.refresh and t.tick_id > u.tick_id and t.event_seq > u.event_seq
                        order by t.tick_id limit 1) first_tick on u.unread > 0
    left join lateral (select t.created_at from gdq.tick t where t.queue_id = u.queue_id and not t.refresh order by t.tick_id desc limit 1) last_tick on true
    left join lateral (select bb.opened_at, (select max(bt.granted_at) from gdq.batch_token bt where bt.batch_id = bb.batch_id) as granted_at
                         from gdq.batch bb where bb.subscription_id = (u.s).subscription_id and bb.batch_no > u.batch_no order by bb.batch_no limit 1) b on true
   order by 1, 2;
end
$$;
comment on function gdq.consumer_status(text) is 'Consumers with their lag in time, events and bytes.';

-- open_resync(queue_id, relid, table_id): the latest reason why a captured table is in resync: capture is off, or some
-- subscription has not passed a gap; no row when it is not. Writes: nothing.
create or replace function gdq.open_resync(queue_id integer, relid oid, table_id integer) returns setof text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select r.reason from gdq.resync r
   where r.queue_id = open_resync.queue_id and r.relid = open_resync.relid
     and (gdq.capture_state(r.queue_id, r.relid) <> 'armed'
          or exists (select from gdq.subscription s
                      where s.queue_id = open_resync.queue_id and gdq.takes_table(s, open_resync.table_id)
                        and not pg_visible_in_snapshot(r.txid::text::xid8, gdq.snapshot_max(
                          (select p.snapshot from gdq.position p where p.subscription_id = s.subscription_id order by p.batch_no desc limit 1),
                          (select c.snapshot from gdq.copied_tables(s.subscription_id) c where c.relid = r.relid)))))
   order by r.resync_id desc limit 1
$$;
comment on function gdq.open_resync(integer, oid, integer) is 'The latest reason why a captured table is in resync.';

-- log_sizes(queue_id, with_total): the log segments of a queue (NULL: all) that hold rows, and their bytes without indexes,
-- and on demand, as it takes seven times as long, with indexes and out-of-line values (total); table_id is NULL for those
-- of an event log. A segment that is gone or busy is left out: one look at all first, and one by one, which takes three
-- times as long, only when that meets such a segment. Writes: nothing.
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
            from gdq.captured_table ct join gdq.table_version tv using (table_id) join gdq.log_segment g using (version_id)
          union all
          select q.queue_id, null, e from gdq.queue q, gdq.event_segments(q.queue_id) e) l
   where (log_sizes.queue_id is null or l.q = log_sizes.queue_id) and l.s <> all (busy);
  begin
    sizes := array(select pg_relation_size(s) from unnest(segments) with ordinality u(s, n) order by n);
    totals := array(select case when with_total and b > 0 then pg_total_relation_size(s) end from unnest(segments, sizes) with ordinality u(s, b, n) order by n);
  exception when lock_not_available or undefined_table or internal_error then
    sizes := array(select gdq.relation_bytes(s, 'main') from unnest(segments) with ordinality u(s, n) order by n);
    totals := array(select case when with_total and b > 0 then gdq.relation_bytes(s) end from unnest(segments, sizes) with ordinality u(s, b, n) order by n);
  end;
  return query select * from unnest(queues, tables, segments, sizes, totals) l(q, t, s, b, a) where l.b > 0;
end
$$;
comment on function gdq.log_sizes(integer, boolean) is 'The log segments of a queue that hold rows, and their bytes.';

-- log_depth(queue_id, positions): for every log segment with rows and every event number of positions, the bytes from the
-- first page with a later event on. Numbers grow along a log but for transactions that overlap, so this is a binary
-- search. The locks of one segment are given back before the next, by rolling the block back: a thousand would fill the
-- lock table, and hold truncation up. Writes: nothing.
create or replace function gdq.log_depth(queue_id integer, positions bigint[]) returns table (table_id integer, event_seq bigint, bytes bigint)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  block constant bigint := current_setting('block_size')::bigint;
  log record;
  pages bigint;
  newest bigint;
  found_bytes bigint[];
begin
  for log in select z.table_id, z.segment, z.bytes from gdq.log_sizes(log_depth.queue_id) z loop
    found_bytes := null;
    begin
      pages := log.bytes / block;
      execute format('select max(ev_id) from %s where ctid >= $1', log.segment) into newest using format('(%s,0)', pages - 1)::tid;
      -- the only page need not be searched
      if pages = 1 then
        found_bytes := array(select case when newest <= p then 0 else block end from unnest(positions) with ordinality u(p, n) order by n);
      else
        found_bytes := array(select case when newest <= p then 0 else gdq.bytes_after(log.segment, pages, p) end from unnest(positions) with ordinality u(p, n) order by n);
      end if;
      raise exception 'give the locks back';
    exception when raise_exception or lock_not_available or undefined_table or internal_error then
      null;
    end;
    return query select log.table_id, p.event_seq, p.b from unnest(positions, found_bytes) p(event_seq, b) where p.b > 0;
  end loop;
end
$$;
comment on function gdq.log_depth(integer, bigint[]) is 'Bytes of every log with rows that hold events after these numbers.';

-- bytes_after(segment, pages, after): the bytes of a log segment that has an event after that number, from the first page
-- with such an event on. Writes: nothing.
create or replace function gdq.bytes_after(segment regclass, pages bigint, after bigint) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  seen bigint;
  low bigint := 0;
  high bigint := pages;
  middle bigint;
begin
  while low < high loop
    middle := (low + high) / 2;
    execute format('select ev_id from %s where ctid >= $1 and ev_id is not null limit 1', segment) into seen using format('(%s,0)', middle)::tid;
    if seen <= after then
      low := middle + 1;
    else
      high := middle;
    end if;
  end loop;
  -- the first page of which all rows are later; the one before it may hold some
  return (pages - greatest(low - 1, 0)) * current_setting('block_size')::bigint;
end
$$;
comment on function gdq.bytes_after(regclass, bigint, bigint) is 'Bytes of a log segment from the first page with an event after a number.';

-- open_writers(queue_id): the transactions that have written to the logs of a queue and are not over: pid, or gid when
-- prepared; the segments that they hold; since: when they began, or NULL where neither the server's statistics nor a
-- tick tells. Other roles' statistics are hidden from a role without pg_monitor: there the ticks tell. Writes: nothing.
create or replace function gdq.open_writers(queue_id integer)
  returns table (pid integer, gid text, owner text, xid xid8, segments oid[], since timestamptz)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
  with locks as materialized (
    select l.pid, l.virtualtransaction, l.relation, l.locktype, l.transactionid, l.mode
      from pg_locks l
     where l.granted and ((l.locktype = 'relation' and l.mode = 'RowExclusiveLock'
                           and l.database = (select d.oid from pg_database d where d.datname = current_database()))
                          or (l.locktype = 'transactionid' and l.mode = 'ExclusiveLock'))
  ), logs as (
    select s.segment::oid from gdq.captured_table ct join gdq.table_version tv using (table_id) join gdq.log_segment s using (version_id)
     where ct.queue_id = open_writers.queue_id
    union all
    select e from gdq.event_segments(open_writers.queue_id) e
  ), writers as (
    -- a transaction with savepoints holds several xids: the oldest is its own
    select l.pid, l.virtualtransaction, array_agg(distinct l.relation) as segments,
           (select gdq.full_xid(x.transactionid)
              from locks x where x.virtualtransaction = l.virtualtransaction and x.locktype = 'transactionid' order by age(x.transactionid) desc limit 1) as xid
      from locks l join logs on logs.segment = l.relation where l.locktype = 'relation' group by 1, 2
  )
  select w.pid, p.gid, coalesce(a.usename, p.owner)::text, w.xid, w.segments,
         least(a.xact_start, p.prepared, gdq.seen_since(open_writers.queue_id, w.xid))
    from writers w
    left join pg_stat_activity a on a.pid = w.pid
    left join pg_prepared_xacts p on w.pid is null and p.transaction = w.xid::xid
   where w.pid is distinct from pg_backend_pid();
end
$$;
comment on function gdq.open_writers(integer) is 'Transactions that have written to the logs of a queue and are not over.';

-- full_xid(short): the number of a transaction that is still open, with its epoch. Writes: nothing.
create or replace function gdq.full_xid(short xid) returns xid8
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  next_xid constant bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
begin
  -- it may be a little above what the snapshot knows
  return (next_xid - (((next_xid - short::text::bigint + 2147483648) & 4294967295) - 2147483648))::text::xid8;
end
$$;
comment on function gdq.full_xid(xid) is 'The number of an open transaction with its epoch.';

-- seen_since(queue_id, xid, ended): time of the first tick that met an open transaction: it began before; or (ended) the
-- first that found it over: a snapshot that still lists it, or ends at it, is older. NULL when none did. A binary search:
-- there may be a million ticks. Writes: nothing.
create or replace function gdq.seen_since(queue_id integer, xid xid8, ended boolean default false) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  low bigint;
  high bigint;
  middle bigint;
  t gdq.tick;
begin
  select min(tt.tick_id), max(tt.tick_id) + 1 into low, high from gdq.tick tt where tt.queue_id = seen_since.queue_id and not tt.refresh;
  while low < high loop
    middle := (low + high) / 2;
    select * into t from gdq.tick tt where tt.queue_id = seen_since.queue_id and not tt.refresh and tt.tick_id >= middle order by tt.tick_id limit 1;
    if (ended and pg_visible_in_snapshot(xid, t.snapshot)) or (not ended and pg_snapshot_xmax(t.snapshot) > xid) then
      high := middle;
    else
      low := t.tick_id + 1;
    end if;
  end loop;
  return (select tt.created_at from gdq.tick tt where tt.queue_id = seen_since.queue_id and not tt.refresh and tt.tick_id >= low order by tt.tick_id limit 1);
end
$$;
comment on function gdq.seen_since(integer, xid8, boolean) is 'Time of the first tick that met an open transaction, or found it over.';
