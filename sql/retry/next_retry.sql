-- next_retry(queue, consumer): the time at which the next waiting retry of a consumer is due; NULL when none waits.
-- Writes: nothing. Errors: 42704, 42501.
create or replace function gdq.next_retry(queue text, consumer text) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  -- not own_subscription(): a time reveals no data, and next_batch() checks the right to read the tables
  id integer := gdq.usable_subscription(queue, consumer);
begin
  return (select r.due_at from gdq.waiting_retries(id, 'infinity', 1) r);
end
$$;
comment on function gdq.next_retry(text, text) is 'The time at which the next retry of a consumer is due.';
