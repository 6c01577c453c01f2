-- seek(queue, consumer, at_tick, at_time, to_now): moves a consumer forward or back to a tick. Give one of the three:
--   at_tick: this tick. at_time: the last tick at or before this time, so that every change committed after the time
--   comes. to_now: a tick taken now.
-- A seek forward skips changes: they are never delivered. A seek back delivers changes again, also those of tables that
-- the consumer had copied at a later snapshot; a seek forward leaves such copies alone. Open batches and their tokens
-- become stale. Events that wait for a retry go on waiting, except those that a seek back brings again.
-- Result: the tick. Writes: position, batch_token, subscription_resync; retry_delivery and batch_end; a tick for
-- to_now. Errors: 42704; 22023; 42501; GDQ02 when changes after the tick may be gone; 55006 for the consumer of a view;
-- 55P03 while a worker holds the consumer: nothing is changed, try again; GDQ04.
create or replace function gdq.seek(queue text, consumer text, at_tick bigint default null,
  at_time timestamptz default null, to_now boolean default false) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500ms'
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  id integer := gdq.own_subscription(queue, consumer);
  target gdq.tick;
  pos gdq.position;
begin
  perform gdq.require_read_committed('seek');
  perform gdq.refuse_view_consumer(queue_of, consumer, 'its position lies beside the data');
  if num_nonnulls(at_tick, at_time, nullif(to_now, false)) <> 1 then
    raise exception 'seek wants one of at_tick, at_time and to_now' using errcode = 'invalid_parameter_value';
  elsif at_time > clock_timestamp() then
    raise exception 'time % lies in the future', at_time
      using errcode = 'invalid_parameter_value', hint = 'to_now => true skips all changes up to now.';
  end if;
  -- Truncation takes the same lock: it sees the new position, or has raised the horizon that start_tick() checks.
  perform pg_advisory_xact_lock(gdq.lock_key('position', queue_of));
  target := gdq.start_tick(queue, case when to_now then gdq.make_tick(queue_of)
                                       when at_time is not null then gdq.tick_at(queue_of, at_time)
                                       else at_tick end);
  if target.created_at > at_time then
    raise exception 'queue "%" has no tick as old as %', queue, at_time
      using errcode = 'GDQ02', hint = format('Its oldest one is tick %s of %s.', target.tick_id, target.created_at);
  end if;
  perform gdq.lock_idle_subscription(queue, consumer);
  pos := gdq.position_of(id);
  perform gdq.move_position(id, target);
  -- a seek back brings all changes of every table again, also of one that was copied or cut in between
  insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot)
    select id, r.relid, 'copied', target.snapshot
      from (select distinct on (sr.relid) sr.relid, sr.snapshot from gdq.subscription_resync sr
             where sr.subscription_id = id and sr.kind <> 'removed' order by sr.relid, sr.state_id desc) r
     where not gdq.snapshot_le(pos.snapshot, target.snapshot) and gdq.snapshot_le(target.snapshot, r.snapshot);
  perform gdq.settle_retries(id, target.snapshot);
  return target.tick_id;
end
$$;
comment on function gdq.seek(text, text, bigint, timestamptz, boolean) is
  'Moves a consumer forward or back to a tick, a time, or now.';

-- settle_retries(subscription_id, since): settles, after a seek to the snapshot since, the waiting retries whose events
-- the next batches bring again; else these events would come twice, and late. A settled retry is written as if a batch
-- had brought it and was finished. The logs tell which events come again: those of a removed table do not. The caller
-- has moved the subscription. Writes: retry_delivery, batch_end.
create or replace function gdq.settle_retries(subscription_id integer, since pg_snapshot) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  waiting bigint[];
  again bigint[];
  last gdq.tick;
  settled bigint;
begin
  select array_agg(r.retry_id) into waiting
    from gdq.waiting_retries(subscription_id, 'infinity', null) w join gdq.retry_event r on r.retry_id = w.retry_id
   where not pg_visible_in_snapshot(r.ev_txid::text::xid8, since);
  if waiting is null then
    return;
  end if;
  last := gdq.last_tick((select s.queue_id from gdq.subscription s
                          where s.subscription_id = settle_retries.subscription_id));
  execute format($sql$
    select array_agg(distinct r.retry_id)
      from gdq.retry_event r
      join (%s) e on e.ev_id = r.ev_id and e.op = r.op
     where r.retry_id = any ($1) $sql$,
    gdq.subscription_events_sql(subscription_id, since, last.snapshot)) into again using waiting;
  if again is not null then
    insert into gdq.batch_end (subscription_id, batch_no, batch_id, token)
      select p.subscription_id, p.batch_no, nextval('gdq.batch_id'), gen_random_uuid()
        from gdq.position_of(settle_retries.subscription_id) p
      returning batch_id into settled;
    insert into gdq.retry_delivery (retry_id, batch_id) select r, settled from unnest(again) r;
  end if;
end
$$;
comment on function gdq.settle_retries(integer, pg_snapshot) is
  'Settles the waiting retries whose events come again after a seek back.';

-- lock_idle_subscription(queue, consumer): lock_subscription() that gives up after 500 ms, since its caller holds a
-- lock of the whole queue. Result: the subscription's id. Writes: a row lock. Errors: 42704, 42501, 55P03, GDQ04.
create or replace function gdq.lock_idle_subscription(queue text, consumer text) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500ms'
as $$
begin
  return gdq.lock_subscription(queue, consumer);
exception when lock_not_available then
  raise exception 'consumer "%" of queue "%" is at work: no lock within 500 ms', consumer, queue
    using errcode = 'lock_not_available', hint = 'Nothing was changed. Try again.';
end
$$;
comment on function gdq.lock_idle_subscription(text, text) is 'Locks a subscription unless a worker holds it.';
