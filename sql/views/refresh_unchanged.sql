-- refresh_unchanged(views, positions, stamps, definitions, audited, group_name): refreshes views at once if there is
-- nothing to do for any of them, and notes that as a refresh of each. The consumers stay where they are; one that is
-- there for a minute is left to a whole refresh, as its position keeps logs from being dropped.
--   positions: those of the targets; NULL for a target that is to be looked at. stamps: view_stamp() before the last
--   refresh was planned. definitions: user_definitions() then; NULL where the query names nothing that users define.
--   audited: whether audits can compare the view. group_name: as for start_view_run().
-- Result: true; false when a whole refresh is to look, which also says what is wrong: also while another refresh is at
-- work, and when an audit is due. Writes: view_run; what note_losses() and check_before_tick() write.
create or replace function gdq.refresh_unchanged(views text[], positions text[], stamps text[], definitions text[],
  audited boolean[], group_name text default null) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  started timestamptz := clock_timestamp();
  seen pg_snapshot := pg_current_snapshot();
begin
  for number in 1 .. cardinality(views) loop
    if gdq.is_unchanged(views[number], positions[number], stamps[number], definitions[number], audited[number])
       is not true then
      return false;
    end if;
  end loop;
  insert into gdq.view_run (view_id, group_name, started_at, finished_at, action, kind, rows_changed, delta_rows,
                            rows_read, work_seconds, snapshot_from, snapshot_to)
    select v.view_id, refresh_unchanged.group_name, started, clock_timestamp(), 'none', 'none', 0, 0, 0, 0,
           split_part(n.at, '/', 5)::pg_snapshot, seen
      from unnest(views, positions) n(name, at) join gdq.view v on v.view_name = n.name;
  return true;
end
$$;
comment on function gdq.refresh_unchanged(text[], text[], text[], text[], boolean[], text) is
  'Refreshes views at once if there is nothing to do for them; else false.';

-- is_unchanged(view, position, stamp, definitions, audited): whether a whole refresh of a view would find nothing to
-- do, by now; false when in doubt. The view stays locked until the transaction ends. Writes: what note_losses() and
-- check_before_tick() write.
create or replace function gdq.is_unchanged(view text, "position" text, stamp text, definitions text, audited boolean)
  returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v record;
  who name;
  id integer;
  pos gdq.position;
begin
  select vv.*, q.queue_name into v from gdq.view vv join gdq.queue q using (queue_id) where vv.view_name = view;
  if "position" is null or v.view_id is null or v.diverged is not null
     or (audited and coalesce(v.audit_share > 0, v.audit_credit >= v.audit_need))
     or not pg_try_advisory_xact_lock(gdq.lock_key('view', v.view_id::oid)) then
    return false;
  end if;
  perform gdq.require_read_committed('a refresh');
  who := gdq.invoker();
  id := gdq.own_subscription(v.queue_name, v.consumer_name);
  perform gdq.require_member(id, null);
  -- the logs before the position, so that nothing later can have been dropped; and early, as they change most often
  if gdq.queue_paused(v.queue_id) or gdq.note_losses(v.queue_name) > 0 or gdq.check_before_tick(v.queue_id) > 0 then
    return false;
  elsif gdq.changed_since(id, split_part("position", '/', 5)::pg_snapshot) is not false then
    return false;
  elsif gdq.view_stamp(view) is distinct from stamp then
    return false;
  elsif definitions is not null and gdq.user_definitions() <> definitions then
    return false;
  elsif exists (select from gdq.subscribed_tables(id) t left join pg_class c on c.oid = t.relid
                 where c.relrowsecurity is not false
                    or not has_table_privilege(who, t.relid, 'select')
                    or gdq.capture_state(t.queue_id, t.relid) in ('disarmed', 'dropped')) then
    return false;
  end if;
  pos := gdq.position_of(id);
  return "position" = gdq.position_text(v.queue_id, pos.tick_id, pos.snapshot)
     and exists (select from gdq.tick t
                  where t.tick_id = pos.tick_id and t.created_at > clock_timestamp() - interval '1 minute');
exception when others then
  return false;  -- a whole refresh tells
end
$$;
comment on function gdq.is_unchanged(text, text, text, text, boolean) is
  'Whether a whole refresh of a view would find nothing to do.';
