-- set_retry_limit(queue, consumer, retries): sets how often an event of a consumer is retried before it becomes a dead
-- letter; 10 unless set. Writes: retry_limit. Errors: 42704; 42501; 22023 for NULL or less than 0.
create or replace function gdq.set_retry_limit(queue text, consumer text, retries integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if retries is null or retries < 0 then
    raise exception 'a retry limit is a number, 0 or more' using errcode = 'invalid_parameter_value';
  end if;
  insert into gdq.retry_limit as l (subscription_id, retries)
    values (gdq.own_subscription(queue, consumer), set_retry_limit.retries)
    on conflict (subscription_id) do update set retries = excluded.retries;
end
$$;
comment on function gdq.set_retry_limit(text, text, integer) is
  'Sets how often an event is retried before it becomes a dead letter.';
