-- CALL gdq.refresh_group(group_name): refreshes the views of a stored group together, as gdq.refresh() does one: all
-- show the same snapshot. Result: rows_changed of all. Writes and errors: as gdq.refresh(); 42704 for no such group.
create or replace procedure gdq.refresh_group(group_name pg_catalog.text,
  inout rows_changed pg_catalog.int8 default null)
language plpgsql
as $$
declare
  names pg_catalog.text[];
  compiled gdq.compiled_view[];
  locks pg_catalog.text;
  done pg_catalog.int8;
begin
  select pg_catalog.array_agg(c.view_name), pg_catalog.array_agg(c.compiled), pg_catalog.string_agg(c.locks, '; ')
    into names, compiled, locks from gdq.compiled_views(null, group_name) c;
  commit;
  set transaction isolation level repeatable read;
  set local lock_timeout = '500ms';
  execute locks;
  rows_changed := 0;
  for number in 1 .. pg_catalog.cardinality(names) loop
    select r.rows_changed into done
      from gdq.refresh_compiled(names[number], compiled[number], true, group_name) r;
    rows_changed := rows_changed operator(pg_catalog.+) done;
  end loop;
end
$$;
comment on procedure gdq.refresh_group(text, bigint) is
  'Refreshes the views of a stored group together by the functions that gdq refresh has made for them.';
