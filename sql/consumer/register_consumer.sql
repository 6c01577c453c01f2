-- register_consumer(queue, consumer, at_tick, tables, skip_origin): registers a consumer, which gets every change after
-- a tick. The consumer belongs to the session's role, which must be allowed to read the consumer's tables.
--   at_tick: an existing tick; NULL: a tick taken now. tables: the captured tables that the consumer takes; NULL: all,
--   also tables that are added later. skip_origin: origins whose changes the consumer does not get, see add_table().
-- Result: true; false when the consumer was registered already; it is then left as it is.
-- Writes: consumer, subscription, subscription_table, position, tick. Errors: 42704; 22023 for a bad name; GDQ02 when
-- changes after the tick may be gone already; GDQ04; 42501.
create or replace function gdq.register_consumer(queue text, consumer text, at_tick bigint default null,
  tables regclass[] default null,
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
  -- Truncation takes the same lock: it sees the new position, or has raised the horizon that start_tick() checks.
  perform pg_advisory_xact_lock(gdq.lock_key('position', queue_of));
  if exists (select from gdq.subscription s join gdq.consumer c using (consumer_id)
              where s.queue_id = queue_of and c.consumer_name = consumer) then
    return false;
  end if;
  start_tick := gdq.start_tick(queue, coalesce(at_tick, gdq.make_tick(queue_of)));
  insert into gdq.consumer (consumer_name) values (consumer) on conflict do nothing;
  insert into gdq.subscription (queue_id, consumer_id, all_tables, owner_role, skip_origin)
    select queue_of, c.consumer_id, tables is null, gdq.invoker(), nullif(skip_origin, '{}')
      from gdq.consumer c where c.consumer_name = consumer
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
comment on function gdq.register_consumer(text, text, bigint, regclass[], text[]) is
  'Registers a consumer on a queue, from a tick or from now on; false when it was registered already.';
