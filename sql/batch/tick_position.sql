-- tick_position(queue, tick_id): the position, as text, of a consumer that has read everything up to a tick; NULL when
-- there is no such tick. Writes: nothing. Errors: 42704, GDQ07.
create or replace function gdq.tick_position(queue text, tick_id bigint) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
begin
  return (
    select gdq.position_text(queue_of, t.tick_id, t.snapshot)
      from gdq.tick t
     where t.tick_id = tick_position.tick_id and t.queue_id = queue_of);
end
$$;
comment on function gdq.tick_position(text, bigint) is
  'The position, as text, of a consumer that has read everything up to a tick.';
