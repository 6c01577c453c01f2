-- The DDL guard keeps capture functions in step with their tables, inside the transaction of the DDL itself. It fires
-- for every DDL of the database and never lets an error out: where it cannot go on it switches capture of the table
-- off and records that. Into control tables it only inserts, but for the one row of a partition that it has locked.

-- ddl_guard(): event trigger on ddl_command_end and on sql_drop. sql_drop comes first and sees what a DROP did: event
-- triggers of the application that write to a captured table must not meet functions that do not fit it. It has no SET
-- clauses but qualified operators, as it runs for every DDL of the database. Writes and errors: as follow_ddl().
create or replace function gdq.ddl_guard() returns event_trigger
language plpgsql volatile security definer
as $$
begin
  -- commands that change no table, however often they come
  if TG_TAG operator(pg_catalog.=) any (pg_catalog.string_to_array(
       'CREATE INDEX,REINDEX,GRANT,REVOKE,COMMENT,SECURITY LABEL,ALTER DEFAULT PRIVILEGES,'
       'CREATE FUNCTION,CREATE PROCEDURE,CREATE AGGREGATE,ALTER FUNCTION,ALTER PROCEDURE,ALTER ROUTINE,'
       'CREATE TABLE AS,SELECT INTO,CREATE VIEW,CREATE MATERIALIZED VIEW,REFRESH MATERIALIZED VIEW,'
       'CREATE SEQUENCE,CREATE TYPE,CREATE DOMAIN,CREATE POLICY,CREATE STATISTICS,CREATE CAST,CREATE OPERATOR', ','))
     is not true
     and (TG_EVENT operator(pg_catalog.=) 'sql_drop' or pg_catalog.starts_with(TG_TAG, 'DROP ') is not true
          or TG_TAG operator(pg_catalog.=) 'DROP OWNED') then
    perform gdq.follow_ddl(TG_EVENT, TG_TAG);
  end if;
end
$$;
comment on function gdq.ddl_guard() is
  'Event trigger: keeps capture functions in step with DDL, or switches them off; never lets an error out.';

