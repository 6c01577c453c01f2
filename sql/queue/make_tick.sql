-- make_tick(queue_id, patient): stores a snapshot as the next tick of a queue and notifies the channel gdq_<queue_id>
-- with its id. Ticks are taken one at a time, in an order that matters:
--   first the lock, then the snapshot in a statement of its own: two tickers could else store their snapshots in the
--   wrong order, and events would come twice;
--   no xid before the snapshot: the transaction would count itself as finished;
--   the event number before the snapshot: numbers that are given out later are new events;
--   sequences after the snapshot: see publish_sequences().
-- After an unanswered alarm, and where the event triggers are off, the tables are compared with their witness, after
-- the snapshot too. A resync that this records belongs to the tick: no batch ends between rows of an altered table and
-- the resync.
--   patient: whether to return NULL, instead of the error, when such a resync could not be recorded.
-- Result: the tick's id. Writes: tick, sequence_tick; as check_witness(); alarm_check. Errors: GDQ04; 55000 when the
-- snapshot goes backwards, and when a captured table was altered and that could not be recorded.
create or replace function gdq.make_tick(queue_id integer, patient boolean default false) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  last gdq.tick;
  events bigint;
  now_snapshot pg_snapshot;
  altered integer;
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
  altered := gdq.check_before_tick(queue_id, patient);
  if altered is null then
    return null;
  elsif altered > 0 then
    now_snapshot := gdq.snapshot_with(now_snapshot, pg_current_xact_id());
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
comment on function gdq.make_tick(integer, boolean) is 'Stores a snapshot as the next tick of a queue.';

-- snapshot_with(snapshot, id): a snapshot that also shows a running transaction: this one, whose events belong to the
-- tick that it takes. Transactions that got their numbers since the snapshot was taken count as running. Writes:
-- nothing.
create or replace function gdq.snapshot_with(snapshot pg_snapshot, id xid8) returns pg_snapshot
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if pg_visible_in_snapshot(id, snapshot) then
    return snapshot;
  end if;
  return (
    select format('%s:%s:%s',
                  coalesce(min(x), greatest(id::text::bigint + 1, pg_snapshot_xmax(snapshot)::text::bigint)),
                  greatest(id::text::bigint + 1, pg_snapshot_xmax(snapshot)::text::bigint),
                  string_agg(x::text, ',' order by x))
      from (select s::text::bigint as x from pg_snapshot_xip(snapshot) s
             union
            select generate_series(pg_snapshot_xmax(snapshot)::text::bigint, id::text::bigint - 1)) running
     where x <> id::text::bigint)::pg_snapshot;
end
$$;
comment on function gdq.snapshot_with(pg_snapshot, xid8) is 'A snapshot that also shows a running transaction.';

-- publish_sequences(queue_id, tick_id): stores the values of a queue's sequences with a tick, if one has changed. They
-- are read after the tick's snapshot was taken, so a transaction that is committed in the snapshot took its values
-- before. A sequence does not follow snapshots; with a cache its value is the last that a session has reserved.
-- All sequences are read in one statement. If that fails, as when DDL holds one, they are read one by one, and a
-- sequence that cannot be read is stored as unknown: a tick must not wait or fail. Writes: sequence_tick.
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

-- read_sequence(relid): the value of a sequence; NULL when it cannot be read: it is gone, the right to read it is gone,
-- or DDL or TRUNCATE ... RESTART IDENTITY has locked it, so that no session can take a value either. Writes: nothing.
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

-- sequences_at(queue_id, tick): the stored values of a queue's sequences at a tick; tick NULL: at the last tick.
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
