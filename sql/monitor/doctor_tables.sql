-- doctor_tables(queue_id, patience): the part of doctor() about captured tables: table_findings() of those of
-- suspect_tables(). One that DDL has locked is left for the next time, one that goes meanwhile is passed over.
-- Writes: nothing.
create or replace function gdq.doctor_tables(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  t record;
begin
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
comment on function gdq.doctor_tables(integer, interval) is 'The part of doctor() about captured tables.';

-- suspect_tables(queue_id): the captured tables of a queue (NULL: all) of which table_findings() may find something,
-- but for tables that DDL has locked. With a thousand tables table_findings() takes seconds, so tables are left out
-- whose catalog rows tell by their xmin that all is as gdq made or saw it: no row has another xmin than note_catalog()
-- found when capture fitted, the capture functions were last replaced by the transaction that last wrote the state of
-- the log, and the triggers by the one that made them. Writes: nothing.
create or replace function gdq.suspect_tables(queue_id integer) returns setof integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  capture_owner constant name := gdq.capture_owner();
  busy constant oid[] := gdq.busy_relations();
  wanted gdq.captured_table[] := array(
    select ct from gdq.captured_table ct
     where (suspect_tables.queue_id is null or ct.queue_id = suspect_tables.queue_id) and ct.relid <> all (busy));
begin
  return query
  with tables as materialized (
    select w.* from unnest(wanted) w
  ), newest as materialized (
    select v.table_id, max(v.version_id) as version_id from gdq.table_version v group by 1
  ), functions as materialized (
    select p.proname, p.xmin, p.prosrc, p.proowner, p.prosecdef
      from pg_proc p
     where p.pronamespace = 'gdq_log'::regnamespace
  ), replaced as materialized (
    select t.table_id
      from tables t
      join newest n using (table_id)
      join gdq.log_ring r using (version_id),
           unnest(array['i', 'u', 'd']) op
     where not exists (select from functions f
                        where f.proname = gdq.capture_name(t.queue_id, t.relid, op) and f.xmin = r.xmin)
    union
    select t.table_id
      from tables t
     where not exists (select from functions f
                        where f.proname = gdq.capture_name(t.queue_id, t.relid, 't')
                          and f.prosrc = gdq.truncate_body(t.queue_id, t.relid, t.origin)
                          and pg_get_userbyid(f.proowner) = capture_owner
                          and f.prosecdef)
  )
  -- recorded: off, or changes are missing
  select t.table_id
    from tables t
   where exists (select from gdq.resync r where r.queue_id = t.queue_id and r.relid = t.relid)
  union
  -- a log that has become quiet has kept its functions
  select r.table_id from replaced r where exists (select from gdq.function_faults(r.table_id))
  union
  -- a trigger that was changed since it was made, or fires before those of gdq
  select t.table_id
    from tables t join pg_trigger g on g.tgrelid = t.relid
   where (g.tgname ~ '^!gdq_'
          and not exists (select from pg_depend d
                           where d.classid = 'pg_trigger'::regclass and d.objid = g.oid and d.xmin = g.xmin))
      or g.tgname < '!gdq_'
  union
  -- partitions and children are tables of their own
  select t.table_id
    from tables t join pg_class c on c.oid = t.relid
   where c.relkind = 'p'
      or (c.relrowsecurity and not t.allow_rls)
      or exists (select from pg_inherits i where i.inhparent = t.relid or i.inhrelid = t.relid)
  union
  -- the mark of a partition would wait for DDL of it
  select t.table_id
    from tables t
    join pg_class c on c.oid = t.relid
    left join gdq.table_check k using (table_id)
   where case when c.relkind = 'r' and not c.relispartition then
                k.catalog is distinct from gdq.catalog_mark(t.relid) end;
end
$$;
comment on function gdq.suspect_tables(integer) is 'Captured tables that may have something wrong with their capture.';

-- doctor_strays(queue_id, patience): the part of doctor() about triggers of gdq on tables that are not captured, such
-- as a partition that was detached. They do nothing but take time. Writes: nothing.
create or replace function gdq.doctor_strays(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select 'warning', 'trigger_left_over', gdq.table_name(s.relid),
         format('%s has trigger %I of gdq and is not captured by that', gdq.table_name(s.relid), s.name),
         case when s.own then 'gdq doctor --fix drops it.'
              else format('As the owner of the table: DROP TRIGGER %I ON %s', s.name, gdq.table_name(s.relid)) end,
         s.own
    from gdq.stray_triggers(doctor_strays.queue_id) s
   order by 3, 4
$$;
comment on function gdq.doctor_strays(integer, interval) is 'The part of doctor() about triggers that are left over.';
