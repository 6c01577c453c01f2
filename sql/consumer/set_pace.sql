-- set_pace(queue, consumer, pace): says how often a consumer needs a batch: not more than once in `pace`; NULL or 0: as
-- soon as there are changes, as a new consumer does. Ticks come ticker_max_lag apart, or farther if all consumers of
-- the queue have a longer pace: then they come at the shortest of these. What the consumer gets does not change.
-- Result: true; false when it was so already. Writes: subscription_pace. Errors: 42704; 42501 as for next_batch();
-- 22023 for a pace below 0.
create or replace function gdq.set_pace(queue text, consumer text, pace interval) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.own_subscription(queue, consumer);
begin
  if pace < interval '0' then
    raise exception 'a pace of % is below 0', pace using errcode = 'invalid_parameter_value';
  elsif coalesce(pace, '0') = interval '0' then
    delete from gdq.subscription_pace sp where sp.subscription_id = id;
  else
    insert into gdq.subscription_pace as sp (subscription_id, pace) values (id, set_pace.pace)
      on conflict (subscription_id) do update set pace = excluded.pace where sp.pace <> excluded.pace;
  end if;
  return found;
end
$$;
comment on function gdq.set_pace(text, text, interval) is 'Says how often a consumer needs a batch.';
