-- force_tick(queue): takes a tick of a queue now, whether it is due or not. Result: the tick's id. Writes: tick,
-- sequence_tick. Errors: 42704, GDQ04; 55000 as make_tick(), and while the queue is paused.
create or replace function gdq.force_tick(queue text) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform gdq.refuse_paused(gdq.find_queue(queue));
  return gdq.make_tick(gdq.find_queue(queue));
end
$$;
comment on function gdq.force_tick(text) is 'Takes a tick now; returns its id.';