-- follow_ddl(event, tag): the work of ddl_guard() for a command that may have changed a captured table. Settings are
-- pinned because the session of the DDL may have others. Where statement_timeout is short it waits less for locks:
-- that error cannot be caught.
-- Writes: as guard_tables() and guard_types(). Errors: none but a cancel or a statement_timeout.
create or replace function gdq.follow_ddl(event text, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set default_table_access_method = 'heap' set default_tablespace = '' set lock_timeout = '100ms'
  set client_min_messages = error
as $$
declare
  fresh boolean := current_setting('transaction_isolation') in ('read committed', 'read uncommitted');
begin
  if current_setting('statement_timeout')::interval between interval '1 ms' and interval '1 s' then
    perform set_config('lock_timeout',
      (extract(epoch from current_setting('statement_timeout')::interval) * 1000 / 10 + 1)::integer::text, true);
  end if;
  if exists (select from gdq.restored_queues()) then
    perform gdq.disarm_restored(tag);
  end if;
  if tag = 'CREATE TABLE'
     and not exists (select from pg_event_trigger_ddl_commands() c
                      where c.object_type = 'table' and c.schema_name not in ('pg_temp', 'gdq_log')) then
    return;
  elsif tag = 'ALTER TABLE' and event = 'ddl_command_end'
        and (select bool_and(c.schema_name = 'gdq_log') from pg_event_trigger_ddl_commands() c) then
    return;
  elsif event = 'sql_drop'
        and not exists (select from pg_event_trigger_dropped_objects() o where not o.is_temporary) then
    return;
  elsif tag = 'ALTER TYPE' and event = 'ddl_command_end' then
    perform gdq.guard_types();
  elsif tag = 'ALTER TABLE' and event = 'ddl_command_end'
        and current_query() !~* '^\s*alter\s+table\s(?!.*(\madd\M|;\s*\S))' then
    perform gdq.guard_row_types(gdq.locked_tables('AccessExclusiveLock'), tag);
  elsif event = 'sql_drop' then
    perform gdq.guard_row_types(array(select o.objid from pg_event_trigger_dropped_objects() o
                                       where o.classid = 'pg_class'::regclass and o.objsubid <> 0), tag);
  end if;
  if fresh then
    perform gdq.guard_tables(tag);
  else
    perform gdq.switch_off_locked(
      tag || ' in a ' || upper(current_setting('transaction_isolation')) || ' transaction', gdq.weakest_lock(tag));
  end if;
exception when others then
  begin
    perform gdq.switch_off_locked('capture could not follow ' || tag || ': ' || sqlerrm, gdq.weakest_lock(tag));
  exception when others then
    raise log 'gdq: capture could neither follow nor be switched off after %: %', tag, sqlerrm;
  end;
end
$$;
comment on function gdq.follow_ddl(text, text) is
  'Keeps capture functions in step with one DDL command, or switches them off; never lets an error out.';

-- guard_tables(tag): guard_table() for every captured table that the command may have changed: every one that this
-- transaction has locked, or a partition or child of it. After ALTER SCHEMA: also the tables of the schema. After
-- CREATE TRIGGER: only the table and its partitions, as a transaction that captures many tables would look at all of
-- them for each trigger. Writes: as guard_table().
create or replace function gdq.guard_tables(tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t record;
  schemas oid[];
  touched oid[];
begin
  if tag = 'CREATE TRIGGER' then
    touched := array(select r
                       from pg_event_trigger_ddl_commands() o
                       join pg_trigger tg on tg.oid = o.objid,
                            lateral (select tg.tgrelid
                                      union
                                     select p.relid from pg_partition_tree(tg.tgrelid) p) relations(r)
                      where o.classid = 'pg_trigger'::regclass);
  elsif tag = 'ALTER SCHEMA' then
    schemas := array(select o.objid from pg_event_trigger_ddl_commands() o
                      where o.classid = 'pg_namespace'::regclass);
  end if;
  touched := coalesce(nullif(touched, '{}'),
                      gdq.locked_tables('AccessExclusiveLock', 'ShareRowExclusiveLock', gdq.weakest_lock(tag)));
  for t in select * from gdq.near_tables(touched, schemas) loop
    begin
      perform gdq.guard_table(t.table_id, tag);
    exception when others then
      perform gdq.switch_off(t.queue_id, t.relid, format('capture could not follow %s: %s', tag, sqlerrm));
    end;
  end loop;
end
$$;
comment on function gdq.guard_tables(text) is
  'Follows what DDL did to every captured table that this transaction has locked.';

-- guard_table(table_id, tag): follows what DDL may have done to one captured table. While capture of the table is off
-- only its functions matter: maintain() looks at everything anew.
-- Writes: as guard_columns(), guard_leaves() and switch_off(). Errors: any; the caller switches off.
create or replace function gdq.guard_table(table_id integer, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  state text;
  fault text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_table.table_id;
  state := gdq.capture_state(t.queue_id, t.relid);
  if state in ('dropped', 'covered') then
    return;
  elsif not exists (select from pg_class c where c.oid = t.relid) then
    perform gdq.note_dropped(t.table_id, tag);
    return;
  elsif state = 'disarmed' then
    -- its functions may still be the old ones, where only a partition was the reason, or replacing them failed
    perform gdq.switch_off(t.queue_id, t.relid, tag || ' while capture was off');
    return;
  end if;
  perform gdq.guard_columns(t.table_id, tag);
  perform gdq.guard_leaves(t.table_id, tag);
  fault := coalesce(gdq.capture_fault(t.table_id), gdq.trigger_fault(t.table_id));
  if fault is not null then
    perform gdq.switch_off(t.queue_id, t.relid, fault);
  end if;
end
$$;
comment on function gdq.guard_table(integer, text) is 'Follows what DDL did to one captured table.';

-- near_tables(locked, schemas): the captured tables among these relations, the tables that have one of them as a
-- partition or child, and the tables in these schemas: a new name of a schema locks no table. Writes: nothing.
create or replace function gdq.near_tables(locked oid[], schemas oid[] default null) returns setof gdq.captured_table
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return query
    select ct.*
      from (select unnest(locked) as relid
            union select a.relid from unnest(locked) l, pg_partition_ancestors(l) a
            union select i.inhparent from pg_inherits i where i.inhrelid = any (locked)
            union select ct.relid from gdq.captured_leaf cl join gdq.captured_table ct using (table_id)
                   where cl.leaf = any (locked)
            union select c.oid from pg_class c where c.relnamespace = any (schemas)) near
      join gdq.captured_table ct using (relid)
     where (gdq.era_of(ct.queue_id)).era is not null  -- else disarm_restored() has done what there is to do
     order by ct.relid, ct.queue_id;
end
$$;
comment on function gdq.near_tables(oid[], oid[]) is
  'Captured tables that DDL of these relations and schemas may concern.';

-- weakest_lock(tag): the weakest lock under which a command of this tag changes a table: DROP INDEX CONCURRENTLY, which
-- may take away a key, holds this one to its end. Writes: nothing.
create or replace function gdq.weakest_lock(tag text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select case tag when 'DROP INDEX' then 'ShareUpdateExclusiveLock' else 'AccessExclusiveLock' end
$$;
comment on function gdq.weakest_lock(text) is 'The weakest lock under which a command changes a table.';
