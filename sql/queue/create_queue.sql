-- create_queue(queue, ...): makes a queue: its number sequence, its event log, a first tick.
-- Settings: a tick is due after ticker_max_count events or ticker_max_lag with any, else after ticker_idle_period; a
-- log rotates after rotation_period or rotation_bytes; consumed rows stay readable for retention; once all logs take
-- more than max_bytes (NULL or 0: no limit) the slowest consumer is cut off, see enforce_max_bytes(). unlogged: change
-- logs without WAL, which a crash empties: every consumer then gets a resync event. The event log (TRUNCATE, DDL,
-- messages) has WAL.
-- Result: true; false when the queue existed already (its settings are left alone).
-- Writes: queue, event_ring, tick, era, horizon, log_marker; creates gdq_log.q<id>_*. Errors: 22023, 23514 for bad
-- settings, GDQ04.
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
  perform gdq.own_capture(format('gdq_log.q%s_event(text, oid, jsonb)', id)::regprocedure);
  -- This transaction has an xid by now, and its own snapshot would count it as finished: rows that it goes on to
  -- write into a table that it adds would be lost. So the first tick ends below it, and not above what the snapshot
  -- knows either: older transactions may be running between its xmax and this one.
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
  'Makes a queue; false when it existed.';

-- Ticks, positions and log rows hold transaction numbers of one cluster. A copy of them that was dumped and restored is
-- in a cluster with other numbers: rows would be delivered twice, or never. Each queue has a row that knows its own
-- xmin and the oid of its table, which only a dump changes: pg_upgrade, a promoted standby, VACUUM FULL or FREEZE and
-- CREATE DATABASE ... TEMPLATE keep both. (The system identifier is no test: pg_upgrade changes it.)

-- start_era(queue_id): marks that the queue's numbers are this cluster's from now on. Result: the era. Writes: era.
create or replace function gdq.start_era(queue_id integer) returns uuid
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  no bigint;
  started uuid;
begin
  insert into gdq.era (queue_id, written_by, written_in) values (queue_id, '0', 'gdq.era'::regclass)
    returning era_no, era into no, started;
  -- xmin is the number of this transaction or savepoint, which no function tells; the new row version has it too
  update gdq.era e set written_by = e.xmin where e.era_no = no;
  return started;
end
$$;
comment on function gdq.start_era(integer) is 'Starts an era of a queue.';
