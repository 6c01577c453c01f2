-- token_key(token): the advisory lock key of a batch's token: who puts events aside holds it shared, finish_batch() takes
-- it alone. So an event is put aside before the batch is finished, or refused. By the token, not the batch: a worker that
-- was given up for dead must not hold up the next. Writes: nothing.
create or replace function gdq.token_key(token uuid) returns bigint
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select gdq.lock_key('token', (hashtext(token::text)::bigint & 4294967295)::oid)
$$;
comment on function gdq.token_key(uuid) is 'Advisory lock key of a batch''s token.';

-- waiting_retries(subscription_id, due_before, most): what a subscription put aside in batches that are finished, and no
-- batch has brought again that is open or finished, in the order of its time. A batch that was left behind unfinished
-- settles nothing; what a later copy of its table holds waits no more. most NULL: all. Here and below without sequential scans: a plan that was kept from when the tables
-- were small would read them once for every row. Writes: nothing.
create or replace function gdq.waiting_retries(subscription_id integer, due_before timestamptz, most bigint)
  returns table (retry_id bigint, due_at timestamptz)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
#variable_conflict use_column
begin
  if not exists (select from gdq.retry_event r where r.subscription_id = waiting_retries.subscription_id and r.due_at <= due_before) then
    return;  -- as with most batches
  end if;
  return query
    with copies as materialized (
      select gdq.table_name(c.relid) as name, c.snapshot from gdq.copied_tables(waiting_retries.subscription_id) c where c.relid is not null
    )
    select r.retry_id, r.due_at
      from gdq.retry_event r
     where r.subscription_id = waiting_retries.subscription_id and r.due_at <= due_before and not r.dead
       and (r.batch_id is null or exists (select from gdq.batch_end e where e.batch_id = r.batch_id and e.token = r.token))
       and not exists (select from gdq.retry_delivery d
                        where d.retry_id = r.retry_id
                          and (exists (select from gdq.batch_end e where e.batch_id = d.batch_id)
                               or exists (select from gdq.batch b where b.batch_id = d.batch_id
                                                                   and not gdq.is_finished(b.subscription_id, b.batch_no, b.batch_id))))
       and not exists (select from copies c where c.name = r.tbl and pg_visible_in_snapshot(r.ev_txid::text::xid8, c.snapshot))
     order by r.due_at, r.retry_id limit most;
end
$$;
comment on function gdq.waiting_retries(integer, timestamptz, bigint) is 'Events that a subscription put aside and no batch has brought again.';

-- put_aside(batch_id, token, ev_ids, ops, delay, reasons, dead): retry_event(), or with dead dead_letter(), of many events
-- at once; the three lists belong together. They are stored as get_batch() or get_retries() shows them, since their log may
-- be truncated by the time they come again. Once is enough: the first call stays. Planned at each call: one plan does not
-- serve a single event and thousands.
-- Result: how many come again; the others are dead letters. Writes: retry_event. Errors: as retry_event().
create or replace function gdq.put_aside(batch_id bigint, token uuid, ev_ids bigint[], ops text[], delay interval, reasons text[], dead boolean)
  returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
  b gdq.batch;
  most integer;
  missing bigint;
