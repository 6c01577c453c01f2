-- find_queue(queue): the id of a queue. Nearly every function asks here first, so that none touches a queue that waits for
-- its rebase. Writes: nothing. Errors: 42704 when there is none of that name; GDQ07.
create or replace function gdq.find_queue(queue text) returns integer
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
begin
  select q.queue_id into id from gdq.queue q where q.queue_name = queue;
  if id is null then
    raise exception 'queue "%" does not exist', queue
      using errcode = 'undefined_object', hint = 'List the queues with gdq.queue_info(), make one with gdq.create_queue().';
  end if;
  perform gdq.require_era(id);
  return id;
end
$$;
comment on function gdq.find_queue(text) is 'Id of a queue by name; error 42704 when there is none.';

-- find_table(queue, tbl): the id of a captured table of a queue. Writes: nothing. Errors: 42704.
create or replace function gdq.find_table(queue text, tbl regclass) returns integer
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
  queue_of integer := gdq.find_queue(queue);
begin
  select ct.table_id into id from gdq.captured_table ct where ct.queue_id = queue_of and ct.relid = tbl;
  if id is null then
    raise exception 'table % is not captured by queue "%"', tbl, queue
      using errcode = 'undefined_object', hint = 'Add it with gdq.add_table().';
  end if;
  return id;
end
$$;
comment on function gdq.find_table(text, regclass) is 'Id of a captured table of a queue; error 42704 when the queue does not capture it.';

-- find_subscription(queue, consumer): the id of a subscription. Writes: nothing. Errors: 42704.
create or replace function gdq.find_subscription(queue text, consumer text) returns integer
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
  queue_of integer := gdq.find_queue(queue);
begin
  select s.subscription_id into id
    from gdq.subscription s join gdq.consumer c using (consumer_id)
   where s.queue_id = queue_of and c.consumer_name = consumer;
  if id is null then
    raise exception 'consumer "%" is not registered on queue "%"', consumer, queue
      using errcode = 'undefined_object', hint = 'Register it with gdq.register_consumer().';
  end if;
  return id;
end
$$;
comment on function gdq.find_subscription(text, text) is 'Id of a subscription; error 42704 when the consumer is not registered on the queue.';
