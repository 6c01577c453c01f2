-- set_position(queue, consumer, token, snapshot): ends a refresh: moves its consumer to the snapshot that the target
-- holds, so that rows before it are no longer kept. Writes: position, subscription_resync. Errors: 42704; 42501; GDQ01
-- for a stale token; 22023 when the snapshot lies before the position, or in the future; GDQ04.
create or replace function gdq.set_position(queue text, consumer text, token uuid, snapshot pg_snapshot) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.lock_subscription(queue, consumer);
  pos gdq.position := gdq.position_of(id);
  b gdq.batch;
begin
  select * into b from gdq.batch bb where bb.subscription_id = id and bb.batch_no = pos.batch_no + 1;
  b := gdq.open_batch(b.batch_id, token);
  if not gdq.snapshot_le(pos.snapshot, snapshot) or not gdq.snapshot_le(snapshot, pg_current_snapshot()) then
    raise exception 'snapshot % does not lie between the position % and now', snapshot, pos.snapshot
      using errcode = 'invalid_parameter_value';
  end if;
  -- the refresh's own tick: the target names it, and rotate_control() keeps ticks that a position names
  insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
    select id, b.batch_no, coalesce(max(t.tick_id), pos.tick_id), set_position.snapshot,
           coalesce(max(t.event_seq), pos.event_seq)
      from gdq.tick t
     where t.queue_id = gdq.find_queue(queue) and t.refresh
       and t.snapshot::text = set_position.snapshot::text and t.tick_id >= pos.tick_id;
  -- a refresh that found its changes gone has loaded in full
  insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot)
    select id, c.relid, 'copied', set_position.snapshot from gdq.cut_tables(id) c;
end
$$;
comment on function gdq.set_position(text, text, uuid, pg_snapshot) is
  'Ends a refresh: moves its consumer to the snapshot that the target holds.';
