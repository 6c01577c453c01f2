-- doctor_tables(queue_id, patience): the findings of doctor() about captured tables: table_findings() of
-- suspect_tables(), and a capture role that owners of tables share, see make_capture_role(). A table that DDL has
-- locked or drops meanwhile is left out. Writes: nothing.
create or replace function gdq.doctor_tables(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  t record;
begin
  return query
  select 'warning', 'shared_capture_role', 'gdq_capture',
         format('capture functions for tables of %s owners belong to gdq_capture: code of one of these owners could '
                'forge changes of the others'' tables', count(distinct c.relowner)),
         format('ALTER ROLE %I CREATEROLE; gdq ticker then gives each owner a capture role within a minute.',
                current_user),
         false
    from gdq.captured_table ct
    join pg_class c on c.oid = ct.relid
   cross join lateral (select gdq.capture_function(ct.queue_id, ct.relid, 'i') as number offset 0) f
    join pg_proc p on p.oid = f.number
   where (doctor_tables.queue_id is null or ct.queue_id = doctor_tables.queue_id)
     and pg_get_userbyid(p.proowner) = 'gdq_capture'
  having count(distinct c.relowner) > 1;
  for t in select ct.table_id, coalesce(gdq.table_name(ct.relid), ct.table_name) as name
             from gdq.suspect_tables(doctor_tables.queue_id) s join gdq.captured_table ct on ct.table_id = s
            order by 2 loop
    begin
      return query select f.severity, f.code, t.name, f.cause, f.cure, f.fixable from gdq.table_findings(t.table_id) f;
    exception when lock_not_available or no_data_found or undefined_table or internal_error then
      null;
    end;
  end loop;
end
$$;
comment on function gdq.doctor_tables(integer, interval) is 'Findings of doctor() about captured tables.';

-- suspect_tables(queue_id): the captured tables of a queue (NULL: of all) for which table_findings() may find
-- something; tables that DDL has locked are left out.
-- With a thousand tables table_findings() takes seconds. So a table is left out of which the catalogs hold what gdq has
-- witnessed. Writes: nothing.
create or replace function gdq.suspect_tables(queue_id integer) returns setof integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  busy constant oid[] := gdq.busy_relations();
  wanted constant integer[] := array(
    select ct.table_id from gdq.captured_table ct
     where (suspect_tables.queue_id is null or ct.queue_id = suspect_tables.queue_id) and ct.relid <> all (busy));
begin
  return query
  -- capture is recorded as off, or changes as missing
  select ct.table_id
    from gdq.captured_table ct
   where ct.table_id = any (wanted)
     and exists (select from gdq.resync r where r.queue_id = ct.queue_id and r.relid = ct.relid)
  union
  select u.table_id from gdq.unwitnessed(wanted) u
  union
  -- triggers that fire before those of gdq; row level security; a partition without a TRUNCATE trigger
  select ct.table_id
    from gdq.captured_table ct join pg_class c on c.oid = ct.relid
   where ct.table_id = any (wanted)
     and ((c.relrowsecurity and not ct.allow_rls)
          or c.relkind = 'p'
          or exists (select from pg_trigger g
                      where g.tgrelid = ct.relid and g.tgname < '!gdq_'));
end
$$;
comment on function gdq.suspect_tables(integer) is 'Captured tables that may have something wrong with their capture.';

-- doctor_strays(queue_id, patience): the findings of doctor() about triggers of gdq on tables that are not captured,
-- such as a detached partition. They do nothing but take time. Writes: nothing.
create or replace function gdq.doctor_strays(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select 'warning', 'trigger_left_over', gdq.table_name(s.relid),
         format('%s has trigger %I of gdq, which does not capture it', gdq.table_name(s.relid), s.name),
         case when s.own then 'gdq doctor --fix drops it.'
              else format('As the owner of the table: DROP TRIGGER %I ON %s', s.name, gdq.table_name(s.relid)) end,
         s.own
    from gdq.stray_triggers(doctor_strays.queue_id) s
   order by 3, 4
$$;
comment on function gdq.doctor_strays(integer, interval) is 'Findings of doctor() about triggers that are left over.';
