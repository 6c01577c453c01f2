-- begin_compiled_load(view): begins to load the target of a view in full, after begin_compiled_refresh() in the same
-- transaction. Writes: nothing. Errors: 55P03 while another refresh is at work; 55000 for a queue that is paused, and
-- for a view that gdq refresh must look at first; 42501.
create or replace function gdq.begin_compiled_load(view text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.view := gdq.view_of_owner(view);
  compiled gdq.compiled_view := (select c from gdq.compiled_view c where c.view_id = v.view_id);
  id integer;
  hidden text;
begin
  if not pg_try_advisory_xact_lock(gdq.lock_key('view', v.view_id::oid)) then
    raise exception 'view "%" is being refreshed by another session', view
      using errcode = 'lock_not_available', hint = 'Wait for it, and call again.';
  end if;
  id := gdq.own_subscription((select q.queue_name from gdq.queue q where q.queue_id = v.queue_id), v.consumer_name);
  perform gdq.require_member(id, null);
  perform gdq.refuse_paused(v.queue_id);
  select t.relid::text into hidden from gdq.subscribed_tables(id) t join pg_class c on c.oid = t.relid
    where c.relrowsecurity limit 1;
  if hidden is not null or gdq.view_stamp(view) is distinct from compiled.stamp
     or gdq.user_definitions() <> compiled.definitions then
    raise exception 'a table, a function or an option of view "%" has changed since gdq has looked at it', view
      using errcode = 'object_not_in_prerequisite_state', hint = format('gdq refresh %s looks again.', view);
  end if;
end
$$;
comment on function gdq.begin_compiled_load(text) is 'Begins to load the target of a view in full.';
