-- next_retry(queue, consumer): when the next waiting retry of a consumer is due; NULL when none waits. Writes: nothing.
-- Errors: 42704, 42501.
create or replace function gdq.next_retry(queue text, consumer text) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.find_subscription(queue, consumer);
begin
  -- a time is no data: a role that may no longer read the tables gets its error from next_batch()
  perform gdq.check_consumer_role(id);
  return (select r.due_at from gdq.waiting_retries(id, 'infinity', 1) r);
end
$$;
comment on function gdq.next_retry(text, text) is 'When the next retry of a consumer is due.';
