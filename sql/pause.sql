-- pause(queue, consumer): stops a queue (consumer NULL) or one of its consumers for the time being; capture goes on. A
-- paused queue takes no ticks and gives nobody batches; a paused consumer gets none, and its position and what comes
-- after it are held. A batch that was handed out before may still be finished.
-- Result: true; false when it was paused already. Writes: queue or subscription_pause. Errors: 42704; 55006 for the
-- consumer of a view.
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
    insert into gdq.subscription_pause (subscription_id) values (gdq.find_subscription(queue, consumer)) on conflict do nothing;
  end if;
  return found;
end
$$;
comment on function gdq.pause(text, text) is 'Stops ticks and batches of a queue, or batches of one consumer; false when it was paused.';

-- resume(queue, consumer): lets a queue (consumer NULL) or one of its consumers go on.
-- Result: true; false when it was not paused. Writes: queue or subscription_pause. Errors: 42704.
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
comment on function gdq.resume(text, text) is 'Lets a paused queue or consumer go on; false when it was not paused.';

-- check_pause(queue, consumer): error unless the session's role may pause a queue (consumer NULL; for administrators) or one
-- of its consumers. Writes: nothing. Errors: 42501, 42704.
create or replace function gdq.check_pause(queue text, consumer text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if consumer is not null then
    perform gdq.check_consumer_role(gdq.find_subscription(queue, consumer));
  elsif not gdq.is_administrator(gdq.invoker()) then
    raise exception 'only administrators pause a queue' using errcode = 'insufficient_privilege', hint = 'Pause a consumer, or GRANT gdq_admin.';
  end if;
end
$$;
comment on function gdq.check_pause(text, text) is 'Error 42501 unless the session may pause a queue or a consumer.';

-- queue_paused(queue_id): whether a queue is paused. Writes: nothing.
create or replace function gdq.queue_paused(queue_id integer) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (select q.paused from gdq.queue q where q.queue_id = queue_paused.queue_id);
end
$$;
comment on function gdq.queue_paused(integer) is 'Whether a queue is paused.';

-- refuse_paused(queue_id): error when a queue is paused. Writes: nothing. Errors: 55000.
create or replace function gdq.refuse_paused(queue_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if gdq.queue_paused(queue_id) then
    raise exception 'queue "%" is paused', (select q.queue_name from gdq.queue q where q.queue_id = refuse_paused.queue_id)
      using errcode = 'object_not_in_prerequisite_state', hint = 'gdq.resume() lets it go on.';
  end if;
end
$$;
comment on function gdq.refuse_paused(integer) is 'Error 55000 when a queue is paused.';

-- may_read(subscription_id): whether a subscription gets batches; false while it or its queue is paused.
-- Writes: nothing. Errors: GDQ03 when it must copy tables first.
create or replace function gdq.may_read(subscription_id integer) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  tables text;
  why text;
begin
  select string_agg(coalesce(gdq.table_name(c.relid), 'messages'), ', ' order by c.relid), max(c.reason)
    into tables, why from gdq.cut_tables(subscription_id) c;
  if tables is not null then
    raise exception 'consumer "%" must copy anew %: %',
      (select c.consumer_name from gdq.subscription s join gdq.consumer c using (consumer_id) where s.subscription_id = may_read.subscription_id), tables, why
      using errcode = 'GDQ03', hint = 'Copy each table at a snapshot and call gdq.resynced(), or register the consumer again and load afresh.';
  end if;
  return not gdq.queue_paused((select s.queue_id from gdq.subscription s where s.subscription_id = may_read.subscription_id))
     and not exists (select from gdq.subscription_pause sp where sp.subscription_id = may_read.subscription_id);
end
$$;
comment on function gdq.may_read(integer) is 'Whether a subscription gets batches; error GDQ03 when it must copy tables first.';
