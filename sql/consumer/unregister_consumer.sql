-- unregister_consumer(queue, consumer): removes a consumer and its position from a queue. Result: true; false when
-- there was none. Writes: deletes the subscription, and the consumer with its last subscription. Errors: 42704 for the
-- queue; 55006 for the consumer of a view; 42501 for the consumer of another role.
create or replace function gdq.unregister_consumer(queue text, consumer text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
begin
  perform gdq.refuse_view_consumer(queue_of, consumer, 'drop the view');
  perform gdq.check_consumer_role(s.subscription_id)
     from gdq.subscription s join gdq.consumer c using (consumer_id)
    where s.queue_id = queue_of and c.consumer_name = consumer;
  -- a registration of the same consumer on another queue may be under way: wait for it before the name is deleted
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
comment on function gdq.unregister_consumer(text, text) is
  'Removes a consumer from a queue; false when there was none.';
