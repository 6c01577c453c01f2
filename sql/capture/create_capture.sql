-- create_capture(queue_id, tbl, operations, granularity, always, origin): makes the capture functions of a table, which
-- do nothing yet, and its triggers. CREATE TRIGGER takes the lock that waits for writers at work, so it comes before
-- anything is read about the table. Functions are made for all operations, as the DDL guard finds the table by their
-- names.
-- Writes: four functions, their owners, triggers on the table and its partitions. Errors: 42501, 55P03.
create or replace function gdq.create_capture(queue_id integer, tbl regclass, operations text[], granularity text,
                                              always boolean, origin boolean)
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500ms'
as $$
declare
  op text;
begin
  foreach op in array array['i', 'u', 'd', 't'] loop
    perform gdq.replace_capture(queue_id, tbl, op,
      case op when 't' then gdq.truncate_body(queue_id, tbl, origin) else E'begin\n  return null;\nend' end);
  end loop;
  perform gdq.own_functions(queue_id, tbl);
  perform gdq.create_triggers(queue_id, tbl, tbl, operations, granularity, always);
end
$$;
comment on function gdq.create_capture(integer, regclass, text[], text, boolean, boolean) is
  'Makes the capture functions and triggers of a table.';

-- create_trigger(name, event, rel, level, function, always): makes one capture trigger. event: as in "after insert";
-- level: the clauses from REFERENCING to FOR EACH. Writes: the trigger. Errors: 42501, 55P03.
create or replace function gdq.create_trigger(name text, event text, rel oid, level text, function text, always boolean)
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  execute format('create or replace trigger %I %s on %s %s execute function gdq_log.%I()',
                 name, event, gdq.table_name(rel), level, function);
  if always then
    execute format('alter table %s enable always trigger %I', gdq.table_name(rel), name);
  end if;
end
$$;
comment on function gdq.create_trigger(text, text, oid, text, text, boolean) is 'Makes one capture trigger.';

-- create_triggers(queue_id, root, rel, operations, granularity, always): puts the capture triggers of a captured root
-- on the table rel and the partitions under it.
--   They are AFTER triggers with a name that sorts first, so they fire before RI triggers and the application's own.
--   The name contains the root's oid: ATTACH PARTITION fails when root and leaf have row triggers of one name.
--   PostgreSQL clones row triggers to partitions, but not statement triggers, and a statement fires only those of the
--   table that it names: they are put on every partition.
--   always: the triggers fire for a replication role too, which only the owner of a table can set.
-- Writes: triggers. Errors: 42501, 55P03.
create or replace function gdq.create_triggers(queue_id integer, root oid, rel oid, operations text[], granularity text,
                                               always boolean) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
  op record;
begin
  for r in select rel as relid, 0 as level
            union all
           select p.relid, p.level from pg_partition_tree(rel) p where p.level > 0 and granularity = 'statement'
            order by level loop
    -- a row trigger of the root has been cloned to rel already
    continue when granularity = 'row' and r.relid <> root;
    for op in select * from (values ('i', 'insert', 'new table as gdq_new'),
                                    ('u', 'update', 'old table as gdq_old new table as gdq_new'),
                                    ('d', 'delete', 'old table as gdq_old')) v(code, event, images)
               where event = any (operations) loop
      perform gdq.create_trigger(format('!gdq_%s_%s_%s', root, queue_id, op.code), 'after ' || op.event, r.relid,
        case granularity when 'row' then 'for each row' else format('referencing %s for each statement', op.images) end,
        gdq.capture_name(queue_id, root, op.code), always);
    end loop;
  end loop;
  if 'truncate' = any (operations) then
    perform gdq.create_truncate_triggers(queue_id, root, rel, always);
  end if;
end
$$;
comment on function gdq.create_triggers(integer, oid, oid, text[], text, boolean) is
  'Puts the capture triggers of a captured root on a table and its partitions.';

-- create_truncate_triggers(queue_id, root, rel, always): puts the TRUNCATE triggers of a captured root on the table rel
-- and the partitions under it. PostgreSQL clones row triggers to partitions, but not these. Only tables with partitions
-- get a BEFORE trigger, see create_truncate(). Writes: triggers. Errors: 42501, 55P03.
create or replace function gdq.create_truncate_triggers(queue_id integer, root oid, rel oid, always boolean)
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
begin
  -- parents first: the DDL guard fires for each trigger, and finds the partitions below by itself
  for r in select c.oid as relid, c.relkind = 'p' as partitioned
             from (select rel as relid, 0 as level
                    union all
                   select p.relid, p.level from pg_partition_tree(rel) p where p.level > 0) tree
             join pg_class c on c.oid = tree.relid
            order by tree.level loop
    perform gdq.create_trigger(format('!gdq_%s_%s_t', root, queue_id), 'after truncate', r.relid, 'for each statement',
                               gdq.capture_name(queue_id, root, 't'), always);
    if r.partitioned then
      perform gdq.create_trigger(format('!gdq_%s_%s_b', root, queue_id), 'before truncate', r.relid,
                                 'for each statement', gdq.capture_name(queue_id, root, 't'), always);
    end if;
  end loop;
end
$$;
comment on function gdq.create_truncate_triggers(integer, oid, oid, boolean) is
  'Puts the TRUNCATE triggers of a captured root on a table and its partitions.';

-- drop_capture(queue_id, relid): drops the capture functions of a table, and so its triggers, which needs no ownership
-- of the table. A DROP that waits for the table has locked the function, which newer minor releases (15.20) lock to
-- replace it. So each try is shorter than the 100 ms that the DDL guard waits for the function: DDL of the table has
-- precedence.
-- Writes: drops triggers and functions. Errors: 55P03 after half a second.
create or replace function gdq.drop_capture(queue_id integer, relid oid) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '50ms'
as $$
declare
  op text;
  give_up constant timestamptz := clock_timestamp() + interval '500 ms';
begin
  loop
    begin
      -- i first: the DDL guard fires for these drops, and without function i it has nothing to switch off
      foreach op in array array['i', 'u', 'd', 't'] loop
        execute format('drop function if exists gdq_log.%I() cascade', gdq.capture_name(queue_id, relid, op));
      end loop;
      return;
    exception when lock_not_available then
      if clock_timestamp() > give_up then
        raise;
      end if;
    end;
  end loop;
end
$$;
comment on function gdq.drop_capture(integer, oid) is 'Drops the capture functions of a table, and so its triggers.';
