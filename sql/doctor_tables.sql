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
             from gdq.suspect_tables(doctor_tables.queue_id) s join gdq.captured_table ct on ct.table_id = s order by 2 loop
    begin
      return query select f.severity, f.code, t.name, f.cause, f.cure, f.fixable from gdq.table_findings(t.table_id) f;
    exception when lock_not_available or no_data_found or undefined_table or internal_error then
      null;
    end;
  end loop;
end
$$;
comment on function gdq.doctor_tables(integer, interval) is 'The part of doctor() about captured tables.';

-- suspect_tables(queue_id): the captured tables of a queue (NULL: all), but for those that DDL has locked, of which table_findings() may find something. With a
-- thousand tables it takes seconds to look at all of them as closely as it does, so those are left out of which the
-- catalogs tell that all is as gdq made or saw it: no row of theirs has another xmin than note_catalog() found when
-- capture fitted, the capture functions were last replaced by the transaction that last wrote the state of the log, and
-- the triggers by the one that made them. Writes: nothing.
create or replace function gdq.suspect_tables(queue_id integer) returns setof integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  capture_owner constant name := gdq.capture_owner();
  busy constant oid[] := gdq.busy_relations();
  wanted gdq.captured_table[] := array(select ct from gdq.captured_table ct where (suspect_tables.queue_id is null or ct.queue_id = suspect_tables.queue_id) and ct.relid <> all (busy));
begin
  return query
  with tables as materialized (
    select w.* from unnest(wanted) w
  ), newest as materialized (
    select v.table_id, max(v.version_id) as version_id from gdq.table_version v group by 1
  ), functions as materialized (
    select p.proname, p.xmin, p.prosrc, p.proowner, p.prosecdef from pg_proc p where p.pronamespace = 'gdq_log'::regnamespace
  ), replaced as materialized (
    select t.table_id
      from tables t join newest n using (table_id) join gdq.log_ring r using (version_id), unnest(array['i', 'u', 'd']) op
     where not exists (select from functions f where f.proname = gdq.capture_name(t.queue_id, t.relid, op) and f.xmin = r.xmin)
    union
    select t.table_id from tables t
     where not exists (select from functions f where f.proname = gdq.capture_name(t.queue_id, t.relid, 't') and f.prosrc = gdq.truncate_body(t.queue_id, t.relid, t.origin)
                          and pg_get_userbyid(f.proowner) = capture_owner and f.prosecdef)
  )
  -- recorded: off, or changes are missing
  select t.table_id from tables t where exists (select from gdq.resync r where r.queue_id = t.queue_id and r.relid = t.relid)
  union
  -- a log that has become quiet has kept its functions
  select r.table_id from replaced r where exists (select from gdq.function_faults(r.table_id))
  union
  -- a trigger that was touched, or fires before those of gdq
  select t.table_id
    from tables t join pg_trigger g on g.tgrelid = t.relid
   where (g.tgname ~ '^!gdq_' and not exists (select from pg_depend d where d.classid = 'pg_trigger'::regclass and d.objid = g.oid and d.xmin = g.xmin))
      or g.tgname < '!gdq_'
  union
  -- partitions and children are tables of their own
  select t.table_id from tables t join pg_class c on c.oid = t.relid
   where c.relkind = 'p' or (c.relrowsecurity and not t.allow_rls) or exists (select from pg_inherits i where i.inhparent = t.relid or i.inhrelid = t.relid)
  union
  -- the mark of a partition would wait for DDL of it
  select t.table_id from tables t join pg_class c on c.oid = t.relid left join gdq.table_check k using (table_id)
   where case when c.relkind = 'r' and not c.relispartition then k.catalog is distinct from gdq.catalog_mark(t.relid) end;
end
$$;
comment on function gdq.suspect_tables(integer) is 'Captured tables that may have something wrong with their capture.';

