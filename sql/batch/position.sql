-- position(queue, consumer): the position of a consumer as text, to be kept outside the server; check_position() reads
-- it. Writes: nothing. Errors: 42704, 42501, GDQ07.
create or replace function gdq.position(queue text, consumer text) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  pos gdq.position := gdq.position_of(gdq.own_subscription(queue, consumer));
begin
  return gdq.position_text(gdq.find_queue(queue), pos.tick_id, pos.snapshot);
end
$$;
comment on function gdq.position(text, text) is 'The position of a consumer as text, to be kept outside the server.';

-- position_text(queue_id, tick_id, snapshot): a position as text: kind, era, tick, nonce and snapshot. A client only
-- keeps it, and never takes it apart. NULL when the tick is gone. Writes: nothing.
create or replace function gdq.position_text(queue_id integer, tick_id bigint, snapshot pg_snapshot) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  -- era_of() in the same query: every refresh comes here
  return (
    select format('queue/%s/%s/%s/%s',
                  (select e.era
                     from (select ee.era, ee.written_by = ee.xmin and ee.written_in = 'gdq.era'::regclass as own
                             from gdq.era ee
                            where ee.queue_id = position_text.queue_id order by ee.era_no desc limit 1) e
                    where own),
                  t.tick_id, t.nonce, position_text.snapshot)
      from gdq.tick t
     where t.tick_id = position_text.tick_id);
end
$$;
comment on function gdq.position_text(integer, bigint, pg_snapshot) is
  'A position as text, to be kept outside the server.';
