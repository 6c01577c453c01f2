-- CALL gdq.refresh_group(group_name, load): refreshes the views of a stored group together, as gdq.refresh() does one:
-- all show the same snapshot. load: as for refresh(); if it is false and a view needs a load, nothing is done.
-- Result: rows_changed of all, NULL if nothing was done; and results, an array of the views' view_name, action, reason,
-- rows_changed, delta_rows and kind. Writes and errors: as gdq.refresh(); 42704 for no such group.
create or replace procedure gdq.refresh_group(group_name pg_catalog.text, load pg_catalog.bool default true,
  inout rows_changed pg_catalog.int8 default null, inout results pg_catalog.jsonb default null)
language plpgsql
as $$
declare
  names pg_catalog.text[];
  compiled gdq.compiled_view[];
  locks pg_catalog.text;
  done record;
begin
  select pg_catalog.array_agg(c.view_name), pg_catalog.array_agg(c.compiled),
         pg_catalog.string_agg(c.locks operator(pg_catalog.||)
                               gdq.target_locks((c.compiled).target, (c.compiled).state), '; ')
    into names, compiled, locks from gdq.compiled_views(null, group_name, load) c;
  commit;
  set transaction isolation level repeatable read;
  set local lock_timeout = '500ms';
  execute locks;
  rows_changed := 0;
  results := '[]';
  for number in 1 .. pg_catalog.cardinality(names) loop
    select names[number] as view_name, r.* into done
      from gdq.refresh_compiled(names[number], compiled[number], load, group_name) r;
    if done.action is null then
      rollback;
      rows_changed := null;
      results := null;
      return;
    end if;
    rows_changed := rows_changed operator(pg_catalog.+) done.rows_changed;
    results := results operator(pg_catalog.||) pg_catalog.to_jsonb(done);
  end loop;
end
$$;
comment on procedure gdq.refresh_group(text, boolean, bigint, jsonb) is
  'Refreshes the views of a stored group together by the functions that gdq has made for them.';
