-- is_past(since, age): whether a stored time is as old as age, by the clock. A time in the future was stored before the
-- clock was set back: it counts as past, or what waits for it would wait for as long. An age above 1000 years counts as
-- that: the time so long ago may not exist. Writes: nothing.
create or replace function gdq.is_past(since timestamptz, age interval) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return since <= clock_timestamp() - least(greatest(age, interval '0'), interval '1000 years')
         or since > clock_timestamp();
end
$$;
comment on function gdq.is_past(timestamptz, interval) is 'Whether a stored time is as old as an age.';