begin
  perform gdq.require_read_committed('a retry');
  if delay is null or delay < interval '0' then
    raise exception 'the delay of a retry is not negative' using errcode = 'invalid_parameter_value';
  end if;
  perform pg_advisory_xact_lock_shared(gdq.token_key(token));
  b := gdq.open_batch(batch_id, token);
  most := coalesce((select l.retries from gdq.retry_limit l where l.subscription_id = b.subscription_id), 10);
  insert into gdq.retry_event (subscription_id, batch_id, token, ev_id, ev_txid, ev_time, op, tbl, key, old, new, origin, retries, due_at, dead, reason)
    select distinct on (e.ev_id, e.op)
           b.subscription_id, b.batch_id, put_aside.token, e.ev_id, e.ev_txid, e.ev_time, e.op, e.tbl, e.key, e.old, e.new, e.origin,
           e.retries + (not (put_aside.dead or e.retries >= most))::integer, clock_timestamp() + delay,
           put_aside.dead or e.retries >= most, a.reason
      from gdq.batch_events(b.batch_id, put_aside.token, ev_ids) e
      join unnest(ev_ids, ops, reasons) a(ev_id, op, reason) on a.ev_id = e.ev_id and (a.op is null or a.op = e.op)
     where not exists (select from gdq.retry_event r
                        where r.batch_id = b.batch_id and r.token = put_aside.token and r.ev_id = e.ev_id and r.op = e.op)
     order by e.ev_id, e.op;
  select a.ev_id into missing
    from unnest(ev_ids, ops) a(ev_id, op)
   where not exists (select from gdq.retry_event r where r.batch_id = b.batch_id and r.token = put_aside.token and r.ev_id = a.ev_id
                                                     and (a.op is null or r.op = a.op)) limit 1;
  if missing is not null then
    raise exception 'batch % holds no event %', b.batch_id, missing using errcode = 'undefined_object';
  elsif exists (select from gdq.retry_event r where r.batch_id = b.batch_id and r.token = put_aside.token and r.op = 'resync') then
    raise exception 'a gap in capture cannot be put aside' using errcode = 'object_not_in_prerequisite_state', hint = 'Load the table afresh.';
  end if;
  return (select count(*) from unnest(ev_ids, ops) a(ev_id, op)
           where exists (select from gdq.retry_event r where r.batch_id = b.batch_id and r.token = put_aside.token and r.ev_id = a.ev_id
                                                         and (a.op is null or r.op = a.op) and not r.dead));
end
$$;
comment on function gdq.put_aside(bigint, uuid, bigint[], text[], interval, text[], boolean) is 'Puts many events of an open batch aside, for a retry or as dead letters; how many come again.';

-- retry_event(batch_id, token, ev_id, delay, reason, op): puts an event of an open batch aside: it comes again, by
-- gdq.get_retries(), in the first batch that is opened after the delay. It counts once this batch is finished under this
-- token, so it is undone with the transaction, and when another worker takes the batch over. An event that has been
-- retried as often as gdq.set_retry_limit() allows becomes a dead letter instead. Later changes of the same row do not wait.
--   op: only the event of this number with this op; mode pk gives a changed key as a delete and an insert of one number.
-- Result: true; false when it became a dead letter. Writes: retry_event. Errors: GDQ01 for a stale token or a finished
-- batch; 42704 when the batch holds no such event; 55000 for a resync event; 22023; GDQ04.
create or replace function gdq.retry_event(batch_id bigint, token uuid, ev_id bigint, delay interval default '1 minute',
  reason text default null, op text default null) returns boolean
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select gdq.put_aside(batch_id, token, array[ev_id], array[op], delay, array[reason], false) > 0
$$;
comment on function gdq.retry_event(bigint, uuid, bigint, interval, text, text) is 'Puts an event of an open batch aside: it comes again after a delay; false when it became a dead letter.';

