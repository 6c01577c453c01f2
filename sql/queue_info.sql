-- The listings. Each is safe beside whatever removes a queue, a consumer or a log meanwhile: what is going is shown
-- with NULLs or not at all, and nobody is waited for longer than 100 ms.

-- queue_info(queue): one row a queue (NULL: all) with its settings and the age of its last tick; events_since_tick
-- counts numbers given out, rolled-back ones included. Writes: nothing. Errors: 42704.
create or replace function gdq.queue_info(queue text default null)
  returns table (queue_name text, queue_id integer, tables integer, consumers integer, last_tick bigint, last_tick_lag interval, events_since_tick bigint,
                 ticker_max_count integer, ticker_max_lag interval, ticker_idle_period interval, rotation_period interval, rotation_bytes bigint, retention interval,
                 unlogged boolean, max_bytes bigint, paused boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
#variable_conflict use_column
declare
  wanted integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
  select q.queue_name, q.queue_id, (select count(*)::int from gdq.captured_table ct where ct.queue_id = q.queue_id),
         (select count(*)::int from gdq.subscription s where s.queue_id = q.queue_id),
         t.tick_id, clock_timestamp() - t.created_at, gdq.events_given_out(q.queue_id) - t.event_seq,
         q.ticker_max_count, q.ticker_max_lag, q.ticker_idle_period, q.rotation_period, q.rotation_bytes, q.retention, q.unlogged,
         q.max_bytes, q.paused
    from gdq.queue q
    left join lateral (select tt.tick_id, tt.created_at, tt.event_seq from gdq.tick tt
                        where tt.queue_id = q.queue_id and not tt.refresh order by tt.tick_id desc limit 1) t on true
   where wanted is null or q.queue_id = wanted order by q.queue_name;
end
$$;
comment on function gdq.queue_info(text) is 'Queues with their settings and the age of their last tick.';

-- table_info(queue): one row a captured table. state is resync while some subscription has not passed a gap of capture,
-- or capture is off; reason is the latest; log_bytes: of the segments that hold rows; then the options of add_table(). Writes: nothing. Errors: 42704.
create or replace function gdq.table_info(queue text default null)
  returns table (queue_name text, table_name text, mode text, format text, key text[], columns text[], version bigint, state text, reason text, log_bytes bigint,
                 "where" text, operations text[], granularity text, always boolean, origin boolean, pin_search_path boolean, allow_rls boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms' set quote_all_identifiers = off
as $$
#variable_conflict use_column
declare
  wanted integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
  with logs as materialized (
    select z.table_id, sum(z.total)::bigint as bytes from gdq.log_sizes(wanted, true) z group by 1
  )
  select q.queue_name, coalesce(n.name, gdq.last_table_name(ct.table_id)), ct.mode, ct.format,
         (select array_agg(c->>'name') from jsonb_array_elements(v.columns) c where (c->>'key')::boolean),
         (select array_agg(c->>'name') from jsonb_array_elements(v.columns) c),
         v.version_id, case when r.reason is null then 'ok' else 'resync' end, r.reason,
         coalesce(l.bytes, 0), ct.row_filter->>'text', ct.operations, ct.granularity, ct.always, ct.origin, ct.pin_search_path, ct.allow_rls
    from gdq.captured_table ct join gdq.queue q using (queue_id)
    join lateral (select tv.version_id, tv.columns from gdq.table_version tv where tv.table_id = ct.table_id order by tv.version_id desc limit 1) v on true
    left join logs l using (table_id)
    left join (select c.oid, format('%I.%I', nsp.nspname, c.relname) as name from pg_class c join pg_namespace nsp on nsp.oid = c.relnamespace) n on n.oid = ct.relid
   cross join lateral (select case when exists (select from gdq.resync rr where rr.queue_id = ct.queue_id and rr.relid = ct.relid)
                                   then (select o from gdq.open_resync(ct.queue_id, ct.relid, ct.table_id) o) end as reason) r
   where wanted is null or ct.queue_id = wanted order by 1, 2;
end
$$;
comment on function gdq.table_info(text) is 'Captured tables with mode, columns and state.';

-- consumer_info(queue): one row a subscription: lag behind now in time (age of the tick that it has finished) and in
-- events by number, when it was last heard of, and whose it is; resync: the tables that it must copy anew, now or once it
-- comes to the event that says so, and the latest reason. Writes: nothing. Errors: 42704.
create or replace function gdq.consumer_info(queue text default null)
  returns table (queue_name text, consumer_name text, lag interval, lag_events bigint, last_seen timestamptz, last_tick bigint, tables text[], skip_origin text[],
                 owner_role name, paused boolean, resync text[], reason text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
#variable_conflict use_column
declare
  wanted integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
  select q.queue_name, c.consumer_name, clock_timestamp() - coalesce(t.created_at, p.finished_at),
         gdq.events_given_out(q.queue_id) - p.event_seq,
         greatest(p.finished_at, (select max(bt.granted_at) from gdq.batch b join gdq.batch_token bt using (batch_id) where b.subscription_id = s.subscription_id)),
         p.tick_id,
         case when not s.all_tables then array(select coalesce(gdq.table_name(ct.relid), gdq.last_table_name(ct.table_id)) from gdq.subscribed_tables(s.subscription_id) ct order by 1) end,
         s.skip_origin, s.owner_role,
         exists (select from gdq.subscription_pause sp where sp.subscription_id = s.subscription_id), r.tables, r.reason
    from gdq.subscription s join gdq.queue q using (queue_id) join gdq.consumer c using (consumer_id)
    left join lateral (select pp.* from gdq.position pp where pp.subscription_id = s.subscription_id order by pp.batch_no desc limit 1) p on true
    left join gdq.tick t on t.tick_id = p.tick_id
   cross join lateral (select array_agg(coalesce(gdq.table_name(rt.relid), 'messages') order by rt.relid) as tables, max(rt.reason) as reason
                         from gdq.resync_tables(s.subscription_id) rt) r
   where wanted is null or s.queue_id = wanted order by 1, 2;
end
$$;
comment on function gdq.consumer_info(text) is 'Consumers with their lag in time and events.';

-- takes_table(s, table_id): whether a subscription takes a captured table (NULL: the event log, which all take).
-- Writes: nothing.
create or replace function gdq.takes_table(s gdq.subscription, table_id integer) returns boolean
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select s.all_tables or table_id is null
      or exists (select from gdq.subscription_table st where st.subscription_id = s.subscription_id and st.table_id = takes_table.table_id)
$$;
comment on function gdq.takes_table(gdq.subscription, integer) is 'Whether a subscription takes a captured table.';

-- busy_relations(): the relations of this database that other transactions hold in ACCESS EXCLUSIVE: looking at one
-- would wait until that ends. Writes: nothing.
create or replace function gdq.busy_relations() returns oid[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return array(select l.relation from pg_locks l
                where l.locktype = 'relation' and l.mode = 'AccessExclusiveLock' and l.granted and l.pid is distinct from pg_backend_pid()
                  and l.database = (select d.oid from pg_database d where d.datname = current_database()));
end
$$;
comment on function gdq.busy_relations() is 'Relations that other transactions hold in ACCESS EXCLUSIVE.';

-- relation_bytes(relation, fork): bytes of one fork of a relation, or (fork NULL) of all of it with its indexes and
-- out-of-line values; NULL when it is gone or cannot be looked at within the caller's lock_timeout. Writes: nothing.
create or replace function gdq.relation_bytes(relation regclass, fork text default null) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return case when fork is null then pg_total_relation_size(relation) else pg_relation_size(relation, fork) end;
exception when lock_not_available or undefined_table or internal_error then
  return null;
end
$$;
comment on function gdq.relation_bytes(regclass, text) is 'Bytes of a relation; NULL when it is gone or busy.';

-- events_given_out(queue_id): last_event(), or NULL when the queue is just being dropped. Writes: nothing.
create or replace function gdq.events_given_out(queue_id integer) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  numbers regclass := to_regclass(format('gdq_log.%I', 'q' || queue_id || '_ev'));
begin
  return case when numbers is not null then coalesce(pg_sequence_last_value(numbers), 0) end;
exception when lock_not_available or undefined_table or internal_error then
  return null;
end
$$;
comment on function gdq.events_given_out(integer) is 'Last event number given out by a queue; NULL while it is being dropped.';
