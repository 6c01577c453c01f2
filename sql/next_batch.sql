-- lock_subscription(queue, consumer): locks a subscription until the transaction ends: one worker at a time moves it.
-- Result: its id. Writes: a row lock. Errors: 42704, GDQ04; 42501 for the consumer of another role, or one whose role
-- may not read its tables.
create or replace function gdq.lock_subscription(queue text, consumer text) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.own_subscription(queue, consumer);
begin
  perform gdq.require_read_committed('a consumer');
  perform from gdq.subscription s where s.subscription_id = id for no key update;
  return id;
end
$$;
comment on function gdq.lock_subscription(text, text) is 'Locks a subscription until the transaction ends.';

-- held_batch(subscription_id, member, dead_after): the open batch that a worker must take up before a new one: its own,
-- else the oldest that nobody has, or whose member was not heard of for dead_after. Writes: nothing.
create or replace function gdq.held_batch(subscription_id integer, member text, dead_after interval) returns gdq.batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  pos gdq.position := gdq.position_of(subscription_id);
  held gdq.batch;
begin
  select b.* into held
    from gdq.batch b
    cross join lateral (select bt.member, bt.granted_at from gdq.batch_token bt
                         where bt.batch_id = b.batch_id order by bt.grant_id desc limit 1) holder
   where b.subscription_id = held_batch.subscription_id and b.batch_no > pos.batch_no
     and not exists (select from gdq.batch_end e where e.batch_id = b.batch_id)
     and (held_batch.member is null or holder.member = held_batch.member
          or holder.granted_at <= clock_timestamp() - held_batch.dead_after
          or not exists (select from gdq.member m
                          where m.subscription_id = held_batch.subscription_id and m.member_name = holder.member))
   order by holder.member is distinct from held_batch.member, b.batch_no limit 1;
  return held;
end
$$;
comment on function gdq.held_batch(integer, text, interval) is 'The open batch that a worker must take up before a new one.';

-- create_batch(subscription_id, max_events): a new batch after the one opened last: up to a tick, with the retries that
-- are due, at most max_events of them; or with those alone. NULL when there is neither. The caller holds the subscription.
-- Writes: batch, retry_delivery.
create or replace function gdq.create_batch(subscription_id integer, max_events integer) returns gdq.batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  pos gdq.position := gdq.position_of(subscription_id);
  b gdq.batch;
  till gdq.tick;
  due bigint[];
  -- a consumer that is far behind must not read all its ticks for every batch
  ticks_max constant integer := 1000;
begin
  -- other members may have batches open
  select * into b from gdq.batch bb
   where bb.subscription_id = create_batch.subscription_id and bb.batch_no > pos.batch_no order by bb.batch_no desc limit 1;
  if b.batch_id is not null then
    pos.batch_no := b.batch_no;
    pos.tick_id := b.tick_to;
    pos.snapshot := b.snapshot_to;
    pos.event_seq := b.event_seq;
  end if;
  -- A tick that was taken before the position but committed after it would lead backwards: it is passed over.
  select (t).* into till
    from (select t from gdq.tick t
           where t.queue_id = (select s.queue_id from gdq.subscription s where s.subscription_id = create_batch.subscription_id)
             and not t.refresh and t.tick_id > pos.tick_id and gdq.snapshot_le(pos.snapshot, t.snapshot)
           order by t.tick_id limit ticks_max) later(t)
   order by (t).event_seq - pos.event_seq > max_events,
            case when (t).event_seq - pos.event_seq > max_events then (t).tick_id else -(t).tick_id end
   limit 1;
  due := array(select r.retry_id from gdq.waiting_retries(subscription_id, clock_timestamp(), max_events) r);
  if till.tick_id is null and due = '{}' then
    return null;
  end if;
  insert into gdq.batch (subscription_id, batch_no, tick_from, tick_to, snapshot_from, snapshot_to, event_seq)
    values (subscription_id, pos.batch_no + 1, pos.tick_id, coalesce(till.tick_id, pos.tick_id), pos.snapshot,
            coalesce(till.snapshot, pos.snapshot), coalesce(till.event_seq, pos.event_seq))
    returning * into b;
  if due <> '{}' then
    insert into gdq.retry_delivery (retry_id, batch_id) select id, b.batch_id from unnest(due) id;
  end if;
  return b;