-- get_retries(batch_id, token): the events that an open batch brings again, in ev_id order: the columns of get_batch(),
-- how often each was put aside, and why the last time. Handle them before get_batch(): they are older. Reading again
-- gives the same. Writes: nothing. Errors: GDQ01; GDQ04: an old snapshot may miss what was moved since.
create or replace function gdq.get_retries(batch_id bigint, token uuid)
  returns table (ev_id bigint, ev_txid bigint, ev_time timestamptz, op text, tbl text, key jsonb, old jsonb, new jsonb, origin text, retries integer, reason text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
begin
  perform gdq.require_read_committed('get_retries');
  return query
    with copies as materialized (
      select gdq.table_name(c.relid) as name, c.snapshot from gdq.copied_tables(b.subscription_id) c where c.relid is not null
    )
    select r.ev_id, r.ev_txid, r.ev_time, r.op, r.tbl, r.key, r.old, r.new, r.origin, r.retries, r.reason
      from gdq.retry_delivery d join gdq.retry_event r on r.retry_id = d.retry_id
     where d.batch_id = b.batch_id
       and not exists (select from copies c where c.name = r.tbl and pg_visible_in_snapshot(r.ev_txid::text::xid8, c.snapshot))
     order by r.ev_id, r.op, r.retry_id;
end
$$;
comment on function gdq.get_retries(bigint, uuid) is 'The events that an open batch brings again, with the number of their retries.';

-- end_retries(b, token): what finish_batch() does about retries: dead letters of the batch come into being. Result:
-- whether the batch brought or put aside any, and so has to be noted in batch_end. Writes: dead_letter.
create or replace function gdq.end_retries(b gdq.batch, token uuid) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  put boolean := exists (select from gdq.retry_event r where r.batch_id = b.batch_id and r.token = end_retries.token);
begin
  if put then
    insert into gdq.dead_letter (subscription_id, ev_id, ev_txid, ev_time, op, tbl, key, old, new, origin, retries, reason)
      select r.subscription_id, r.ev_id, r.ev_txid, r.ev_time, r.op, r.tbl, r.key, r.old, r.new, r.origin, r.retries, r.reason
        from gdq.retry_event r where r.batch_id = b.batch_id and r.token = end_retries.token and r.dead order by r.retry_id;
  end if;
  return put or exists (select from gdq.retry_delivery d where d.batch_id = b.batch_id);
end
$$;
comment on function gdq.end_retries(gdq.batch, uuid) is 'Makes the dead letters of a batch; whether it had to do with retries.';

-- next_retry(queue, consumer): when the next waiting retry of a consumer is due; NULL when none waits. Writes: nothing.
-- Errors: 42704, 42501.
create or replace function gdq.next_retry(queue text, consumer text) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.find_subscription(queue, consumer);
begin
  perform gdq.check_consumer_role(id);  -- a time is no data: who may not read the tables any more is told by next_batch()
  return (select r.due_at from gdq.waiting_retries(id, 'infinity', 1) r);
end
$$;
comment on function gdq.next_retry(text, text) is 'When the next retry of a consumer is due.';

-- set_retry_limit(queue, consumer, retries): how often an event of a consumer is retried before it becomes a dead letter;
-- 10 unless set. Writes: retry_limit. Errors: 42704; 22023.
create or replace function gdq.set_retry_limit(queue text, consumer text, retries integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if retries is null or retries < 0 then
    raise exception 'a retry limit is a number from 0' using errcode = 'invalid_parameter_value';
  end if;
  insert into gdq.retry_limit as l (subscription_id, retries) values (gdq.own_subscription(queue, consumer), set_retry_limit.retries)
    on conflict (subscription_id) do update set retries = excluded.retries;
end
$$;
comment on function gdq.set_retry_limit(text, text, integer) is 'Sets how often an event is retried before it becomes a dead letter.';

-- retry_info(queue, consumer): one row an event that waits to come again, in the order of its time; NULL: of all that
-- the session's role may use. batch_id:
-- the open batch that has it. Writes: nothing. Errors: 42704.
create or replace function gdq.retry_info(queue text default null, consumer text default null)
  returns table (queue_name text, consumer_name text, ev_id bigint, op text, tbl text, key jsonb, retries integer, due_at timestamptz,
                 batch_id bigint, reason text)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select q.queue_name, c.consumer_name, r.ev_id, r.op, r.tbl, r.key, r.retries, r.due_at, u.batch_id, r.reason
    from gdq.subscription s join gdq.queue q using (queue_id) join gdq.consumer c using (consumer_id)
   cross join lateral (select w.retry_id, null::bigint as batch_id from gdq.waiting_retries(s.subscription_id, 'infinity', null) w
                        union all
                       select d.retry_id, d.batch_id from gdq.batch b join gdq.retry_delivery d on d.batch_id = b.batch_id
                        where b.subscription_id = s.subscription_id and not gdq.is_finished(b.subscription_id, b.batch_no, b.batch_id)) u
    join gdq.retry_event r on r.retry_id = u.retry_id
   where (queue is null or q.queue_id = gdq.find_queue(queue))
     and (consumer is null or s.subscription_id = gdq.find_subscription(queue, consumer))
     and gdq.may_use_consumer((select gdq.invoker()), s.subscription_id)
   order by r.due_at, r.retry_id
$$;
comment on function gdq.retry_info(text, text) is 'Events that wait to come again.';
