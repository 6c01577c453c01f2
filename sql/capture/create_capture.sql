-- create_capture(queue_id, tbl, operations, granularity, always, origin): the capture functions of a table, doing
-- nothing yet, and its triggers. CREATE TRIGGER takes the lock that waits for the writers of the moment, so it comes
-- before anything is read about the table. Functions are made for all operations: by their names the DDL guard finds
-- the table.
-- Writes: four functions, triggers on the table and its partitions. Errors: 42501, 55P03.
create or replace function gdq.create_capture(queue_id integer, tbl regclass, operations text[], granularity text,
                                              always boolean, origin boolean)
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500ms'
as $$
declare
  op text;
begin
  -- two sessions that hand functions over at once would meet in the schema's ACL
  perform pg_advisory_xact_lock(gdq.lock_key('capture', 0));
  foreach op in array array['i', 'u', 'd', 't'] loop
    perform gdq.replace_capture(queue_id, tbl, op,
      case op when 't' then gdq.truncate_body(queue_id, tbl, origin) else E'begin\n  return null;\nend' end);
    perform gdq.own_capture(format('gdq_log.%I()', gdq.capture_name(queue_id, tbl, op))::regprocedure);
  end loop;
  perform gdq.create_triggers(queue_id, tbl, tbl, operations, granularity, always);
end
$$;
comment on function gdq.create_capture(integer, regclass, text[], text, boolean, boolean) is
  'Makes the capture functions and triggers of a table.';

-- create_trigger(name, event, rel, level, function, always): one capture trigger; event as in "after insert", level
-- from REFERENCING to FOR EACH. Writes: the trigger. Errors: 42501, 55P03.
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

-- create_triggers(queue_id, root, rel, operations, granularity, always): the capture triggers of a captured root on rel
-- and the partitions under it.
--   AFTER, and a name that sorts first: before RI triggers and the application's own. The name holds the root's oid:
--   ATTACH PARTITION fails when root and leaf have row triggers of one name.
--   PostgreSQL clones row triggers to partitions, but not statement triggers, and a statement fires only those of the
--   table that it names: they are put on every partition.
--   always: they fire for a replication role too, which only the owner of a table can say.
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

-- create_truncate_triggers(queue_id, root, rel, always): TRUNCATE triggers of one captured root on rel and the
-- partitions under it. PostgreSQL clones row triggers to partitions, but not these. Writes: triggers. Errors: 42501,
-- 55P03.
create or replace function gdq.create_truncate_triggers(queue_id integer, root oid, rel oid, always boolean)
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
begin
  -- from the top: the DDL guard looks on, and finds the partitions below by itself
  for r in select rel as relid, 0 as level,
                  exists (select from pg_class c where c.oid = root and c.relkind = 'p') as partitioned
            union all
           select p.relid, p.level, true from pg_partition_tree(rel) p where p.level > 0
            order by level loop
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
