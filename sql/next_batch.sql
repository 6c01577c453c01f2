-- lock_subscription(queue, consumer): locks a subscription until the transaction ends: one worker at a time moves it.
-- Result: its id. Writes: a row lock. Errors: 42704, GDQ04.
create or replace function gdq.lock_subscription(queue text, consumer text) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.find_subscription(queue, consumer);
begin
  perform gdq.require_read_committed('a consumer');
  perform from gdq.subscription s where s.subscription_id = id for no key update;
  return id;
end
$$;
comment on function gdq.lock_subscription(text, text) is 'Locks a subscription until the transaction ends.';

-- next_batch(queue, consumer, max_events): opens the next batch of a consumer, or hands out the open one again.
-- A batch ends at a tick; up to 1,000 ticks are joined while they hold at most max_events events by number. Who calls it holds the
-- batch from then on: an older token is stale.
-- Result: one row (batch_id, token, tick_from, tick_to, snapshot_from, snapshot_to); none when there is no newer tick.
-- Writes: batch, batch_token. Errors: 42704, GDQ04; 55000 for the consumer of a view.
create or replace function gdq.next_batch(queue text, consumer text, max_events integer default 50000)
  returns table (batch_id bigint, token uuid, tick_from bigint, tick_to bigint, snapshot_from pg_snapshot, snapshot_to pg_snapshot)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  id integer := gdq.lock_subscription(queue, consumer);
  pos gdq.position := gdq.position_of(id);
  b gdq.batch;
  till gdq.tick;
  -- a consumer that is far behind must not read all its ticks for every batch
  ticks_max constant integer := 1000;
begin
  select * into b from gdq.batch where subscription_id = id and batch_no = pos.batch_no + 1;
  if b.batch_id is not null and b.snapshot_to is null then
    raise exception 'consumer "%" of queue "%" belongs to a refresh', consumer, queue
      using errcode = 'object_not_in_prerequisite_state', hint = 'Register another consumer to read batches.';
  elsif b.batch_id is null then
    -- A tick that was taken before the position but committed after it would lead backwards: it is passed over.
    select (t).* into till
      from (select t from gdq.tick t
             where t.queue_id = (select s.queue_id from gdq.subscription s where s.subscription_id = id)
               and not t.refresh and t.tick_id > pos.tick_id and gdq.snapshot_le(pos.snapshot, t.snapshot)
             order by t.tick_id limit ticks_max) later(t)
     order by (t).event_seq - pos.event_seq > max_events,
              case when (t).event_seq - pos.event_seq > max_events then (t).tick_id else -(t).tick_id end
     limit 1;
    if till.tick_id is null then
      return;
    end if;
    insert into gdq.batch (subscription_id, batch_no, tick_from, tick_to, snapshot_from, snapshot_to, event_seq)
      values (id, pos.batch_no + 1, pos.tick_id, till.tick_id, pos.snapshot, till.snapshot, till.event_seq)
      returning * into b;
  end if;
  insert into gdq.batch_token (batch_id) values (b.batch_id) returning batch_token.token into token;
  return query select b.batch_id, token, b.tick_from, b.tick_to, b.snapshot_from, b.snapshot_to;
end
$$;
comment on function gdq.next_batch(text, text, integer) is 'Opens the next batch of a consumer, or hands out the open one under a new token.';

-- open_batch(batch_id, token): the batch, if it is open and the token its newest. Writes: nothing. Errors: GDQ01, GDQ07.
create or replace function gdq.open_batch(batch_id bigint, token uuid) returns gdq.batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  b gdq.batch;
  newest uuid;
begin
  select * into b from gdq.batch bb where bb.batch_id = open_batch.batch_id;
  select bt.token into newest from gdq.batch_token bt where bt.batch_id = b.batch_id order by bt.grant_id desc limit 1;
  if b.batch_id is null then
    raise exception 'batch % does not exist', open_batch.batch_id using errcode = 'GDQ01';
  end if;
  perform gdq.require_era((select s.queue_id from gdq.subscription s where s.subscription_id = b.subscription_id));
  if newest is distinct from token then
    raise exception 'batch % was handed to another worker', b.batch_id using errcode = 'GDQ01',
      hint = 'Roll back, and ask for the next batch.';
  elsif exists (select from gdq.position p where p.subscription_id = b.subscription_id and p.batch_no >= b.batch_no) then
    raise exception 'batch % is finished', b.batch_id using errcode = 'GDQ01', hint = 'Ask for the next batch.';
  end if;
  return b;
end
$$;
comment on function gdq.open_batch(bigint, uuid) is 'The batch, if it is open and the token its newest; else error GDQ01.';

-- finish_batch(batch_id, token): moves the consumer past the batch. In the transaction that applied the batch to the
-- same database this makes it exactly once. Result: true; false when this token had finished it already.
-- Writes: position. Errors: GDQ01 for a stale token, GDQ04.
create or replace function gdq.finish_batch(batch_id bigint, token uuid) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  b gdq.batch;
begin
  perform gdq.require_read_committed('finish_batch');
  select * into b from gdq.batch bb where bb.batch_id = finish_batch.batch_id;
  perform from gdq.subscription s where s.subscription_id = b.subscription_id for no key update;
  if exists (select from gdq.position p where p.subscription_id = b.subscription_id and p.batch_no >= b.batch_no)
     and token = (select bt.token from gdq.batch_token bt where bt.batch_id = b.batch_id order by bt.grant_id desc limit 1) then
    return false;
  end if;
  b := gdq.open_batch(batch_id, token);
  if b.snapshot_to is null then
    raise exception 'batch % belongs to a refresh', batch_id using errcode = 'object_not_in_prerequisite_state', hint = 'A refresh ends with gdq.set_position().';
  end if;
  insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
    values (b.subscription_id, b.batch_no, b.tick_to, b.snapshot_to, b.event_seq);
  return true;
end
$$;
comment on function gdq.finish_batch(bigint, uuid) is 'Moves the consumer past the batch; false when this token had finished it already.';
