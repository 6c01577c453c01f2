-- is_intact(view): whether, by now, no log of a view's queue was emptied by a crash, and capture followed all DDL. What
-- had not been noted is noted first. Writes: what note_losses() and check_before_tick() write. Errors: 42704; 55000.
create or replace function gdq.is_intact(view text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue text := (select q.queue_name from gdq.view v join gdq.queue q using (queue_id) where v.view_name = view);
begin
  perform gdq.require_read_committed('a refresh');
  return gdq.note_losses(queue) = 0 and gdq.check_before_tick(gdq.find_queue(queue)) = 0;
end
$$;
comment on function gdq.is_intact(text) is
  'Whether no log of a view''s queue was emptied by a crash, and capture followed all DDL.';
