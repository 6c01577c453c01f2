-- force_tick(queue): a tick now, due or not. Result: its id. Writes: tick. Errors: 42704, GDQ04; 55000, also while the
-- queue is paused.
create or replace function gdq.force_tick(queue text) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform gdq.refuse_paused(gdq.find_queue(queue));
  return gdq.make_tick(gdq.find_queue(queue));
end
$$;
comment on function gdq.force_tick(text) is 'Takes a tick now; returns its id.';