end
$$;
comment on function gdq.create_batch(integer, integer) is 'A new batch of a subscription, or NULL when there is nothing for it.';

-- next_batch(queue, consumer, max_events, member, dead_after): opens the next batch of a consumer, or hands out the open
-- one again. A batch ends at a tick; up to 1,000 ticks are joined while they hold at most max_events events by number.
-- Events that are due again come with it (gdq.get_retries). Who calls it holds the batch from then on: an older token
-- is stale.
--   member: who asks, for a consumer that has members; each has at most one batch, and they are worked on in parallel, so
--   commit before you begin. dead_after: a batch whose member has held it for so long is handed to the one who asks.
-- Result: one row (batch_id, token, tick_from, tick_to, snapshot_from, snapshot_to); none when there is nothing new, when
-- the queue or the consumer is paused, or when unlogged logs were found empty: commit that, and ask again. The two
-- ticks are one when the batch holds nothing but retries.
-- Writes: batch, batch_token, retry_delivery; what check_logs() writes. Errors: 42704, GDQ04; 55000 for the consumer of
-- a view, or with members when none is named; GDQ03 when tables must be copied anew first, see resynced().
create or replace function gdq.next_batch(queue text, consumer text, max_events integer default 50000,
  member text default null, dead_after interval default '5 minutes')
  returns table (batch_id bigint, token uuid, tick_from bigint, tick_to bigint, snapshot_from pg_snapshot, snapshot_to pg_snapshot)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  id integer := gdq.lock_subscription(queue, consumer);
  b gdq.batch;
begin
  perform gdq.require_member(id, member);
  if gdq.check_logs(queue) > 0 or not gdq.may_read(id) then
    return;
  end if;
  b := gdq.held_batch(id, member, dead_after);
  if b.batch_id is not null and b.snapshot_to is null then
    raise exception 'consumer "%" of queue "%" belongs to a refresh', consumer, queue
      using errcode = 'object_not_in_prerequisite_state', hint = 'Register another consumer to read batches.';
  elsif b.batch_id is null then
    b := gdq.create_batch(id, max_events);
    if b.batch_id is null then
      return;
    end if;
  end if;
  insert into gdq.batch_token (batch_id, member) values (b.batch_id, next_batch.member) returning batch_token.token into token;
  return query select b.batch_id, token, b.tick_from, b.tick_to, b.snapshot_from, b.snapshot_to;
end
$$;
comment on function gdq.next_batch(text, text, integer, text, interval) is 'Opens the next batch of a consumer or of one of its members, or hands out the open one under a new token.';

-- is_finished(subscription_id, batch_no, batch_id): whether a batch is finished, or was left behind. Writes: nothing.
create or replace function gdq.is_finished(subscription_id integer, batch_no bigint, batch_id bigint) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select exists (select from gdq.position p where p.subscription_id = is_finished.subscription_id and p.batch_no >= is_finished.batch_no)
        or exists (select from gdq.batch_end e where e.batch_id = is_finished.batch_id));
end
$$;
comment on function gdq.is_finished(integer, bigint, bigint) is 'Whether a batch is finished, or was left behind.';

-- holds_batch(b, token): whether a batch is open for who has this token; false when it is finished. Writes: nothing.
-- Errors: GDQ01 when the token is not the newest.
create or replace function gdq.holds_batch(b gdq.batch, token uuid) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  newest uuid;
begin
  select bt.token into newest from gdq.batch_token bt where bt.batch_id = b.batch_id order by bt.grant_id desc limit 1;
  if newest is distinct from token then
    raise exception 'batch % was handed to another worker', b.batch_id using errcode = 'GDQ01',
      hint = 'Roll back, and ask for the next batch.';
  end if;
  return not gdq.is_finished(b.subscription_id, b.batch_no, b.batch_id);
