-- last_table_name(table_id): the name that a captured table was last known by; it may be gone. Writes: nothing.
create or replace function gdq.last_table_name(table_id integer) returns text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce((select r.table_name from gdq.table_rename r where r.table_id = last_table_name.table_id order by r.rename_id desc limit 1),
                  (select ct.table_name from gdq.captured_table ct where ct.table_id = last_table_name.table_id))
$$;
comment on function gdq.last_table_name(integer) is 'The name that a captured table was last known by.';

-- column_list(columns): a version's columns as a ddl event shows them: name, type and key of each. Writes: nothing.
create or replace function gdq.column_list(columns jsonb) returns jsonb
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce(jsonb_agg(jsonb_build_object('name', name, 'type', type, 'key', key) order by attnum), '[]')
    from jsonb_to_recordset(columns) c(attnum int, name text, type text, key boolean)
$$;
comment on function gdq.column_list(jsonb) is 'A version''s columns as a ddl event shows them.';

-- ddl_object(relid): what the DDL command at hand names, which may be a type or a parent of the captured table, or, given
-- a relation, the name of that one if the command drops it. NULL outside an event trigger. Writes: nothing.
create or replace function gdq.ddl_object(relid oid default null) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  begin
    return (select string_agg(distinct o.object_identity, ', ') from pg_event_trigger_dropped_objects() o
             where case when relid is null then o.original
                        else o.classid = 'pg_class'::regclass and o.objid = relid and o.objsubid = 0 end);
  exception when event_trigger_protocol_violated then
    -- a DROP COLUMN is on sql_drop by its column, all else is at the command's end
    return (select string_agg(distinct c.object_identity, ', ') from pg_event_trigger_ddl_commands() c where relid is null);
  end;
exception when event_trigger_protocol_violated then
  return null;
end
$$;
comment on function gdq.ddl_object(oid) is 'What the DDL command at hand names.';

-- note_ddl(table_id, tag, data): a ddl event of a captured table with what all of them tell: tag, table (the name that
-- it has after the command), object, statement (its first 10,000 characters), and data. Result: its ev_id.
-- Writes: the event log.
create or replace function gdq.note_ddl(table_id integer, tag text, data jsonb) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = note_ddl.table_id;
  return gdq.log_event(t.queue_id, 'ddl', t.relid, jsonb_build_object('tag', tag, 'table', coalesce(gdq.table_name(t.relid), gdq.last_table_name(t.table_id)),
    'object', gdq.ddl_object(), 'statement', coalesce(nullif(current_setting('gdq.applied', true), ''), left(current_query(), 10000))) || data);
end
$$;
comment on function gdq.note_ddl(integer, text, jsonb) is 'Writes a ddl event of a captured table.';

-- note_rename(table_id): records the name of a captured table when it is another than before.
-- Result: {"old_table": the name before}, {} when it is the same. Writes: table_rename.
create or replace function gdq.note_rename(table_id integer) returns jsonb
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  before text := gdq.last_table_name(table_id);
  after text := (select gdq.table_name(ct.relid) from gdq.captured_table ct where ct.table_id = note_rename.table_id);
begin
  if before is not distinct from after or after is null then
    return '{}';
  end if;
  insert into gdq.table_rename (table_id, table_name) values (table_id, after);
  return jsonb_build_object('old_table', before);
end
$$;
comment on function gdq.note_rename(integer) is 'Records the name of a captured table when it is another than before.';
