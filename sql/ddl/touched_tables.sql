-- What a DDL command has touched: relations, and the captured tables that it concerns.

-- touches_nothing(event, tag): whether a command concerns only temporary tables, tables of gdq_log, or the triggers
-- that add_table() puts on a table which no queue captures yet: it will have captured it when its parents are looked
-- at. Writes: nothing.
create or replace function gdq.touches_nothing(event text, tag text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if event = 'sql_drop' then
    return not exists (select from pg_event_trigger_dropped_objects() o where not o.is_temporary);
  elsif tag = 'CREATE TABLE' then
    return not exists (select from pg_event_trigger_ddl_commands() c
                        where c.object_type = 'table' and c.schema_name not in ('pg_temp', 'gdq_log'));
  elsif tag = 'CREATE TRIGGER' then
    return not exists (select from pg_event_trigger_ddl_commands() o
                         join pg_trigger tg on o.classid = 'pg_trigger'::regclass and tg.oid = o.objid
                         join pg_proc p on p.oid = tg.tgfoid
                         join pg_class c on c.oid = tg.tgrelid
                        where p.pronamespace <> 'gdq_log'::regnamespace or c.relispartition
                           or exists (select from gdq.captured_table ct where ct.relid = tg.tgrelid));
  end if;
  return tag = 'ALTER TABLE'
     and coalesce((select bool_and(c.schema_name = 'gdq_log') from pg_event_trigger_ddl_commands() c), false);
end
$$;
comment on function gdq.touches_nothing(text, text) is
  'Whether a command concerns no captured table, nor one that could be.';

-- touched_relations(tag): the relations that the command may have changed: those that this transaction has locked.
-- After CREATE TRIGGER only the trigger's table and its partitions: a transaction that captures many tables would else
-- look at all of them for each trigger. Writes: nothing.
create or replace function gdq.touched_relations(tag text) returns oid[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
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
  end if;
  -- SET STATISTICS and others write rows of pg_attribute under SHARE UPDATE EXCLUSIVE
  return coalesce(nullif(touched, '{}'),
                  gdq.locked_tables('AccessExclusiveLock', 'ShareRowExclusiveLock',
                                    case tag when 'ALTER TABLE' then 'ShareUpdateExclusiveLock'
                                             else gdq.weakest_lock(tag) end));
end
$$;
comment on function gdq.touched_relations(text) is 'The relations that a command may have changed.';

-- concerned_tables(event, touched, tag): the captured tables that the command may concern: those that have one of the
-- touched relations, and those whose own name or a name of a type of theirs it may have changed, which locks no table.
-- Of many tables, those of which the catalogs hold what was witnessed are left out, unless the command names them. In
-- an old snapshot the names of capture functions tell. Writes: nothing.
create or replace function gdq.concerned_tables(event text, touched oid[], tag text) returns gdq.captured_table[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  schemas oid[];
  holders oid[];
  tables gdq.captured_table[];
begin
  if not gdq.snapshot_is_fresh() then
    return null;
  elsif event = 'ddl_command_end' then
    if tag = 'ALTER SCHEMA' then
      schemas := array(select o.objid from pg_event_trigger_ddl_commands() o
                        where o.classid = 'pg_namespace'::regclass);
    end if;
    holders := gdq.relations_of_types(gdq.renamed_types(touched, schemas, tag));
  end if;
  tables := array(select n from gdq.near_tables(touched || holders, schemas) n);
  -- a script that makes many tables in one transaction has locked all of them, and a command alters one or two
  if event = 'ddl_command_end' and tag in ('CREATE TABLE', 'ALTER TABLE') and cardinality(tables) > 4 then
    tables := array(
      select t from unnest(tables) t
       where t.table_id in (select n.table_id from gdq.near_tables(gdq.command_relations() || holders) n
                            union all
                            select u.table_id
                              from gdq.unwitnessed(array(select k.table_id from unnest(tables) k), touched) u));
  end if;
  return tables;
end
$$;
comment on function gdq.concerned_tables(text, oid[], text) is 'The captured tables that a command may concern.';

-- command_relations(): the relations that the current command names, or whose constraints it names. Writes: nothing.
create or replace function gdq.command_relations() returns oid[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return array(select case when o.classid = 'pg_class'::regclass then o.objid else n.conrelid end
                 from pg_event_trigger_ddl_commands() o
                 left join pg_constraint n on o.classid = 'pg_constraint'::regclass and n.oid = o.objid
                where o.classid in ('pg_class'::regclass, 'pg_constraint'::regclass));
end
$$;
comment on function gdq.command_relations() is 'The relations that the current command names.';

-- renamed_types(touched, schemas, tag): the types whose names the command may have changed, with or without a schema:
-- those that it altered, those of the schemas, and the row types of the touched relations. Writes: nothing.
create or replace function gdq.renamed_types(touched oid[], schemas oid[], tag text) returns oid[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return case
    when tag in ('ALTER TYPE', 'ALTER DOMAIN') then
      array(select coalesce(c.reltype, o.objid)
              from pg_event_trigger_ddl_commands() o
              left join pg_class c on o.classid = 'pg_class'::regclass and c.oid = o.objid)
    when tag = 'ALTER SCHEMA' then
      array(select t.oid from pg_type t where t.typnamespace = any (schemas) and t.typelem = 0)
    when tag = 'ALTER TABLE' then gdq.row_types(touched)
    else '{}' end;
end
$$;
comment on function gdq.renamed_types(oid[], oid[], text) is 'The types whose names a command may have changed.';

-- relations_of_types(types): the relations with a column of one of these types, or of an array of it. Writes: nothing.
create or replace function gdq.relations_of_types(types oid[]) returns oid[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return array(select distinct d.objid
                 from pg_type t
                 join pg_depend d on d.refclassid = 'pg_type'::regclass and d.refobjid in (t.oid, t.typarray)
                where t.oid = any (types) and d.classid = 'pg_class'::regclass and d.objsubid > 0);
end
$$;
comment on function gdq.relations_of_types(oid[]) is 'The relations with a column of one of these types.';

-- near_tables(locked, schemas): the captured tables that DDL of these relations and schemas may concern: those among
-- the relations, those that have one of them as a partition or child, and those in the schemas, since renaming a schema
-- locks no table. Writes: nothing.
create or replace function gdq.near_tables(locked oid[], schemas oid[] default null) returns setof gdq.captured_table
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return query
    select ct.*
      from (select unnest(locked) as relid
            union select a.relid from unnest(locked) l, pg_partition_ancestors(l) a
            union select i.inhparent from pg_inherits i where i.inhrelid = any (locked)
            union select ct.relid from gdq.witness w join gdq.captured_table ct using (table_id)
                   where w.relid = any (locked)
            union select c.oid from pg_class c where c.relnamespace = any (schemas)) near
      join gdq.captured_table ct using (relid)
     -- disarm_restored() does the work for a restored queue; each queue is asked once
     where ct.queue_id in (select q.queue_id from gdq.queue q where (gdq.era_of(q.queue_id)).era is not null offset 0)
     order by ct.relid, ct.queue_id;
end
$$;
comment on function gdq.near_tables(oid[], oid[]) is
  'Captured tables that DDL of these relations and schemas may concern.';

-- weakest_lock(tag): the weakest lock under which a command of this tag changes a table. DROP INDEX CONCURRENTLY, which
-- may remove a key, holds SHARE UPDATE EXCLUSIVE to its end. Writes: nothing.
create or replace function gdq.weakest_lock(tag text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select case tag when 'DROP INDEX' then 'ShareUpdateExclusiveLock' else 'AccessExclusiveLock' end
$$;
comment on function gdq.weakest_lock(text) is 'The weakest lock under which a command changes a table.';
