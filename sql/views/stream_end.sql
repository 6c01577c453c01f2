-- stream_end(queue, consumer, tbl, since, max_events, last_tick): the position at which the next batch of a stream
-- ends. A stream reads one table and keeps its own position, since; its consumer only keeps the rows after the
-- consumer's position.
--   max_events: ticks are joined while they hold at most this many events; a single tick may hold more. NULL: up to the
--   newest tick. last_tick: no tick after this one.
-- Result: a position; NULL when there is no later tick, or while the queue or the consumer is paused.
-- Writes: nothing. Errors: 42501; 42704, also for a table that the consumer does not take; 55000 for a consumer with
-- members or that skips origins, and for an unlogged queue, whose logs a crash may empty unnoticed between two calls;
-- 55006 for the consumer of a view; GDQ02, GDQ07 and GDQ08 for the position; GDQ03 when the consumer was cut off;
-- GDQ04.
create or replace function gdq.stream_end(queue text, consumer text, tbl regclass, since text,
  max_events bigint default null, last_tick bigint default null)
  returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  id integer := gdq.own_subscription(queue, consumer);
  start gdq.tick;
  till gdq.tick;
  -- a stream that is far behind must not read all ticks for every batch
  ticks_max constant integer := 1000;
begin
  perform gdq.require_read_committed('stream_end');
  perform gdq.require_member(id, null);
  perform gdq.refuse_view_consumer(queue_of, consumer, 'register another for the stream');
  if (select q.unlogged from gdq.queue q where q.queue_id = queue_of) then
    raise exception 'queue "%" is unlogged: a stream would not notice that a crash emptied its logs', queue
      using errcode = 'object_not_in_prerequisite_state', hint = 'Stream from a queue with logs that survive a crash.';
  elsif (select s.skip_origin from gdq.subscription s where s.subscription_id = id) is not null then
    raise exception 'consumer "%" skips origins, and a stream does not', consumer
      using errcode = 'object_not_in_prerequisite_state', hint = 'Register a consumer without skip_origin.';
  elsif not exists (select from gdq.subscribed_tables(id) t where t.relid = tbl) then
    raise exception 'consumer "%" of queue "%" does not take table %, so nothing holds its changes',
      consumer, queue, gdq.table_name(tbl)
      using errcode = 'undefined_object', hint = 'gdq set-tables lets it take more.';
  end if;
  perform gdq.check_position(queue, since);
  if not gdq.may_read(id) then
    return null;
  end if;
  select t.* into strict start
    from gdq.tick t where t.queue_id = queue_of and t.tick_id = split_part(since, '/', 3)::bigint;
  -- A tick that was taken before the position but committed after it would lead backwards: it is passed over.
  if max_events is null then
    select t.* into till
      from gdq.tick t
     where t.queue_id = queue_of and not t.refresh
       and t.tick_id > start.tick_id and t.tick_id <= coalesce(last_tick, t.tick_id)
       and gdq.snapshot_le(start.snapshot, t.snapshot)
     order by t.tick_id desc limit 1;
  else
    select (t).* into till
      from (select t
              from gdq.tick t
             where t.queue_id = queue_of and not t.refresh
               and t.tick_id > start.tick_id and t.tick_id <= coalesce(last_tick, t.tick_id)
               and gdq.snapshot_le(start.snapshot, t.snapshot)
             order by t.tick_id limit ticks_max) later(t)
     order by (t).event_seq - start.event_seq > max_events,
              case when (t).event_seq - start.event_seq > max_events then (t).tick_id else -(t).tick_id end
     limit 1;
  end if;
  return gdq.position_text(queue_of, till.tick_id, till.snapshot);
end
$$;
comment on function gdq.stream_end(text, text, regclass, text, bigint, bigint) is
  'The position at which the next batch of a stream ends.';
