-- make_tick(queue_id): stores a snapshot as the queue's next tick and notifies gdq_<queue_id> with its id. Ticks are
-- taken one at a time, and these four rules keep them right:
--   lock first, then the snapshot in a statement of its own: two tickers could else store their snapshots in the wrong
--   order, and events would be delivered twice;
--   no xid before the snapshot: a transaction with an xid of its own would count itself as finished;
--   event number before the snapshot: numbers that are given out later are new events;
--   sequences after the snapshot: see publish_sequences().
-- Result: the tick's id. Writes: tick, sequence_tick. Errors: GDQ04; 55000 when the snapshot goes backwards, and when a
-- captured table was altered and capture has not followed.
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
    raise exception 'a tick cannot be taken in a transaction that has written'
      using errcode = 'GDQ04', hint = 'Commit first: events, the tick and the batch need transactions of their own.';
  end if;
  perform pg_advisory_xact_lock(gdq.lock_key('tick', queue_id));
  last := gdq.last_tick(queue_id);
  events := gdq.last_event(queue_id);
  now_snapshot := pg_current_snapshot();
  if not gdq.snapshot_le(last.snapshot, now_snapshot) then
    raise exception 'tick % of queue % has snapshot %, which is later than the server''s %',
      last.tick_id, queue_id, last.snapshot, now_snapshot
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'The server has lost transactions that it had. '
                   'gdq rebase starts a new era: consumers read their tables afresh.';
  end if;
  if not gdq.event_triggers_on() and exists (select from gdq.altered_tables(queue_id)) then
    raise exception 'table % was altered, and capture has not looked at it yet',
      (select gdq.last_table_name(a.table_id) from gdq.altered_tables(queue_id) a limit 1)
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'SELECT gdq.check_tables(), as a ticker does, and take the tick in another transaction.';
  end if;
  insert into gdq.tick (queue_id, snapshot, event_seq) values (queue_id, now_snapshot, events)
    returning tick_id into id;
  if exists (select from gdq.published_sequence ps where ps.queue_id = make_tick.queue_id) then
    perform gdq.publish_sequences(queue_id, id);
  end if;
  perform pg_notify('gdq_' || queue_id, id::text);
  return id;
end
$$;
comment on function gdq.make_tick(integer) is 'Stores a snapshot as the next tick of a queue.';

-- publish_sequences(queue_id, tick_id): stores the values of a queue's sequences with a tick, if one has changed. They
-- are read after the tick's snapshot was taken: a transaction that the snapshot shows as committed had its values by
-- then. A sequence is not bound to snapshots, and with a cache its value is the last that a session has reserved. All
-- are read in one statement by name; when one is held by DDL, one after the other, and that one is stored as unknown,
-- since a tick must not wait or fail. Writes: sequence_tick.
create or replace function gdq.publish_sequences(queue_id integer, tick_id bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '20ms'
as $$
declare
  query text;
  last gdq.sequence_tick;
  now_values gdq.sequence_tick;
begin
  begin
    select string_agg(format('select %s as id, s.last_value, s.is_called from %s s',
                             ps.sequence_id, gdq.table_name(ps.relid)), ' union all ')
      into query
      from gdq.published_sequence ps
     where ps.queue_id = publish_sequences.queue_id and gdq.table_name(ps.relid) is not null;
    execute format($sql$
      select array_agg(id order by id), array_agg(last_value order by id), array_agg(is_called order by id)
        from (%s) s $sql$, query)
      into now_values.sequence_ids, now_values.last_values, now_values.called;
  exception when others then
    select array_agg(ps.sequence_id order by ps.sequence_id),
           array_agg(r.last_value order by ps.sequence_id),
           array_agg(r.is_called order by ps.sequence_id)
      into now_values.sequence_ids, now_values.last_values, now_values.called
      from gdq.published_sequence ps, gdq.read_sequence(ps.relid) r
     where ps.queue_id = publish_sequences.queue_id and gdq.table_name(ps.relid) is not null;
  end;
  select * into last from gdq.sequences_at(queue_id, null);
  if (now_values.sequence_ids, now_values.last_values, now_values.called)
     is distinct from (last.sequence_ids, last.last_values, last.called) then
    insert into gdq.sequence_tick (tick_id, queue_id, sequence_ids, last_values, called)
      values (tick_id, queue_id, coalesce(now_values.sequence_ids, '{}'),
              coalesce(now_values.last_values, '{}'), coalesce(now_values.called, '{}'));
  end if;
end
$$;
comment on function gdq.publish_sequences(integer, bigint) is
  'Stores the values of a queue''s sequences with a tick, if one has changed.';

-- read_sequence(relid): the value of a sequence; NULL when it cannot be read: it is gone, the right to read it is, or
-- somebody's DDL or TRUNCATE ... RESTART IDENTITY holds it. Nobody can take a value meanwhile. Writes: nothing.
create or replace function gdq.read_sequence(relid regclass, out last_value bigint, out is_called boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5ms'
as $$
begin
  execute 'select s.last_value, s.is_called from ' || gdq.table_name(relid) || ' s' into last_value, is_called;
exception when others then
  last_value := null;
  is_called := null;
end
$$;
comment on function gdq.read_sequence(regclass) is 'The value of a sequence; NULL when it cannot be read.';

-- sequences_at(queue_id, tick): the row that holds the values of a queue's sequences at a tick; tick NULL: at its last.
-- Writes: nothing.
create or replace function gdq.sequences_at(queue_id integer, tick bigint) returns setof gdq.sequence_tick
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select st.*
    from gdq.sequence_tick st
   where st.queue_id = sequences_at.queue_id and (tick is null or st.tick_id <= tick)
   order by st.tick_id desc limit 1
$$;
comment on function gdq.sequences_at(integer, bigint) is 'The values of a queue''s sequences at a tick.';