-- table_findings(table_id): what is wrong with the capture of one table. What a gap may have come from is an error.
-- Writes: nothing. Errors: P0002 when it is gone.
create or replace function gdq.table_findings(table_id integer)
  returns table (severity text, code text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  t gdq.captured_table;
  name text;
  state text;
  reason text;
  fix constant text := 'gdq doctor --fix: it is captured again, and recorded that changes may be missing.';
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = table_findings.table_id;
  state := gdq.capture_state(t.queue_id, t.relid);
  name := coalesce(gdq.table_name(t.relid), t.table_name);
  reason := (select o from gdq.open_resync(t.queue_id, t.relid, t.table_id) o);
  if state in ('dropped', 'covered') then
    return;
  elsif state = 'disarmed' then
    return query select 'error', 'capture_off', format('capture of %s is off: %s', name, reason), 'Mend that; gdq ticker switches it on again, or gdq doctor --fix at once.', true;
    return;
  elsif reason is not null then
    return query select 'warning', 'resync', format('changes of %s are missing: %s', name, reason), 'Consumers read the table afresh, and views load in full.', false;
  end if;
  return query select 'error', 'columns_changed', format('the columns of %s are not those that its log was made for', name), fix, true
    where not gdq.version_fits(gdq.current_version(t.table_id), gdq.describe_table(t.table_id));
  return query select 'error', 'cannot_capture', format('capture of %s cannot be complete: %s', name, f), 'Mend that, then gdq doctor --fix.', true
    from gdq.capture_fault(t.table_id) f where f is not null;
  return query select 'error', 'capture_function', format('capture function %s of %s %s', f.name, name, f.fault),
                      case when f.own then fix else format('As a superuser: ALTER FUNCTION gdq_log.%I() OWNER TO %I', f.name, gdq.capture_owner()) end, f.own
    from gdq.function_faults(t.table_id) f;
  return query select f.severity, f.code, f.cause, coalesce(f.cure, fix), f.fixable from gdq.trigger_findings(t.table_id) f;
  return query select 'warning', 'row_security', format('%s has row level security and is captured without allow_rls: consumers read all its rows', name),
                      'Remove it from the queue, or gdq alter-table --allow-rls when that is wanted.', false
    from pg_class c where c.oid = t.relid and c.relrowsecurity and not t.allow_rls;
end
$$;
comment on function gdq.table_findings(integer) is 'What is wrong with the capture of one table.';

-- function_faults(table_id): capture functions of an armed table that are not what arm() makes, by name. The body is
-- compared letter by letter: another one may have missed or invented changes. own: gdq may replace it. Writes: nothing.
create or replace function gdq.function_faults(table_id integer) returns table (name text, fault text, own boolean)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  -- a change may be announced in a segment that the event log has left since
  announced constant text := '(insert into gdq_log\.q\d+_s)\d+( \(ev_txid, ev_kind, ev_table\))';
begin
  -- PL/pgSQL keeps the plan: this is called for each table
  return query
  select gdq.capture_name(ct.queue_id, ct.relid, op),
         case when p.oid is null then 'is missing'
              when pg_get_userbyid(p.proowner) <> gdq.capture_owner() then format('belongs to %s, not to %s', p.proowner::regrole, gdq.capture_owner())
              when not p.prosecdef or l.lanname <> 'plpgsql' then 'is not SECURITY DEFINER in PL/pgSQL'
              else 'does not do what it should' end,
         p.oid is null or pg_has_role(p.proowner, 'usage')
    from gdq.captured_table ct
    join gdq.log_ring r on r.version_id = gdq.current_version(ct.table_id)
   cross join unnest(array['i', 'u', 'd', 't']) op
    left join pg_proc p on p.pronamespace = 'gdq_log'::regnamespace and p.proname = gdq.capture_name(ct.queue_id, ct.relid, op) and p.pronargs = 0
    left join pg_language l on l.oid = p.prolang
   where ct.table_id = function_faults.table_id
     and (p.oid is null or pg_get_userbyid(p.proowner) <> gdq.capture_owner() or not p.prosecdef or l.lanname <> 'plpgsql'
          or regexp_replace(p.prosrc, announced, '\1\2')
             <> case when op = 't' then gdq.truncate_body(ct.queue_id, ct.relid, ct.origin)
                     when r.activity = 'busy' then gdq.capture_body(r.version_id, r.current_slot, op)
                     else regexp_replace(gdq.announcing_body(gdq.capture_body(r.version_id, r.current_slot, op), ct.queue_id, ct.relid), announced, '\1\2') end);
end
$$;
comment on function gdq.function_faults(integer) is 'Capture functions of a table that are not what they should be.';

-- partition_oids(root): a table and all its partitions, from the catalogs, without the locks of pg_partition_tree().
-- Writes: nothing.
create or replace function gdq.partition_oids(root oid) returns oid[]
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (select from pg_class c where c.oid = root and c.relkind <> 'p') then
    return array[root];
  end if;
  return array(
    with recursive tree(relid) as (
      select root
      union all
      select c.oid from tree t join pg_inherits i on i.inhparent = t.relid join pg_class c on c.oid = i.inhrelid where c.relispartition and c.relkind in ('r', 'p')
    )
    select relid from tree);
end
$$;
comment on function gdq.partition_oids(oid) is 'A table and all its partitions.';

-- trigger_findings(table_id): what is wrong with the triggers of a captured table: capture triggers that do not fire,
-- are gone, doubled or were touched; partitions without their TRUNCATE triggers; triggers that fire before those of gdq.
-- The xmin of a trigger names the transaction that changed it last; where that is not the one that made its dependency,
-- it was disabled for a while. cure NULL: gdq doctor --fix. Writes: nothing.
create or replace function gdq.trigger_findings(table_id integer)
  returns table (severity text, code text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  t gdq.captured_table;
  fault text := gdq.trigger_fault(table_id);
  pattern text;
  rels oid[];
  functions oid[];
  stamps constant boolean := current_setting('track_commit_timestamp')::boolean;
  tg record;
  told boolean := false;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = trigger_findings.table_id;
  pattern := format('^!gdq_%s_%s_[iudtb]$', t.relid::oid, t.queue_id);
  rels := gdq.partition_oids(t.relid);
  functions := array(select gdq.capture_function(t.queue_id, t.relid, op) from unnest(array['i', 'u', 'd', 't']) op);
  for tg in select g.tgname, gdq.table_name(g.tgrelid) as rel, g.tgenabled, g.xmin, case when stamps then pg_xact_commit_timestamp(g.xmin) end as stamp,
                   g.tgname !~ pattern as renamed, pg_has_role(session_user, c.relowner, 'usage') as own,
                   not exists (select from pg_depend d where d.classid = 'pg_trigger'::regclass and d.objid = g.oid and d.xmin = g.xmin) as touched
              from pg_trigger g join pg_class c on c.oid = g.tgrelid
             where g.tgrelid = any (rels) and (g.tgname ~ pattern or g.tgfoid = any (functions))
             order by g.tgrelid, g.tgname loop
    if tg.renamed then
      return query select 'error', 'trigger_renamed', format('trigger %I of %s is a capture trigger under another name: changes would come twice', tg.tgname, tg.rel),
                          case when tg.own then null else format('As the owner of the table: DROP TRIGGER %I ON %s', tg.tgname, tg.rel) end, tg.own;
      told := true;
    elsif tg.tgenabled not in ('A', case when t.always then 'A' else 'O' end) then
      return query select 'error', 'trigger_disabled', format('capture trigger %I of %s is %s, by transaction %s%s', tg.tgname, tg.rel,
                          case tg.tgenabled when 'R' then 'enabled for replicas only' when 'O' then 'not enabled ALWAYS' else 'disabled' end, tg.xmin, ' at ' || tg.stamp), null::text, true;
      told := true;
    elsif tg.touched and tg.tgenabled = 'O' then
      return query select 'error', 'trigger_touched', format('capture trigger %I of %s was changed by transaction %s%s: it may have been disabled for a while', tg.tgname, tg.rel,
                          tg.xmin, ' at ' || tg.stamp), null::text, true;
    end if;
  end loop;
  if fault is not null and not told then
    return query select 'error', 'trigger_missing', fault, null::text, true;
  end if;
  return query
  select 'error', 'partition_not_captured', format('partition %s has no TRUNCATE trigger of gdq', gdq.table_name(p)),
         case when has_table_privilege(p, 'TRIGGER') then null else format('GRANT TRIGGER ON %s TO %I, then gdq doctor --fix.', gdq.table_name(p), current_user) end, has_table_privilege(p, 'TRIGGER')
    from unnest(rels) p
   where p <> t.relid and 'truncate' = any (t.operations)
     and not exists (select from pg_trigger g where g.tgrelid = p and g.tgname = format('!gdq_%s_%s_t', t.relid::oid, t.queue_id));
  return query
  select 'warning', 'trigger_outranked', format('trigger %I of %s fires before those of gdq: what it changes in its own table is logged before what made it fire', g.tgname, gdq.table_name(g.tgrelid)),
         'Give it a name that sorts after !gdq_.', false
    from pg_trigger g
   where g.tgrelid = any (rels) and g.tgname::text collate "C" < '!gdq_' and not g.tgisinternal and g.tgparentid = 0
     and g.tgenabled <> 'D' and not g.tgdeferrable and g.tgtype & 1 = 1 and g.tgtype & 66 = 0;
end
$$;
comment on function gdq.trigger_findings(integer) is 'What is wrong with the triggers of a captured table.';

-- doctor_strays(queue_id, patience): the part of doctor() about triggers of gdq on tables that are not captured, such as
-- a partition that was detached. They do nothing but take time. Writes: nothing.
create or replace function gdq.doctor_strays(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select 'warning', 'trigger_left_over', gdq.table_name(s.relid), format('%s has trigger %I of gdq and is not captured by that', gdq.table_name(s.relid), s.name),
         case when s.own then 'gdq doctor --fix drops it.' else format('As the owner of the table: DROP TRIGGER %I ON %s', s.name, gdq.table_name(s.relid)) end, s.own
    from gdq.stray_triggers(doctor_strays.queue_id) s order by 3, 4
$$;
comment on function gdq.doctor_strays(integer, interval) is 'The part of doctor() about triggers that are left over.';

-- stray_triggers(queue_id): triggers with a name or a function of gdq's on tables that are not captured by it; own: the
-- session may drop them. Writes: nothing.
create or replace function gdq.stray_triggers(queue_id integer) returns table (relid oid, name name, own boolean)
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  with triggers as (
    select g.tgrelid, g.tgname, (regexp_match(p.proname, '^t(\d+)_q\d+_[iudt]$'))[1]::oid as root, (regexp_match(p.proname, '^t\d+_q(\d+)_[iudt]$'))[1]::integer as queue_of
      from pg_trigger g join pg_proc p on p.oid = g.tgfoid
     where p.pronamespace = 'gdq_log'::regnamespace and not g.tgisinternal and g.tgparentid = 0
  )
  select g.tgrelid, g.tgname, pg_has_role(session_user, c.relowner, 'usage')
    from triggers g join pg_class c on c.oid = g.tgrelid
   where (stray_triggers.queue_id is null or g.queue_of = stray_triggers.queue_id)
     and not exists (select from gdq.captured_table ct where ct.queue_id = g.queue_of and ct.relid = g.root
                        and (g.tgrelid = ct.relid or g.tgrelid = any (gdq.partition_oids(ct.relid))))
$$;
comment on function gdq.stray_triggers(integer) is 'Triggers of gdq on tables that are not captured.';
