-- pause(queue, consumer): pauses a queue (consumer NULL) or one of its consumers; capture goes on. A paused queue takes
-- no ticks and hands out no batches. A paused consumer gets no batches; rows after its position are kept. A batch that
-- was handed out before may still be finished.
-- Result: true; false when it was paused already. Writes: queue or subscription_pause. Errors: 42704; 42501; 55006 for
-- the consumer of a view.
create or replace function gdq.pause(queue text, consumer text default null) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
begin
  perform gdq.check_pause(queue, consumer);
  if consumer is null then
    update gdq.queue q set paused = true where q.queue_id = queue_of and not q.paused;
  else
    perform gdq.refuse_view_consumer(queue_of, consumer, 'leave it unrefreshed instead');
    insert into gdq.subscription_pause (subscription_id) values (gdq.find_subscription(queue, consumer))
      on conflict do nothing;
  end if;
  return found;
end
$$;
comment on function gdq.pause(text, text) is
  'Pauses a queue or one of its consumers; false when it was paused already.';

-- check_pause(queue, consumer): error unless the session's role may pause a queue (consumer NULL: only administrators
-- may) or one of its consumers. Writes: nothing. Errors: 42501, 42704.
create or replace function gdq.check_pause(queue text, consumer text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if consumer is not null then
    perform gdq.check_consumer_role(gdq.find_subscription(queue, consumer));
  elsif not gdq.is_administrator(gdq.invoker()) then
    raise exception 'only administrators pause a queue'
      using errcode = 'insufficient_privilege', hint = 'Pause a consumer, or GRANT gdq_admin.';
  end if;
end
$$;
comment on function gdq.check_pause(text, text) is 'Error 42501 unless the session may pause a queue or a consumer.';
