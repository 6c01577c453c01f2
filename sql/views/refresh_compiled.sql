-- refresh_compiled(view, compiled, load, group_name): what CALL gdq.refresh() does in its transaction of REPEATABLE
-- READ, after its locks, with the rights of the session: the view's owner's. compiled: as compiled_views() gave it.
-- load: as for refresh(). group_name: the group that is refreshed.
-- Result, writes and errors: as refresh().
create or replace function gdq.refresh_compiled(view text, compiled gdq.compiled_view, load boolean,
  group_name text default null, out action text, out reason text, out rows_changed bigint, out delta_rows bigint,
  out kind text)
language plpgsql volatile set search_path = pg_catalog, pg_temp set row_security = off
  set plan_cache_mode = force_generic_plan
as $$
declare
  started timestamptz := clock_timestamp();
  place text;
  looked oid[];
  since record;
  rows_read bigint;
  -- what has no load has a refresh that finds statistics first
  most bigint := case when load then 100000 else 10000 end;
  few bigint;
  kept jsonb;
  moved text;
begin
  place := gdq.target_position(view, compiled);
  if place is not null then
    begin
      execute 'select ' || compiled.look || '($1)' into looked using split_part(place, '/', 5)::pg_snapshot;
    exception when undefined_table then
      null;  -- a log is gone, which another look tells
    end;
  end if;
  since := gdq.begin_compiled_refresh(view, compiled, place, compiled.auditable and not load, group_name, looked);
  if since.segments = '{}' then
    action := 'none';
    kind := 'none';
    rows_changed := 0;
    delta_rows := 0;
    if since.stays then
      return;
    end if;
  end if;
  kept := case when compiled.kept_at = place then compiled.kept end;
  -- up to a thousand changes by a plan that the session keeps, unless they bring too many rows; more by a plan for so
  -- many
  foreach few in array array[1000, 0] loop
    exit when since.segments is null or compiled.changes is null or action = 'none';
    begin
      reason := null;
      execute 'select c.* from ' || compiled.changes || '($1, $2, $3, $4, $5, $6) c'
        into kept, delta_rows, rows_changed, rows_read, kind
        using since.xmax, since.running, since.segments, most, few, kept;
      exit;
    exception
      when program_limit_exceeded then
        reason := sqlerrm;
      when data_exception or syntax_error_or_access_rule_violation or feature_not_supported
           or integrity_constraint_violation or raise_exception then
        reason := sqlerrm;
        exit;
    end;
  end loop;
  if delta_rows is not null then
    action := coalesce(action, 'delta');
  elsif load then
    perform gdq.begin_compiled_load(view);
    reason := coalesce(reason, case when place is null then gdq.why_load(view, compiled)
                                    when since.segments is null then 'the log rows do not show every change'
                                    when compiled.changes is null then 'changes of this view are not compiled'
                                    else 'many changes' end);
    execute 'select l.* from ' || compiled.load || '() l' into rows_changed, rows_read;
    action := 'full';
    kind := 'full';
    kept := null;
  else
    kind := null;
    return;
  end if;
  moved := gdq.finish_compiled_refresh(view, place, group_name, started, kind, reason, rows_changed, delta_rows,
                                       rows_read, kept);
  update gdq_target.position p
     set position = moved, target = compiled.target, updated_at = now(),
         plan = concat_ws('/', compiled.plan, pg_relation_filenode(compiled.target::regclass)::text)
   where p.view = refresh_compiled.view and p.position = coalesce(place, p.position);
  if not found then
    raise exception 'another refresh of view "%" has moved its position', view using errcode = 'serialization_failure';
  end if;
end
$$;
comment on function gdq.refresh_compiled(text, gdq.compiled_view, boolean, text) is
  'What CALL gdq.refresh() does after its locks.';
