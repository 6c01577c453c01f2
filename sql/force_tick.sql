-- last_event(queue_id): the last event number that the queue's sequence gave out; 0 before the first. Not bound to any
-- snapshot. Writes: nothing.
create or replace function gdq.last_event(queue_id integer) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return coalesce(pg_sequence_last_value(to_regclass(format('gdq_log.%I', 'q' || queue_id || '_ev'))), 0);
end
$$;
comment on function gdq.last_event(integer) is 'Last event number given out by a queue.';

-- last_tick(queue_id): the newest tick of a queue, refreshes aside. Writes: nothing.
create or replace function gdq.last_tick(queue_id integer) returns gdq.tick
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select t from gdq.tick t where t.queue_id = last_tick.queue_id and not t.refresh order by t.tick_id desc limit 1);
end
$$;
comment on function gdq.last_tick(integer) is 'The newest tick of a queue.';

-- make_tick(queue_id): stores a snapshot as the queue's next tick and notifies gdq_<queue_id> with its id.
-- Ticks are taken one at a time: the lock first, the snapshot in a statement of its own after it, or two tickers could
-- store their snapshots in the wrong order and events would be delivered twice. A transaction with an xid of its own
-- would count itself as finished. The event number is read before the snapshot: what is given out later is new.
-- Sequences are read after the snapshot, see publish_sequences().
-- Result: the tick's id. Writes: tick, sequence_tick. Errors: GDQ04; 55000 when the snapshot goes backwards.
create or replace function gdq.make_tick(queue_id integer) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  last gdq.tick;
  events bigint;
  now_snapshot pg_snapshot;
  id bigint;
begin
  perform gdq.require_read_committed('a tick');
  if pg_current_xact_id_if_assigned() is not null then
    raise exception 'a tick cannot be taken in a transaction that has written' using errcode = 'GDQ04',
      hint = 'Commit first: events, the tick and the batch need transactions of their own.';
  end if;
  perform pg_advisory_xact_lock(gdq.lock_key('tick', queue_id));
  last := gdq.last_tick(queue_id);
  events := gdq.last_event(queue_id);
  now_snapshot := pg_current_snapshot();
  if not gdq.snapshot_le(last.snapshot, now_snapshot) then
    raise exception 'tick % of queue % has snapshot %, which is later than the server''s %', last.tick_id, queue_id, last.snapshot, now_snapshot
      using errcode = 'object_not_in_prerequisite_state', hint = 'The server has lost transactions that it had. gdq rebase starts a new era: consumers read their tables afresh.';
  end if;
  if not gdq.event_triggers_on() and exists (select from gdq.altered_tables(queue_id)) then
    raise exception 'table % was altered, and capture has not looked at it yet', (select gdq.last_table_name(a.table_id) from gdq.altered_tables(queue_id) a limit 1)
      using errcode = 'object_not_in_prerequisite_state', hint = 'SELECT gdq.check_tables(), as a ticker does, and take the tick in another transaction.';
  end if;
  insert into gdq.tick (queue_id, snapshot, event_seq) values (queue_id, now_snapshot, events) returning tick_id into id;
  if exists (select from gdq.published_sequence ps where ps.queue_id = make_tick.queue_id) then
    perform gdq.publish_sequences(queue_id, id);
  end if;
  perform pg_notify('gdq_' || queue_id, id::text);
  return id;
end
$$;
comment on function gdq.make_tick(integer) is 'Stores a snapshot as the next tick of a queue.';

-- force_tick(queue): a tick now, due or not. Result: its id. Writes: tick. Errors: 42704, GDQ04; 55000, also while the
-- queue is paused.
create or replace function gdq.force_tick(queue text) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform gdq.refuse_paused(gdq.find_queue(queue));
  return gdq.make_tick(gdq.find_queue(queue));
end
$$;
comment on function gdq.force_tick(text) is 'Takes a tick now; returns its id.';
