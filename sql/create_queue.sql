-- arm_event_log(queue_id, slot): points the event function of a queue at one segment of its event log.
-- Writes: replaces gdq_log.q<queue>_event(kind, relid, data), the writer of gdq itself, and those of messages.
create or replace function gdq.arm_event_log(queue_id integer, slot integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  execute format(
    $f$create or replace function gdq_log.%1$I(kind text, relid oid, data jsonb) returns bigint
       language plpgsql security definer set search_path = pg_catalog, pg_temp as %2$L$f$,
    'q' || queue_id || '_event',
    format($f$declare
  id bigint := pg_catalog.nextval('gdq_log.q%1$s_ev'::pg_catalog.regclass);
begin
  insert into gdq_log.q%1$s_s%2$s (ev_id, ev_txid, ev_time, ev_kind, ev_table, ev_data)
  values (id, pg_catalog.txid_current(), pg_catalog.clock_timestamp(), kind, relid, data);
  return id;
end$f$, queue_id, slot));
  perform gdq.arm_messages(queue_id, slot);
end
$$;
comment on function gdq.arm_event_log(integer, integer) is 'Points the event function of a queue at one segment of its event log.';

-- own_capture(function): hands a generated function over to the capture role, where the installer has it. The role may
-- create in gdq_log only while this runs, so nobody ever sees it hold that right. EXECUTE is taken from PUBLIC, but for
-- trigger functions: CREATE TABLE ... PARTITION OF and ATTACH clone the triggers of a root and check EXECUTE of whoever
-- does that. Nobody else can use it: a trigger function cannot be called, and naming one takes USAGE on gdq_log.
-- Writes: owner and ACL of the function.
create or replace function gdq.own_capture(function regprocedure) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (select from pg_proc p where p.oid = function and p.prorettype = 'trigger'::regtype) then
    execute format('grant execute on function %s to public', function);
  else
    execute format('revoke execute on function %s from public', function);
  end if;
  if gdq.capture_owner() = 'gdq_capture' then
    -- two sessions that hand functions over at once would meet in the schema's ACL
    perform pg_advisory_xact_lock(gdq.lock_key('capture', 0));
    grant create on schema gdq_log to gdq_capture;
    execute format('alter function %s owner to gdq_capture', function);
    revoke create on schema gdq_log from gdq_capture;
  end if;
end
$$;
comment on function gdq.own_capture(regprocedure) is 'Hands a generated function over to the capture role.';

-- capture_owner(): the role that owns capture functions: gdq_capture, or the installer where it may not use that role.
-- Writes: nothing.
create or replace function gdq.capture_owner() returns name
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select case when exists (select from pg_roles where rolname = 'gdq_capture' and not rolcanlogin and not rolsuper)
               and pg_has_role(current_user, (select oid from pg_roles where rolname = 'gdq_capture'), 'usage')
               and has_schema_privilege('gdq_capture', 'gdq_log', 'usage')
              then 'gdq_capture' else current_user end
$$;
comment on function gdq.capture_owner() is 'The role that owns capture functions.';

-- create_queue(queue, ...): makes a queue: its number sequence, its event log, a first tick.
-- Settings: a tick is due after ticker_max_count events or ticker_max_lag with any, else after ticker_idle_period; a log
-- rotates after rotation_period or rotation_bytes; consumed rows stay readable for retention; once all logs take more
-- than max_bytes (NULL or 0: no limit) the slowest consumer is cut off, see enforce_max_bytes(). unlogged: change logs without WAL, which a crash empties: every consumer is then told to resync. The event log (TRUNCATE, DDL, messages) has WAL.
-- Result: true; false when the queue existed already (its settings are left alone).
-- Writes: queue, event_ring, tick, era, horizon, log_marker; creates gdq_log.q<id>_*. Errors: 22023, 23514 for bad settings, GDQ04.
create or replace function gdq.create_queue(queue text, ticker_max_count integer default 500,
  ticker_max_lag interval default '100 ms', ticker_idle_period interval default '60 s',
  rotation_period interval default '10 min', rotation_bytes bigint default 268435456, retention interval default '0',
  unlogged boolean default false, max_bytes bigint default null)
  returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set default_table_access_method = 'heap' set default_tablespace = '' set client_min_messages = warning
as $$
declare
  id integer;
begin
  perform gdq.require_read_committed('create_queue');
  if queue is null or octet_length(queue) not between 1 and 63 then
    raise exception 'a queue name has 1 to 63 bytes' using errcode = 'invalid_parameter_value';
  end if;
  perform pg_advisory_xact_lock(gdq.lock_key('tick', 0));
  if exists (select from gdq.queue q where q.queue_name = queue) then
    return false;
  end if;
  insert into gdq.queue (queue_name, ticker_max_count, ticker_max_lag, ticker_idle_period, rotation_period, rotation_bytes, retention, unlogged, max_bytes)
    values (queue, ticker_max_count, ticker_max_lag, ticker_idle_period, rotation_period, rotation_bytes, retention, unlogged, nullif(max_bytes, 0))
    returning queue_id into id;
  if unlogged then
    insert into gdq.log_marker (queue_id) values (id);
  end if;
  insert into gdq.event_ring (queue_id) values (id);
  execute format('create sequence gdq_log.%I cache 1', 'q' || id || '_ev');
  for slot in 0 .. 2 loop
    execute format('create table gdq_log.%1$I (ev_id bigint, ev_txid bigint, ev_time timestamptz, ev_kind text, ev_type text, '
      'ev_table oid, ev_data jsonb, ev_extra1 text, ev_extra2 text, ev_extra3 text, ev_extra4 text) '
      'with (fillfactor = 100, autovacuum_enabled = false, toast.autovacuum_enabled = false)', format('q%s_s%s', id, slot));
    execute format('create index %I on gdq_log.%I using brin (ev_txid int8_minmax_multi_ops) with (pages_per_range = 16)',
      format('q%s_s%s_txid', id, slot), format('q%s_s%s', id, slot));
  end loop;
  perform gdq.arm_event_log(id, 0);
  perform gdq.own_capture(format('gdq_log.%I(text, oid, jsonb)', 'q' || id || '_event')::regprocedure);
  -- This transaction has an xid by now, and its own snapshot would count it as finished: rows that it goes on to
  -- write into a table that it adds would be lost. So the first tick ends below it, and not above what the snapshot
  -- knows either: older transactions may be running between its xmax and this one.
  insert into gdq.tick (queue_id, snapshot, event_seq)
    select id, format('%s:%s:%s', least(pg_snapshot_xmin(now), own), least(pg_snapshot_xmax(now), own),
                      (select string_agg(x::text, ',' order by x) from pg_snapshot_xip(now) x where x < own))::pg_snapshot, 0
      from (select pg_current_snapshot() as now, pg_current_xact_id() as own) xact;
  perform gdq.start_era(id);
  insert into gdq.horizon (queue_id, snapshot) select id, t.snapshot from gdq.tick t where t.queue_id = id;
  perform gdq.create_producers();
  return true;
end
$$;
comment on function gdq.create_queue(text, integer, interval, interval, interval, bigint, interval, boolean, bigint) is 'Makes a queue; false when it existed.';

-- drop_queue(queue, force): removes a queue and everything it captured. Result: true; false when there was none.
-- Errors: 55006 when it still has tables or consumers and force is not given; 55P03 when a writer holds a table; GDQ07.
-- Writes: drops gdq_log.q<id>_*, the logs, the triggers on the captured tables; deletes the control rows.
create or replace function gdq.drop_queue(queue text, force boolean default false) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set lock_timeout = '500ms' set client_min_messages = warning
as $$
declare
  id integer;
  t record;
begin
  perform pg_advisory_xact_lock(gdq.lock_key('tick', 0));
  select q.queue_id into id from gdq.queue q where q.queue_name = queue for update;
  if id is null then
    return false;
  end if;
  perform gdq.require_era(id);
  perform pg_advisory_xact_lock(gdq.lock_key('tick', id));
  if not force and (exists (select from gdq.captured_table ct where ct.queue_id = id)
                    or exists (select from gdq.subscription s where s.queue_id = id)
                    or exists (select from gdq.view v where v.queue_id = id)) then
    raise exception 'queue "%" still has % table(s), % consumer(s) and % view(s)', queue,
      (select count(*) from gdq.captured_table ct where ct.queue_id = id),
      (select count(*) from gdq.subscription s where s.queue_id = id),
      (select count(*) from gdq.view v where v.queue_id = id)
      using errcode = 'object_in_use', hint = 'Remove them first, or drop the queue with force.';
  end if;
  for t in select ct.relid from gdq.captured_table ct where ct.queue_id = id order by ct.relid loop
    perform gdq.remove_table(queue, t.relid, force => true);
  end loop;
  delete from gdq.view v where v.queue_id = id;
  delete from gdq.resync r where r.queue_id = id;
  delete from gdq.queue q where q.queue_id = id;
  perform gdq.create_producers();
  execute format('drop function gdq_log.q%1$s_event(text, oid, jsonb), gdq_log.q%1$s_message(text, jsonb, text, text, text, text), '
                 'gdq_log.q%1$s_messages(text[], jsonb[], text[], text[], text[], text[])', id);
  for slot in 0 .. 2 loop
    execute format('drop table gdq_log.%I', format('q%s_s%s', id, slot));
  end loop;
  execute format('drop sequence gdq_log.%I', 'q' || id || '_ev');
  return true;
end
$$;
comment on function gdq.drop_queue(text, boolean) is 'Removes a queue; refuses while it has tables, consumers or views unless forced.';
