-- start_tick(queue, tick_id): the tick of that number, if every change after it is still in the logs. The caller holds
-- lock_key('position'), so the horizon shows every truncation before, and later truncations see the caller's position.
-- Writes: nothing. Errors: 42704 for a tick that never was; GDQ02 when changes after the tick may be gone.
create or replace function gdq.start_tick(queue text, tick_id bigint) returns gdq.tick
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  t gdq.tick;
begin
  select * into t from gdq.tick tt where tt.tick_id = start_tick.tick_id and tt.queue_id = queue_of and not tt.refresh;
  if t.tick_id is null and tick_id >= (select min(tt.tick_id) from gdq.tick tt where tt.queue_id = queue_of) then
    raise exception 'queue "%" has no tick %', queue, tick_id
      using errcode = 'undefined_object', hint = 'Leave the tick out to start from now.';
  elsif t.tick_id is null
     or not gdq.snapshot_le((select h.snapshot from gdq.horizon h where h.queue_id = queue_of), t.snapshot) then
    raise exception 'changes after tick % of queue "%" are no longer all there', tick_id, queue
      using errcode = 'GDQ02', hint = 'Start from now, or set a retention for the queue.';
  end if;
  return t;
end
$$;
comment on function gdq.start_tick(text, bigint) is 'A tick from which every change is still there; else error GDQ02.';
