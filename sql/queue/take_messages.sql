-- take_messages(queue, consumer): lets a consumer of certain tables have the queue's messages too; one of all tables
-- always does. From its next batch on: call it where the consumer is registered. Result: true; false when it has them
-- already.
-- Writes: subscription_messages. Errors: 42704; 55006 while it has a batch, which must not change; GDQ04.
create or replace function gdq.take_messages(queue text, consumer text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.lock_subscription(queue, consumer);
begin
  if (select s.all_tables from gdq.subscription s where s.subscription_id = id) then
    return false;
  elsif exists (select from gdq.batch b
                 where b.subscription_id = id and b.batch_no > (gdq.position_of(id)).batch_no) then
    raise exception 'consumer "%" of queue "%" has a batch open', consumer, queue using errcode = 'object_in_use',
      hint = 'Finish the batch first.';
  end if;
  insert into gdq.subscription_messages (subscription_id) values (id) on conflict do nothing;
  return found;
end
$$;
comment on function gdq.take_messages(text, text) is
  'Lets a consumer of certain tables have the queue''s messages too.';
