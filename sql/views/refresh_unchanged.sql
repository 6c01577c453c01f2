-- refresh_unchanged(views, positions, stamps, definitions, audited, group_name): refreshes views at once if there is
-- nothing to do for any of them, and notes that as a refresh of each. The consumers stay where they are; one that is
-- there for a minute is left to a whole refresh, as its position keeps logs from being dropped.
--   positions: those of the targets; NULL for a target that is to be looked at. stamps: view_stamp() before the last
--   refresh was planned. definitions: user_definitions() then; NULL where the query names nothing that users define.
--   audited: whether audits can compare the view. group_name: as for start_view_run(); a view in another
--   group is left to a whole refresh.
-- Result: true; false when a whole refresh is to look, which also says what is wrong: also while another refresh is at
-- work, and when an audit is due. Writes: view_run; what note_losses() and check_before_tick() write.
create or replace function gdq.refresh_unchanged(views text[], positions text[], stamps text[], definitions text[],
  audited boolean[], group_name text default null) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan
as $$
declare
  started timestamptz := clock_timestamp();
begin
  for number in 1 .. cardinality(views) loop
    if not exists (select from gdq.view v left join gdq.view_group g using (group_id)
                    where v.view_name = views[number]
                      and g.group_name is not distinct from refresh_unchanged.group_name)
       or not gdq.is_intact(views[number])
       or (select (c.changed = '{}' and c.stays) is not true
             from gdq.view_changes(views[number], positions[number], stamps[number], definitions[number],
                                   audited[number], true) c) then
      return false;
    end if;
  end loop;
  perform gdq.note_unchanged(views, positions, group_name, started);
  return true;
end
$$;
comment on function gdq.refresh_unchanged(text[], text[], text[], text[], boolean[], text) is
  'Refreshes views at once if there is nothing to do for them; else false.';
