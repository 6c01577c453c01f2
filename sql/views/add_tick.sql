-- add_tick(queue, snapshot): stores the snapshot of a refresh as a tick. A position that is kept outside the database
-- contains the tick's id and nonce, so that a server that has lost its latest transactions is recognised. next_batch()
-- does not stop at such a tick.
-- Result: one row (tick_id, nonce). Writes: tick. Errors: 42704, GDQ04; 55000 for a snapshot from the future.
create or replace function gdq.add_tick(queue text, snapshot pg_snapshot) returns table (tick_id bigint, nonce uuid)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  queue_of integer := gdq.find_queue(queue);
begin
  perform gdq.require_read_committed('add_tick');
  if not gdq.snapshot_le(add_tick.snapshot, pg_current_snapshot()) then
    raise exception 'snapshot % is later than the server''s %', add_tick.snapshot, pg_current_snapshot()
      using errcode = 'object_not_in_prerequisite_state';
  end if;
  return query
    insert into gdq.tick (queue_id, snapshot, event_seq, refresh)
      values (queue_of, add_tick.snapshot, gdq.last_event(queue_of), true)
      returning tick.tick_id, tick.nonce;
end
$$;
comment on function gdq.add_tick(text, pg_snapshot) is
  'Stores the snapshot of a refresh as a tick; returns its id and nonce.';
