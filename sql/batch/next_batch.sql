-- next_batch(queue, consumer, max_events, member, dead_after): opens the next batch of a consumer, or hands out the
-- open one again under a new token. From then on the caller holds the batch, and an older token is stale.
--   max_events: a batch ends at a tick; up to 1,000 ticks are joined while they hold at most this many events by
--   number; a single tick may hold more. Retries that are due come with the batch, at most as many (gdq.get_retries).
--   member: the member that asks, for a consumer that has members. Each member has at most one batch, and members work
--   at the same time, so commit before you begin the work. dead_after: a batch that another member has held for longer
--   is handed out again.
-- Result: one row (batch_id, token, tick_from, tick_to, snapshot_from, snapshot_to). No row when there is nothing new,
-- when the queue or the consumer is paused, or when unlogged logs were found empty: commit that, and ask again.
-- tick_from = tick_to when the batch holds nothing but retries.
-- Writes: batch, batch_token, retry_delivery; what note_losses() writes. Errors: 42704, 42501, GDQ04; 55000 for the
-- consumer of a view, or with members when none is named; GDQ03 when tables must be copied anew first, see resynced().
create or replace function gdq.next_batch(queue text, consumer text, max_events integer default 50000,
  member text default null, dead_after interval default '5 minutes')
  returns table (batch_id bigint, token uuid, tick_from bigint, tick_to bigint,
                 snapshot_from pg_snapshot, snapshot_to pg_snapshot)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  id integer := gdq.lock_subscription(queue, consumer);
  b gdq.batch;
begin
  if member is null then
    b := gdq.usual_batch(id, max_events);
    if b.batch_id is not null then
      insert into gdq.batch_token (batch_id) values (b.batch_id) returning batch_token.token into token;
      return query select b.batch_id, token, b.tick_from, b.tick_to, b.snapshot_from, b.snapshot_to;
      return;
    end if;
  end if;
  perform gdq.require_member(id, member);
  if gdq.note_losses(queue) > 0 or not gdq.may_read(id) then
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
  insert into gdq.batch_token (batch_id, member) values (b.batch_id, next_batch.member)
    returning batch_token.token into token;
  return query select b.batch_id, token, b.tick_from, b.tick_to, b.snapshot_from, b.snapshot_to;
end
$$;
comment on function gdq.next_batch(text, text, integer, text, interval) is
  'Opens the next batch of a consumer or of one of its members, or hands out the open one under a new token.';

-- usual_batch(subscription_id, max_events): create_batch() in one statement, where nothing stands against it: no
-- members, pause, losses, tables to copy, retries, or open batch. NULL otherwise, and when there is no new tick: then
-- next_batch() looks at one after the other. The caller has locked the subscription. Writes: batch.
create or replace function gdq.usual_batch(subscription_id integer, max_events integer) returns gdq.batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  b gdq.batch;
begin
  insert into gdq.batch (subscription_id, batch_no, tick_from, tick_to, snapshot_from, snapshot_to, event_seq)
    select s.subscription_id, (pos).batch_no + 1, (pos).tick_id, till.tick_id, (pos).snapshot, till.snapshot,
           till.event_seq
      from gdq.subscription s
      join gdq.queue q using (queue_id)
     cross join lateral (select p as pos from gdq.position p
                          where p.subscription_id = s.subscription_id order by p.batch_no desc limit 1) latest
     cross join lateral gdq.next_tick(s.queue_id, pos, max_events) till
     where s.subscription_id = usual_batch.subscription_id
       and not q.paused
       and not exists (select from gdq.subscription_pause sp where sp.subscription_id = s.subscription_id)
       and not exists (select from gdq.member m where m.subscription_id = s.subscription_id)
       and not exists (select from gdq.subscription_resync r
                        where r.subscription_id = s.subscription_id and r.kind = 'cut')
       and not exists (select from gdq.retry_event r where r.subscription_id = s.subscription_id)
       and not exists (select from gdq.batch bb
                        where bb.subscription_id = s.subscription_id and bb.batch_no > (pos).batch_no)
       and not exists (select from gdq.queue u
                        where u.unlogged and not exists (select from gdq.log_marker m where m.queue_id = u.queue_id))
       and till.tick_id is not null
    returning * into b;
  return b;
end
$$;
comment on function gdq.usual_batch(integer, integer) is
  'Opens a new batch of a subscription where nothing stands against it.';

-- next_tick(queue_id, pos, max_events): the tick at which the batch after a position ends; NULL when there is none.
-- Writes: nothing.
create or replace function gdq.next_tick(queue_id integer, pos gdq.position, max_events integer) returns gdq.tick
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  till gdq.tick;
  -- a consumer that is far behind must not read all its ticks for every batch
  ticks_max constant integer := 1000;
begin
  -- A tick that was taken before the position but committed after it would lead backwards: it is passed over.
  select (t).* into till
    from (select t
            from gdq.tick t
           where t.queue_id = next_tick.queue_id
             and not t.refresh and t.tick_id > pos.tick_id and gdq.snapshot_le(pos.snapshot, t.snapshot)
           order by t.tick_id limit ticks_max) later(t)
   order by (t).event_seq - pos.event_seq > max_events,
            case when (t).event_seq - pos.event_seq > max_events then (t).tick_id else -(t).tick_id end
   limit 1;
  return till;
end
$$;
comment on function gdq.next_tick(integer, gdq.position, integer) is
  'The tick at which the batch after a position ends.';

-- create_batch(subscription_id, max_events): opens a new batch after the one opened last, up to a tick, with at most
-- max_events of the retries that are due; or with retries alone. NULL when there is neither. The caller has locked the
-- subscription. Writes: batch, retry_delivery.
create or replace function gdq.create_batch(subscription_id integer, max_events integer) returns gdq.batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  pos gdq.position := gdq.position_of(subscription_id);
  b gdq.batch;
  till gdq.tick;
  due bigint[];
begin
  -- other members may have batches open
  select * into b
    from gdq.batch bb
   where bb.subscription_id = create_batch.subscription_id and bb.batch_no > pos.batch_no
   order by bb.batch_no desc limit 1;
  if b.batch_id is not null then
    pos.batch_no := b.batch_no;
    pos.tick_id := b.tick_to;
    pos.snapshot := b.snapshot_to;
    pos.event_seq := b.event_seq;
  end if;
  till := gdq.next_tick((select s.queue_id from gdq.subscription s
                          where s.subscription_id = create_batch.subscription_id), pos, max_events);
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
comment on function gdq.create_batch(integer, integer) is
  'Opens a new batch of a subscription; NULL when there is nothing for it.';

-- held_batch(subscription_id, member, dead_after): the open batch that a worker must take up before a new one: its own,
-- else the oldest that no member holds, or whose member was not heard of for dead_after. Writes: nothing.
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
          or gdq.is_past(holder.granted_at, held_batch.dead_after)
          or not exists (select from gdq.member m
                          where m.subscription_id = held_batch.subscription_id and m.member_name = holder.member))
   order by holder.member is distinct from held_batch.member, b.batch_no limit 1;
  return held;
end
$$;
comment on function gdq.held_batch(integer, text, interval) is
  'The open batch that a worker must take up before a new one.';
