-- compiled_views(view, group_name, waits): the functions that CALL gdq.refresh() may run: of a view that is in no group
-- or, if view is NULL, of the views of a group, by name. waits: whether to wait two seconds for another refresh to end.
-- Result: one row (view_name, compiled, locks) for each view; locks: the LOCK TABLE statement for its tables and logs.
-- Writes: what note_losses() and check_before_tick() write. Errors: 42704; 42501; 55000; 55P03.
create or replace function gdq.compiled_views(view text, group_name text, waits boolean)
  returns table (view_name text, compiled gdq.compiled_view, locks text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  names text[] := array[view];
  name_of text;
  known record;
  waited boolean;
begin
  if view is null then
    names := array(select v.view_name from gdq.view v join gdq.view_group g using (group_id)
                    where g.group_name = compiled_views.group_name order by v.view_name);
  end if;
  foreach name_of in array names loop
    if current_setting('transaction_isolation') <> 'read committed' or pg_is_in_recovery() then
      perform gdq.require_read_committed('a refresh');
    end if;
    -- what the functions below find, in one query
    select c as row, s.owner_role as owner, v.group_id, v.queue_id, q.paused,
           (select e.written_by = e.xmin and e.written_in = 'gdq.era'::regclass from gdq.era e
             where e.queue_id = q.queue_id order by e.era_no desc limit 1)
           and not exists (select from gdq.queue u
                            where u.unlogged
                              and not exists (select from gdq.log_marker m where m.queue_id = u.queue_id))
           and (select k.settled from gdq.alarm_check k order by k.check_id desc limit 1)
               = (select case when a.is_called then a.last_value else 0 end from gdq.alarm a)
           and gdq.event_triggers_on() as intact
      into known
      from gdq.view v
      join gdq.queue q using (queue_id)
      join gdq.consumer n on n.consumer_name = v.consumer_name
      join gdq.subscription s on s.queue_id = v.queue_id and s.consumer_id = n.consumer_id
      left join gdq.compiled_view c using (view_id)
     where v.view_name = name_of;
    if known.owner is distinct from gdq.invoker() then
      perform gdq.view_of_owner(name_of);
    end if;
    compiled := known.row;
    if compiled.view_id is null then
      raise exception 'view "%" has no functions that refresh it', name_of
        using errcode = 'object_not_in_prerequisite_state',
              hint = format('gdq refresh %s makes them, if it has engine postgres and its target in this database.',
                            name_of);
    elsif known.group_id is not null and group_name is null then
      raise exception 'view "%" is refreshed with its group only', name_of
        using errcode = 'object_not_in_prerequisite_state',
              hint = (select format('CALL gdq.refresh_group(%L)', g.group_name)
                        from gdq.view_group g where g.group_id = known.group_id);
    end if;
    if known.paused then
      perform gdq.refuse_paused(known.queue_id);
    end if;
    waited := waits and not pg_try_advisory_xact_lock(gdq.lock_key('view', compiled.view_id::oid));
    if waited then
      perform gdq.lock_view(name_of, true);
    end if;
    if waited or known.intact is not true then
      -- what was lost or not captured is noted now; the refresh sees that it was
      perform gdq.is_intact(name_of);
    end if;
    view_name := name_of;
    locks := compiled.locks;
    return next;
  end loop;
  if view_name is null then
    raise exception 'group "%" does not exist', group_name using errcode = 'undefined_object';
  end if;
end
$$;
comment on function gdq.compiled_views(text, text, boolean) is 'The functions that CALL gdq.refresh() may run.';
