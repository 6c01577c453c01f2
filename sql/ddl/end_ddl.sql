-- end_ddl(queue, ddl, before): what apply_ddl() does after its commands, with the rights of gdq. before: from
-- begin_ddl().
-- Result: how many captured tables have new columns. Writes: as guard_table(). Errors: any of capture.
create or replace function gdq.end_ddl(queue text, ddl text, before jsonb) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set default_table_access_method = 'heap' set default_tablespace = '' set client_min_messages = warning
as $$
declare
  t record;
  tag constant text := 'APPLY DDL';
begin
  if not gdq.event_triggers_on() then
    for t in select * from gdq.near_tables(gdq.locked_tables('AccessExclusiveLock', 'ShareRowExclusiveLock')) loop
      perform gdq.guard_table(t.table_id, tag);
      if exists (select from pg_class c where c.oid = t.relid)
         and before->>(t.relid::oid::text) <> gdq.table_files(t.relid) then
        perform gdq.note_once(t.queue_id, t.relid, 'gap', 'the table was rewritten: rows changed without events');
      end if;
      perform gdq.note_catalog(t.table_id);
    end loop;
    if ddl ~* '\m(add|drop)\M' then
      perform gdq.guard_row_types(gdq.locked_tables('AccessExclusiveLock'), tag);
    end if;
    -- a new name and ALTER TYPE lock no table
    for t in select ct.* from gdq.captured_table ct where exists (select from pg_class c where c.oid = ct.relid) loop
      if gdq.last_table_name(t.table_id) <> gdq.table_name(t.relid) then
        perform gdq.note_ddl(t.table_id, tag, gdq.note_rename(t.table_id));
      end if;
      if ddl ~* '\malter\s+type\M'
         and exists (select from pg_attribute a
                      where a.attrelid = t.relid and a.attnum > 0 and a.atttypid >= 16384) then
        perform gdq.note_once(t.queue_id, t.relid, 'gap',
                              'ALTER TYPE: stored values may read otherwise now, without events');
      end if;
    end loop;
  end if;
  perform set_config('gdq.applied', '', true);
  return (select count(distinct v.table_id) from gdq.table_version v where v.txid = txid_current());
end
$$;
comment on function gdq.end_ddl(text, text, jsonb) is 'What apply_ddl() does after its commands.';
