-- register_consumer(queue, consumer, at_tick, tables, skip_origin): a consumer that gets every change after a tick.
--   at_tick: an existing tick; NULL: a tick taken now. tables: the captured tables that it takes; NULL: all, also those
--   that are added later. It belongs to the session's role, which must be allowed to read these tables.
--   skip_origin: it gets no changes of these origins, see add_table().
-- Result: true; false when it was registered already (and is left as it is).
-- Writes: consumer, subscription, subscription_table, position, tick. Errors: 42704; GDQ02 when the tick's changes may
-- be gone already; GDQ04; 42501.
create or replace function gdq.register_consumer(queue text, consumer text, at_tick bigint default null, tables regclass[] default null,
  skip_origin text[] default null)
  returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  start_tick gdq.tick;
  id integer;
  tbl regclass;
begin
  perform gdq.require_read_committed('register_consumer');
  if consumer is null or octet_length(consumer) not between 1 and 63 then
    raise exception 'a consumer name has 1 to 63 bytes' using errcode = 'invalid_parameter_value';
  end if;
  -- Truncation takes the same lock: a position is either seen by it, or checked against what it has truncated.
  perform pg_advisory_xact_lock(gdq.lock_key('position', queue_of));
  if exists (select from gdq.subscription s join gdq.consumer c using (consumer_id)
              where s.queue_id = queue_of and c.consumer_name = consumer) then
    return false;
  end if;
  start_tick := gdq.start_tick(queue, coalesce(at_tick, gdq.make_tick(queue_of)));
  insert into gdq.consumer (consumer_name) values (consumer) on conflict do nothing;
  insert into gdq.subscription (queue_id, consumer_id, all_tables, owner_role, skip_origin)
    select queue_of, c.consumer_id, tables is null, gdq.invoker(), nullif(skip_origin, '{}') from gdq.consumer c where c.consumer_name = consumer
    returning subscription_id into id;
  foreach tbl in array coalesce(tables, '{}') loop
    insert into gdq.subscription_table values (id, gdq.find_table(queue, tbl)) on conflict do nothing;
  end loop;
  insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
    values (id, 0, start_tick.tick_id, start_tick.snapshot, start_tick.event_seq);
  perform gdq.check_consumer_tables(id);
  return true;
end
$$;
comment on function gdq.register_consumer(text, text, bigint, regclass[], text[]) is 'Registers a consumer on a queue from a tick or from now on; false when it was registered.';

-- unregister_consumer(queue, consumer): forgets a consumer and its position. Result: true; false when there was none.
-- Writes: deletes the subscription, and the consumer with its last one. Errors: 42704 for the queue; 55006 for the
-- consumer of a view; 42501 for the consumer of another role.
create or replace function gdq.unregister_consumer(queue text, consumer text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
begin
  perform gdq.refuse_view_consumer(queue_of, consumer, 'drop the view');
  perform gdq.check_consumer_role(s.subscription_id)
     from gdq.subscription s join gdq.consumer c using (consumer_id) where s.queue_id = queue_of and c.consumer_name = consumer;
  -- a registration on another queue at this moment holds the name
  perform from gdq.consumer c where c.consumer_name = consumer for update;
  delete from gdq.subscription s using gdq.consumer c
   where s.queue_id = queue_of and s.consumer_id = c.consumer_id and c.consumer_name = consumer;
  if not found then
    return false;
  end if;
  delete from gdq.consumer c
   where c.consumer_name = consumer and not exists (select from gdq.subscription s where s.consumer_id = c.consumer_id);
  return true;
end
$$;
comment on function gdq.unregister_consumer(text, text) is 'Forgets a consumer of a queue; false when there was none.';

-- position_of(subscription_id): where a subscription stands. Writes: nothing. Errors: 55000 when it has no position:
-- that is never read as "from the start".
create or replace function gdq.position_of(subscription_id integer) returns gdq.position
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  pos gdq.position;
begin
  select * into pos from gdq.position p where p.subscription_id = position_of.subscription_id order by p.batch_no desc limit 1;
  if pos.batch_no is null then
    raise exception 'subscription % has no position', subscription_id using errcode = 'object_not_in_prerequisite_state';
  end if;
  return pos;
end
$$;
comment on function gdq.position_of(integer) is 'The current position of a subscription.';

-- subscribed_tables(subscription_id): the captured tables that a subscription takes. Writes: nothing.
create or replace function gdq.subscribed_tables(subscription_id integer) returns setof gdq.captured_table
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select ct.*
      from gdq.subscription s join gdq.captured_table ct using (queue_id)
     where s.subscription_id = subscribed_tables.subscription_id
       and (s.all_tables or exists (select from gdq.subscription_table st
                                     where st.subscription_id = s.subscription_id and st.table_id = ct.table_id));
end
$$;
comment on function gdq.subscribed_tables(integer) is 'The captured tables that a subscription takes.';
