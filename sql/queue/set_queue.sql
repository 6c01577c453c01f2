-- set_queue(queue, ...): changes the settings of a queue for which a value is given; NULL leaves a setting as it is.
-- The settings are those of create_queue(); max_bytes 0 removes the limit. A change takes effect with the next tick,
-- batch or call of maintain().
-- Result: true; false when nothing changed. Writes: queue. Errors: 42704; 22023 for a value out of range.
create or replace function gdq.set_queue(queue text, ticker_max_count integer default null,
  ticker_max_lag interval default null, ticker_idle_period interval default null,
  rotation_period interval default null, rotation_bytes bigint default null, retention interval default null,
  max_bytes bigint default null) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  violated text;
  old gdq.queue;
  new gdq.queue;
begin
  select * into old from gdq.queue q where q.queue_id = queue_of for no key update;
  new := old;
  new.ticker_max_count := coalesce(set_queue.ticker_max_count, old.ticker_max_count);
  new.ticker_max_lag := coalesce(set_queue.ticker_max_lag, old.ticker_max_lag);
  new.ticker_idle_period := coalesce(set_queue.ticker_idle_period, old.ticker_idle_period);
  new.rotation_period := coalesce(set_queue.rotation_period, old.rotation_period);
  new.rotation_bytes := coalesce(set_queue.rotation_bytes, old.rotation_bytes);
  new.retention := coalesce(set_queue.retention, old.retention);
  new.max_bytes := nullif(coalesce(set_queue.max_bytes, old.max_bytes), 0);
  if new is not distinct from old then
    return false;
  end if;
  update gdq.queue q
     set ticker_max_count = new.ticker_max_count,
         ticker_max_lag = new.ticker_max_lag,
         ticker_idle_period = new.ticker_idle_period,
         rotation_period = new.rotation_period,
         rotation_bytes = new.rotation_bytes,
         retention = new.retention,
         max_bytes = new.max_bytes
   where q.queue_id = queue_of;
  return true;
exception when check_violation then
  get stacked diagnostics violated = constraint_name;
  raise exception 'setting % of queue "%" is out of range', substr(violated, 7), queue
    using errcode = 'invalid_parameter_value',
    hint = 'ticker_max_lag, retention and max_bytes may be 0; every other setting must be greater. '
           'Intervals are at most 1000 years.';
end
$$;
comment on function gdq.set_queue(text, integer, interval, interval, interval, bigint, interval, bigint) is
  'Changes settings of a queue; false when nothing changed.';
