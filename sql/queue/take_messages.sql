-- take_messages(queue, consumer): lets a consumer that takes certain tables get the queue's messages too, from its next
-- batch on. Call it where the consumer is registered. A consumer of all tables always gets them. Result: true; false
-- when it gets them already.
-- Writes: subscription_messages. Errors: 42704; 42501; 55006 while the consumer has an open batch, which must not
-- change; GDQ04.
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
  'Lets a consumer of certain tables get the queue''s messages too; false when it gets them already.';
