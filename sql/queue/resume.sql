-- resume(queue, consumer): ends the pause of a queue (consumer NULL) or of one of its consumers.
-- Result: true; false when it was not paused. Writes: queue or subscription_pause. Errors: 42704, 42501.
create or replace function gdq.resume(queue text, consumer text default null) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform gdq.check_pause(queue, consumer);
  if consumer is null then
    update gdq.queue q set paused = false where q.queue_id = gdq.find_queue(queue) and q.paused;
  else
    delete from gdq.subscription_pause sp where sp.subscription_id = gdq.find_subscription(queue, consumer);
  end if;
  return found;
end
$$;
comment on function gdq.resume(text, text) is 'Ends the pause of a queue or consumer; false when it was not paused.';
