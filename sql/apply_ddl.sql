-- apply_ddl(queue, ddl, tables): runs DDL and keeps capture in step with it, where event triggers cannot: in one
-- transaction, so an error leaves nothing half done. The way to alter captured tables on servers that refuse event
-- triggers; where they are on it only runs the DDL, which they follow. (Slony has EXECUTE SCRIPT, Londiste execute.)
--   ddl: one or more commands, run with the rights and the search_path of the caller; no BEGIN or COMMIT. Capture follows
--   at their end: rows that they write into a table which they have altered are not captured, which is a resync.
--   tables: locked first, in this order; NULL: the commands lock what they need as they come.
-- Result: how many captured tables have new columns. Writes: what the DDL does; as guard_table() for what it changed.
-- Errors: 42704; GDQ04; 55P03 when a table is not free within 500 ms: nothing is changed, try again; any of the DDL's or
-- of capture, such as 54000 for columns that a log cannot hold.
create or replace function gdq.apply_ddl(queue text, ddl text, tables regclass[] default null) returns integer
language plpgsql volatile security invoker set lock_timeout = '500ms'
as $$
declare
  before pg_catalog.jsonb;
  tbl pg_catalog.regclass;
begin
  before := gdq.begin_ddl(queue, ddl);
  foreach tbl in array coalesce(tables, '{}') loop
    execute pg_catalog.format('lock table %s in access exclusive mode', tbl);
  end loop;
  execute ddl;
  return gdq.end_ddl(queue, ddl, before);
end
$$;
comment on function gdq.apply_ddl(text, text, regclass[]) is 'Runs DDL and keeps capture in step with it, in one transaction.';

-- table_files(relid): the files of a table and its partitions, as text: another one after a rewrite. Writes: nothing.
create or replace function gdq.table_files(relid oid) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (select string_agg(concat(r, ' ', pg_relation_filenode(r)), ',' order by r)
            from (select table_files.relid as r union select p.relid from pg_partition_tree(table_files.relid) p) tree);
end
$$;
comment on function gdq.table_files(oid) is 'The files of a table and its partitions.';

-- begin_ddl(queue, ddl), end_ddl(queue, ddl, before): what apply_ddl() does before and after its commands, with the
-- rights of gdq. Result: the files of all captured tables; how many of them have new columns.
-- Writes: as apply_ddl(). Errors: 42704, GDQ04; any of capture.
create or replace function gdq.begin_ddl(queue text, ddl text) returns jsonb
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform gdq.require_read_committed('apply_ddl');
  perform gdq.find_queue(queue);
  if not gdq.event_triggers_on() then
    perform gdq.check_tables();
  end if;
  perform set_config('gdq.applied', left(ddl, 10000), true);
  return (select coalesce(jsonb_object_agg(t.relid, gdq.table_files(t.relid)), '{}') from (select distinct ct.relid::oid from gdq.captured_table ct) t);
end
$$;
comment on function gdq.begin_ddl(text, text) is 'What apply_ddl() does before its commands.';

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
      if exists (select from pg_class c where c.oid = t.relid) and before->>(t.relid::oid::text) <> gdq.table_files(t.relid) then
        perform gdq.note_once(t.queue_id, t.relid, 'gap', 'the table was rewritten: rows changed without events');
      end if;
      perform gdq.note_catalog(t.table_id);
    end loop;
    if ddl ~* '\m(add|drop)\M' then
      perform gdq.guard_row_types(gdq.locked_tables('AccessExclusiveLock'), tag);
    end if;
    -- these two lock no table
    for t in select ct.* from gdq.captured_table ct where exists (select from pg_class c where c.oid = ct.relid) loop
      if gdq.last_table_name(t.table_id) <> gdq.table_name(t.relid) then
        perform gdq.note_ddl(t.table_id, tag, gdq.note_rename(t.table_id));
      end if;
      if ddl ~* '\malter\s+type\M' and exists (select from pg_attribute a where a.attrelid = t.relid and a.attnum > 0 and a.atttypid >= 16384) then
        perform gdq.note_once(t.queue_id, t.relid, 'gap', 'ALTER TYPE: stored values may read otherwise now, without events');
      end if;
    end loop;
    end if;
  perform set_config('gdq.applied', '', true);
  return (select count(distinct v.table_id) from gdq.table_version v where v.txid = txid_current());
end
$$;
comment on function gdq.end_ddl(text, text, jsonb) is 'What apply_ddl() does after its commands.';
