-- create_queue(queue, ...): makes a queue: its sequence of event numbers, its event log and a first tick.
--   ticker_max_count, ticker_max_lag, ticker_idle_period: a tick is due after this many events; after this time when
--   there is any event; after this time without events.
--   rotation_period, rotation_bytes: a log switches to its next segment after this time, or at this size.
--   retention: rows stay readable for this time after every consumer has read them.
--   max_bytes: once all logs take more, the slowest consumer is cut off, see enforce_max_bytes(); NULL or 0: no limit.
--   unlogged: change logs without WAL, which a crash empties; every consumer then gets a resync event. The event log
--   (TRUNCATE, DDL, messages) always has WAL.
-- Result: true; false when the queue existed already; its settings are then left as they are.
-- Writes: queue, event_ring, tick, era, horizon, log_marker; creates gdq_log.q<id>_*. Errors: 22023 for a bad name,
-- 23514 for bad settings, GDQ04.
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
  insert into gdq.queue (queue_name, ticker_max_count, ticker_max_lag, ticker_idle_period,
                         rotation_period, rotation_bytes, retention, unlogged, max_bytes)
    values (queue, ticker_max_count, ticker_max_lag, ticker_idle_period,
            rotation_period, rotation_bytes, retention, unlogged, nullif(max_bytes, 0))
    returning queue_id into id;
  if unlogged then
    insert into gdq.log_marker (queue_id) values (id);
  end if;
  insert into gdq.event_ring (queue_id) values (id);
  execute format('create sequence gdq_log.q%s_ev cache 1', id);
  for slot in 0 .. 2 loop
    execute format($sql$
      create table gdq_log.q%s_s%s (
        ev_id bigint, ev_txid bigint, ev_time timestamptz, ev_kind text, ev_type text, ev_table oid, ev_data jsonb,
        ev_extra1 text, ev_extra2 text, ev_extra3 text, ev_extra4 text)
      with (fillfactor = 100, autovacuum_enabled = false, toast.autovacuum_enabled = false) $sql$, id, slot);
    execute format($sql$
      create index q%1$s_s%2$s_txid on gdq_log.q%1$s_s%2$s
       using brin (ev_txid int8_minmax_multi_ops) with (pages_per_range = 16) $sql$, id, slot);
  end loop;
  perform gdq.arm_event_log(id, 0);
  perform gdq.own_capture(format('gdq_log.q%s_event(text, oid, jsonb)', id)::regprocedure, gdq.capture_owner());
  perform gdq.create_truncate(id);
  perform gdq.grant_queue(id, gdq.capture_owner());
  -- This transaction has an xid by now, and its own snapshot would count that xid as finished: rows that it goes on to
  -- write into a table that it adds would be lost. So the first tick ends below this xid. It also ends at or below the
  -- snapshot's xmax, since older transactions may be running between that and this one.
  insert into gdq.tick (queue_id, snapshot, event_seq)
    select id, format('%s:%s:%s', least(pg_snapshot_xmin(now), own), least(pg_snapshot_xmax(now), own),
                      (select string_agg(x::text, ',' order by x) from pg_snapshot_xip(now) x where x < own)
               )::pg_snapshot, 0
      from (select pg_current_snapshot() as now, pg_current_xact_id() as own) xact;
  perform gdq.start_era(id);
  insert into gdq.horizon (queue_id, snapshot) select id, t.snapshot from gdq.tick t where t.queue_id = id;
  perform gdq.create_producers();
  return true;
end
$$;
comment on function gdq.create_queue(text, integer, interval, interval, interval, bigint, interval, boolean, bigint) is
  'Makes a queue; false when it existed already.';

-- How a restored dump is recognised. Ticks, positions and log rows hold transaction numbers of one cluster. In another
-- cluster, a dump of them would make rows come twice, or never. So each queue has a row in gdq.era that stores its own
-- xmin and the oid of its table. Only a restore changes these: pg_upgrade, a promoted standby, VACUUM FULL or FREEZE
-- and CREATE DATABASE ... TEMPLATE keep both. (The system identifier is no test: pg_upgrade changes it.)

-- start_era(queue_id): starts an era of a queue: its transaction numbers are those of this cluster from now on. Result:
-- the era. Writes: era.
create or replace function gdq.start_era(queue_id integer) returns uuid
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  no bigint;
  started uuid;
begin
  insert into gdq.era (queue_id, written_by, written_in) values (queue_id, '0', 'gdq.era'::regclass)
    returning era_no, era into no, started;
  -- no function returns the xid of a savepoint: copy the row's xmin, which the new row version gets too
  update gdq.era e set written_by = e.xmin where e.era_no = no;
  return started;
end
$$;
comment on function gdq.start_era(integer) is 'Starts an era of a queue.';
