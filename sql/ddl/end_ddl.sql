-- end_ddl(queue, ddl): does the part of apply_ddl() after its commands, with the rights of gdq. Result: how many
-- captured tables have new columns. Writes: as guard_table() and forget_dropped(). Errors: any of capture.
create or replace function gdq.end_ddl(queue text, ddl text) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set default_table_access_method = 'heap' set default_tablespace = '' set client_min_messages = warning
as $$
declare
  t record;
  touched oid[];
  rewritten boolean;
  tag constant text := 'APPLY DDL';
begin
  if not gdq.event_triggers_on() then
    perform gdq.forget_dropped();
    perform gdq.capture_wanted(w.rule_id, w.relid, 3)
       from gdq.wanted_tables(gdq.locked_tables('AccessExclusiveLock')) w;
    touched := gdq.touched_relations('ALTER TABLE');
    for t in select * from gdq.near_tables(touched) loop
      -- begin_ddl() has witnessed the files of before
      rewritten := exists (select from gdq.catalog_rows(array[t.table_id], touched) r
                             join gdq.witness w using (table_id, relid) where w.file <> r.file);
      perform gdq.guard_table(t.table_id, tag, touched);
      if rewritten then
        perform gdq.note_once(t.queue_id, t.relid, 'gap', 'the table was rewritten: rows changed without events');
      end if;
    end loop;
    if ddl ~* E'\\m(add|drop)\\M' then
      perform gdq.note_types(gdq.row_types(gdq.locked_tables('AccessExclusiveLock')), tag);
    end if;
    -- a new name and ALTER TYPE lock no table
    for t in select ct.* from gdq.captured_table ct where exists (select from pg_class c where c.oid = ct.relid) loop
      if gdq.last_table_name(t.table_id) <> gdq.table_name(t.relid) then
        perform gdq.note_ddl(t.table_id, tag, gdq.note_rename(t.table_id));
      end if;
      if ddl ~* E'\\malter\\s+type\\M'
         and exists (select from pg_attribute a
                      where a.attrelid = t.relid and a.attnum > 0 and a.atttypid >= 16384) then
        perform gdq.note_once(t.queue_id, t.relid, 'gap',
                              'ALTER TYPE: stored values may read otherwise now, without events');
        perform gdq.witness_types(t.relid);
      end if;
    end loop;
  end if;
  perform set_config('gdq.applied', '', true);
  return (select count(distinct v.table_id) from gdq.table_version v where v.txid = txid_current());
end
$$;
comment on function gdq.end_ddl(text, text) is 'Does the part of apply_ddl() after its commands.';
