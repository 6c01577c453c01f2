-- What each refresh of a view leaves: a row of its history, of which the last ones are kept, and time for audits.

-- note_unchanged(views, positions, group_name, started): notes refreshes that found nothing to do. positions: those of
-- the targets. group_name: as for start_view_run(). Writes: view_run.
create or replace function gdq.note_unchanged(views text[], positions text[], group_name text, started timestamptz)
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  insert into gdq.view_run (view_id, group_name, started_at, finished_at, action, kind, rows_changed, delta_rows,
                            rows_read, work_seconds, snapshot_from, snapshot_to)
    select v.view_id, note_unchanged.group_name, started, clock_timestamp(), 'none', 'none', 0, 0, 0, 0,
           split_part(n.at, '/', 5)::pg_snapshot, pg_current_snapshot()
      from unnest(views, positions) n(name, at) join gdq.view v on v.view_name = n.name;
  if random() < 0.02 then
    perform gdq.trim_view_runs(v.view_id) from gdq.view v where v.view_name = any (views);
  end if;
end
$$;
comment on function gdq.note_unchanged(text[], text[], text, timestamptz) is
  'Notes refreshes that found nothing to do.';

-- note_work(view_id, seconds): adds a hundredth of the seconds of a refresh to what audits of the view may take, ten
-- seconds in all at most. seconds: NULL for none. Writes: view.
create or replace function gdq.note_work(view_id integer, seconds double precision) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  update gdq.view v set audit_credit = least(v.audit_credit + 0.01 * seconds, 10)
   where v.view_id = note_work.view_id and seconds > 0;
end
$$;
comment on function gdq.note_work(integer, double precision) is
  'Adds a hundredth of the seconds of a refresh to what audits of the view may take.';

-- trim_view_runs(view_id): deletes all but the last 1,000 rows of a view's history. Writes: view_run.
create or replace function gdq.trim_view_runs(view_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  delete from gdq.view_run r
   where r.view_id = trim_view_runs.view_id
     and r.run_id <= (select o.run_id from gdq.view_run o where o.view_id = trim_view_runs.view_id
                       order by o.run_id desc offset 1000 limit 1);
end
$$;
comment on function gdq.trim_view_runs(integer) is 'Deletes all but the last 1,000 rows of a view''s history.';
