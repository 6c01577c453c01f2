-- ticker(queue, ahead, lag): takes a tick that is due, of one queue or of all (NULL). Never waits: a queue that another
-- ticker works on is left to that ticker. Call it in a transaction of its own, since other tickers leave the queue
-- alone until this transaction ends.
--   ahead: the time from this call to the commit of its tick. A tick is taken this much earlier, but not before half of
--   what tick_lag() says, so that it is committed after that.
--   lag: what counts in place of tick_lag(), if it is less, for a caller who waits for changes.
-- Result: how many ticks were made, 0 or 1: call it again until 0. Writes: tick. Errors: 42704, GDQ04,
-- GDQ07, 55000.
create or replace function gdq.ticker(queue text default null, ahead interval default '0',
  lag interval default null) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  q record;
  only_queue integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  perform gdq.require_read_committed('ticker');
  if only_queue is null then
    perform gdq.require_era(null);  -- find_queue() has checked a named queue
  end if;
  if pg_current_xact_id_if_assigned() is not null then
    raise exception 'ticker cannot run in a transaction that has written'
      using errcode = 'GDQ04', hint = 'Commit first.';
  end if;
  -- the queue with the oldest last tick comes first, or a busy queue would keep the others waiting
  for q in select qq.queue_id from gdq.queue qq
            where only_queue is null or qq.queue_id = only_queue order by (gdq.last_tick(qq.queue_id)).created_at loop
    -- drop_queue() holds this lock too, and then nothing of the queue may be read
    if pg_try_advisory_xact_lock(gdq.lock_key('tick', q.queue_id)) and gdq.tick_due(q.queue_id, ahead, lag) then
      -- the tick has given this transaction an xid, so other queues have to wait for the next call
      return (gdq.make_tick(q.queue_id, true) is not null)::integer;
    end if;
  end loop;
  return 0;
end
$$;
comment on function gdq.ticker(text, interval, interval) is
  'Takes a tick that is due, if any; returns 1 or 0. Call again until 0.';

-- tick_due(queue_id, ahead, lag): whether the queue's settings, or a caller who asks for a shorter lag, want a tick
-- now. Event numbers show new events. A long transaction that commits moves no number, so after the lag the logs are
-- read too. The transaction of a new number may be open: a shorter lag than that of tick_lag() has the logs read before
-- a tick, or every second one would show nothing to the caller who waits. A last tick in the future was made before the
-- server's clock was set back, and nothing can be counted from it: a tick is due. Writes: nothing.
create or replace function gdq.tick_due(queue_id integer, ahead interval, lag interval) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  q gdq.queue;
  last gdq.tick := gdq.last_tick(queue_id);
  fresh bigint := gdq.last_event(queue_id) - last.event_seq;
  age interval := clock_timestamp() - last.created_at;
  most interval;
begin
  select * into q from gdq.queue qq where qq.queue_id = tick_due.queue_id;
  if q.paused then
    return false;
  elsif age < interval '0' then
    return true;
  end if;
  most := gdq.tick_lag(q);
  if fresh > 0 then
    return fresh >= q.ticker_max_count
        or (age >= gdq.lag_for_tick(most, ahead, lag)
            and (coalesce(lag >= most, true)
                 or age >= most
                 or gdq.has_changes(queue_id, last.snapshot)));
  end if;
  return age >= q.ticker_idle_period
      or (age >= least(most, lag)
          and pg_current_snapshot()::text <> last.snapshot::text
          and gdq.has_changes(queue_id, last.snapshot));
end
$$;
comment on function gdq.tick_due(integer, interval, interval) is
  'Whether a queue''s settings, or a shorter lag, ask for a tick now.';

-- has_changes(queue_id, since): whether a row of a queue's logs has become visible after the snapshot since. It reads
-- the end of every log that holds rows; a change in a quiet log shows by its announcement in the event log. Writes:
-- nothing.
create or replace function gdq.has_changes(queue_id integer, since pg_snapshot) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  log regclass;
  found_row boolean;
  open_then bigint[] := array(select x::text::bigint from pg_snapshot_xip(since) x);
begin
  for log in select s from gdq.queue_segments(queue_id) s loop
    execute format($sql$
      select exists (select from %1$s where ev_txid >= $1)
          or exists (select from %1$s where ev_txid = any ($2)) $sql$, log)
      into found_row using pg_snapshot_xmax(since)::text::bigint, open_then;
    if found_row then
      return true;
    end if;
  end loop;
  return false;
end
$$;
comment on function gdq.has_changes(integer, pg_snapshot) is 'Whether a change has become visible since a snapshot.';