end
$$;
comment on function gdq.holds_batch(gdq.batch, uuid) is 'Whether a batch is open for who has this token; error GDQ01 for a stale one.';

-- require_held(b, token): error unless a batch is open and the token its newest. Writes: nothing. Errors: GDQ01.
create or replace function gdq.require_held(b gdq.batch, token uuid) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if not gdq.holds_batch(b, token) then
    raise exception 'batch % is finished', b.batch_id using errcode = 'GDQ01', hint = 'Ask for the next batch.';
  end if;
end
$$;
comment on function gdq.require_held(gdq.batch, uuid) is 'Error GDQ01 unless a batch is open and the token its newest.';

-- named_batch(batch_id): a batch that the session may use, open or not. Writes: nothing. Errors: GDQ01 when there is none
-- of that number; GDQ07; 42501.
create or replace function gdq.named_batch(batch_id bigint) returns gdq.batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  b gdq.batch;
begin
  select * into b from gdq.batch bb where bb.batch_id = named_batch.batch_id;
  perform gdq.check_consumer_role(b.subscription_id);
  if b.batch_id is null then
    raise exception 'batch % does not exist', named_batch.batch_id using errcode = 'GDQ01';
  end if;
  perform gdq.require_era((select s.queue_id from gdq.subscription s where s.subscription_id = b.subscription_id));
  return b;
end
$$;
comment on function gdq.named_batch(bigint) is 'A batch that the session may use, open or not.';

-- open_batch(batch_id, token): the batch, if it is open and the token its newest. Writes: nothing. Errors: GDQ01, GDQ07, 42501.
create or replace function gdq.open_batch(batch_id bigint, token uuid) returns gdq.batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  b gdq.batch := gdq.named_batch(batch_id);
begin
  perform gdq.require_held(b, token);
  return b;
end
$$;
comment on function gdq.open_batch(bigint, uuid) is 'The batch, if it is open and the token its newest; else error GDQ01.';

-- finish_batch(batch_id, token): moves the consumer past the batch. In the transaction that applied the batch to the
-- same database this makes it exactly once. What the batch put aside counts from then on, what it brought again is done.
-- With members the position moves once all older batches are finished too. Other workers of the consumer wait from here
-- to the end of the transaction. Result: true; false when this token had finished it already.
-- Writes: position, batch_end, dead_letter. Errors: GDQ01 for a stale token, GDQ04; 42501 for a batch of another role's consumer.
create or replace function gdq.finish_batch(batch_id bigint, token uuid) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  b gdq.batch;
  later gdq.batch;
  pos gdq.position;
begin
  perform gdq.require_read_committed('finish_batch');
  -- before the subscription: who puts an event aside at this moment must not hold up other workers
  perform pg_advisory_xact_lock(gdq.token_key(token));
  b := gdq.named_batch(batch_id);
  perform from gdq.subscription s where s.subscription_id = b.subscription_id for no key update;
  if not gdq.holds_batch(b, token) then
    return false;
  end if;
  if b.snapshot_to is null then
    raise exception 'batch % belongs to a refresh', batch_id using errcode = 'object_not_in_prerequisite_state', hint = 'A refresh ends with gdq.set_position().';
  end if;
  pos := gdq.position_of(b.subscription_id);
  if gdq.end_retries(b, token) or b.batch_no > pos.batch_no + 1 then
    insert into gdq.batch_end (subscription_id, batch_no, batch_id, token)
      values (b.subscription_id, b.batch_no, b.batch_id, finish_batch.token);
  end if;
  if b.batch_no = pos.batch_no + 1 then
    -- on over what other members have finished already
    loop
      select bb.* into later from gdq.batch bb join gdq.batch_end e on e.batch_id = bb.batch_id
       where bb.subscription_id = b.subscription_id and bb.batch_no = b.batch_no + 1;
      exit when later.batch_id is null;
      b := later;
    end loop;
    insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
      values (b.subscription_id, b.batch_no, b.tick_to, b.snapshot_to, b.event_seq);
  end if;
  return true;
end
$$;
comment on function gdq.finish_batch(bigint, uuid) is 'Moves the consumer past the batch; false when this token had finished it already.';
