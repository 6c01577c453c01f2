-- compiled_views(view, group_name, waits): the functions that CALL gdq.refresh() may run: of a view that is in no group
-- or, if view is NULL, of the views of a group, by name. waits: whether to wait two seconds for another refresh to end.
-- Result: one row (view_name, compiled, locks) for each view; locks: the LOCK TABLE statements that come first.
-- Writes: what note_losses() and check_before_tick() write. Errors: 42704; 42501; 55000; 55P03.
create or replace function gdq.compiled_views(view text, group_name text, waits boolean)
  returns table (view_name text, compiled gdq.compiled_view, locks text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v gdq.view;
begin
  for view_name in select compiled_views.view where view is not null
                    union all
                   (select v.view_name from gdq.view v join gdq.view_group g using (group_id)
                     where g.group_name = compiled_views.group_name order by v.view_name) loop
    v := gdq.view_of_owner(view_name);
    compiled := (select c from gdq.compiled_view c where c.view_id = v.view_id);
    if compiled.view_id is null then
      raise exception 'view "%" has no functions that refresh it', view_name
        using errcode = 'object_not_in_prerequisite_state',
              hint = format('gdq refresh %s makes them, if it has engine postgres and its target in this database.',
                            view_name);
    elsif v.group_id is not null and group_name is null then
      raise exception 'view "%" is refreshed with its group only', view_name
        using errcode = 'object_not_in_prerequisite_state',
              hint = (select format('CALL gdq.refresh_group(%L)', g.group_name)
                        from gdq.view_group g where g.group_id = v.group_id);
    end if;
    perform gdq.refuse_paused(v.queue_id);
    if waits then
      perform gdq.lock_view(view_name, true);
    end if;
    -- what was lost or not captured is noted now; the refresh sees that it was
    perform gdq.is_intact(view_name);
    locks := compiled.locks;
    return next;
  end loop;
  if view_name is null then
    raise exception 'group "%" does not exist', group_name using errcode = 'undefined_object';
  end if;
end
$$;
comment on function gdq.compiled_views(text, text, boolean) is 'The functions that CALL gdq.refresh() may run.';
