-- Capture roles: code of a table's owner can get into the capture functions of the table, as an assignment cast does
-- while ALTER ... USING converts a column. So the functions that capture changes belong to a role for the table's
-- owner, gdq_capture_<oid>. It may write into the logs of this owner's tables alone: whoever gets code into one of
-- these functions can forge only changes of his own tables, which he could make anyway. In the event logs the role may
-- only announce a change: it cannot write ev_id, and no reader takes a row without a number for an event. Functions for
-- TRUNCATE, in which no such code can run, and those that write events belong to capture_owner().

-- make_capture_role(relid): makes the role for the owner of a table, if gdq may make roles. Result: capture_role().
-- Writes: roles of the cluster, ACL of gdq_log. The caller holds lock_key('capture', 0).
create or replace function gdq.make_capture_role(relid oid) returns name
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  role name := (select 'gdq_capture_' || c.relowner from pg_class c where c.oid = relid);
begin
  if gdq.capture_owner() = 'gdq_capture' and not gdq.is_capture_role(role) then
    begin
      if not exists (select from pg_roles r where r.rolname = role) then
        begin
          execute format('create role %I nologin noinherit', role);
        exception when duplicate_object or unique_violation then
          null;  -- another database of this cluster makes it at the same moment
        end;
      end if;
      if not pg_has_role(current_user, role, 'usage') then
        execute format('grant %I to %I', role, current_user);
      end if;
      execute format('grant usage on schema gdq_log to %I', role);
    exception when insufficient_privilege then
      null;
    end;
  end if;
  return gdq.capture_role(relid);
end
$$;
comment on function gdq.make_capture_role(oid) is 'Makes the capture role for the owner of a table.';

-- own_capture(function, role): gives a generated function to a capture role. The role may create in gdq_log only while
-- this runs, so no other session ever sees it hold that right. EXECUTE is taken from PUBLIC, except for trigger
-- functions: CREATE TABLE ... PARTITION OF and ATTACH clone the triggers of a root, and check EXECUTE of the role that
-- runs them. This opens nothing: a trigger function cannot be called, and naming one takes USAGE on gdq_log. Writes:
-- owner and ACL of the function.
create or replace function gdq.own_capture(function regprocedure, role name) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (select from pg_proc p where p.oid = function and p.prorettype = 'trigger'::regtype) then
    execute format('grant execute on function %s to public', function);
  else
    execute format('revoke execute on function %s from public', function);
  end if;
  if role <> current_user then
    -- two sessions that do this at once would both update the schema's ACL, and one would fail
    perform pg_advisory_xact_lock(gdq.lock_key('capture', 0));
    execute format('grant create on schema gdq_log to %I', role);
    execute format('alter function %s owner to %I', function, role);
    execute format('revoke create on schema gdq_log from %I', role);
  end if;
end
$$;
comment on function gdq.own_capture(regprocedure, name) is 'Gives a generated function to a capture role.';

-- own_functions(queue_id, relid): gives the capture functions of a table to the roles that they belong to, with the
-- rights that they need. An earlier role keeps its rights: writers may be running the functions as that role.
-- Result: whether a function has another owner than before. Writes: roles, owners of functions, ACLs; log_ring.
create or replace function gdq.own_functions(queue_id integer, relid oid) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  role name;
  f record; moved boolean := false; witnessed bigint[] := gdq.witnessed_functions(queue_id, relid);
begin
  perform pg_advisory_xact_lock(gdq.lock_key('capture', 0));
  role := gdq.make_capture_role(relid);
  perform gdq.grant_logs(queue_id, relid, role);
  for f in select p.oid::regprocedure as name, o.wanted
             from (select gdq.capture_function(queue_id, relid, op) as f,
                          case op when 't' then gdq.capture_owner() else role end as wanted
                     from unnest(array['i', 'u', 'd', 't']) op offset 0) o
             join pg_proc p on p.oid = o.f and pg_get_userbyid(p.proowner) <> o.wanted loop
    perform gdq.own_capture(f.name, f.wanted);
    moved := true;
  end loop;
  perform gdq.witness_functions(v) from unnest(witnessed) v where moved;
  return moved;
end
$$;
comment on function gdq.own_functions(integer, oid) is
  'Gives the capture functions of a table to the roles that they belong to.';

-- grant_logs(queue_id, relid, role): lets a capture role write what the capture functions of a table write: rows of the
-- table's logs, numbers of the queue's events, and announcements. Writes: ACLs. The caller holds lock_key('capture',
-- 0).
create or replace function gdq.grant_logs(queue_id integer, relid oid, role name) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  log regclass;
begin
  if role = current_user then
    return;
  end if;
  if not has_sequence_privilege(role, format('gdq_log.q%s_ev', queue_id), 'usage') then
    execute format('grant usage on sequence gdq_log.q%s_ev to %I', queue_id, role);
  end if;
  for log in select s from gdq.event_segments(queue_id) s
              where not has_column_privilege(role, s::oid, 'ev_kind', 'insert') loop
    execute format('grant insert (ev_txid, ev_kind, ev_table) on %s to %I', log, role);
  end loop;
  for log in select ls.segment
               from gdq.captured_table ct
               join gdq.table_version v using (table_id)
               join gdq.log_segment ls using (version_id)
              where ct.queue_id = grant_logs.queue_id and ct.relid = grant_logs.relid
                and not has_table_privilege(role, ls.segment, 'insert') loop
    -- truncation changes the log's row in pg_class too, and would collide with GRANT
    execute format('lock table only %s in access share mode', log);
    execute format('grant insert on %s to %I', log, role);
  end loop;
end
$$;
comment on function gdq.grant_logs(integer, oid, name) is
  'Lets a capture role write what the capture functions of a table write.';

-- grant_queue(queue_id, role): lets capture_owner() write all events of a queue, and notes of TRUNCATE. Writes: ACLs.
create or replace function gdq.grant_queue(queue_id integer, role name) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  log regclass;
begin
  if role <> current_user then
    execute format('grant usage on sequence gdq_log.q%s_ev to %I', queue_id, role);
    for log in select s from gdq.event_segments(queue_id) s where not has_table_privilege(role, s::oid, 'insert') loop
      execute format('lock table only %s in access share mode', log);
      execute format('grant insert on %s to %I', log, role);
    end loop;
    execute format('grant select, insert, update on gdq_log.q%s_truncation to %I', queue_id, role);
  end if;
end
$$;
comment on function gdq.grant_queue(integer, name) is
  'Lets the owner of capture functions write all events of a queue.';

-- earlier_roles(table_id): capture roles that may insert into logs of a table although its functions no longer belong
-- to them. Writes: nothing.
create or replace function gdq.earlier_roles(table_id integer) returns table (log regclass, role name)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select ls.segment, a.rolname
      from gdq.captured_table ct
      join gdq.table_version v using (table_id)
      join gdq.log_segment ls using (version_id)
      join pg_class c on c.oid = ls.segment
     cross join aclexplode(c.relacl) g
      join pg_roles a on a.oid = g.grantee
     where ct.table_id = earlier_roles.table_id
       and g.privilege_type = 'INSERT'
       and a.rolname ~ '^gdq_capture(_[0-9]+)?$'
       and a.oid <> (select proowner from (select gdq.capture_function(ct.queue_id, ct.relid, 'i') as f offset 0) i
                       join pg_proc p on p.oid = i.f);
end
$$;
comment on function gdq.earlier_roles(integer) is
  'Capture roles that may insert into logs of a table although its functions no longer belong to them.';

-- revoke_logs(table_id): takes INSERT on the logs of a table from earlier_roles(). No writer may be running the
-- functions as such a role. Result: whether there was any. Writes: ACLs.
create or replace function gdq.revoke_logs(table_id integer) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
  revoked boolean := false;
begin
  for r in select e.log, e.role from gdq.earlier_roles(table_id) e loop
    execute format('lock table only %s in access share mode', r.log);
    execute format('revoke insert on %s from %I', r.log, r.role);
    revoked := true;
  end loop;
  return revoked;
end
$$;
comment on function gdq.revoke_logs(integer) is
  'Takes INSERT on the logs of a table from capture roles that its functions no longer belong to.';

-- drop_capture_roles(): drops the roles of owners none of whose tables is captured any more, unless another database of
-- the cluster uses them. Writes: roles of the cluster, ACLs.
create or replace function gdq.drop_capture_roles() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
begin
  for r in select a.oid, a.rolname from pg_roles a
            where a.rolname ~ '^gdq_capture_[0-9]+$' and pg_has_role(current_user, a.oid, 'usage')
              and exists (select from pg_shdepend d
                           where d.refclassid = 'pg_authid'::regclass and d.refobjid = a.oid and d.deptype = 'a'
                             and d.dbid = (select b.oid from pg_database b where b.datname = current_database()))
              and not exists (select from pg_proc p
                               where p.pronamespace = 'gdq_log'::regnamespace and p.proowner = a.oid)
  loop
    begin
      perform pg_advisory_xact_lock(gdq.lock_key('capture', 0));
      perform gdq.revoke_all(r.oid);
      begin
        execute format('drop role %I', r.rolname);
      exception when dependent_objects_still_exist then
        null;  -- another database uses it; its rights in this one are gone all the same
      end;
    exception
      when insufficient_privilege or undefined_object or lock_not_available or deadlock_detected or internal_error then
        null;
    end;
  end loop;
end
$$;
comment on function gdq.drop_capture_roles() is 'Drops the capture roles of owners none of whose tables is captured.';

-- revoke_all(role): takes all rights of a capture role in this database away. Writes: ACLs. Errors: XX000 when another
-- session changes one of these rights.
create or replace function gdq.revoke_all(role oid) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  role_name constant name := pg_get_userbyid(role);
  r record;
begin
  for r in select c.oid::regclass as name, c.relkind, bool_or(d.objsubid <> 0) as columns
             from pg_shdepend d join pg_class c on c.oid = d.objid
            where d.refclassid = 'pg_authid'::regclass and d.refobjid = role and d.deptype = 'a'
              and d.dbid = (select b.oid from pg_database b where b.datname = current_database())
              and d.classid = 'pg_class'::regclass and c.relnamespace = 'gdq_log'::regnamespace
            group by c.oid loop
    if r.relkind = 'S' then
      execute format('revoke all on sequence %s from %I', r.name, role_name);
    elsif r.columns then
      execute format('revoke insert (ev_txid, ev_kind, ev_table) on %s from %I', r.name, role_name);
    else
      execute format('lock table only %s in access share mode', r.name);
      execute format('revoke all on %s from %I', r.name, role_name);
    end if;
  end loop;
  execute format('revoke all on schema gdq_log from %I', role_name);
end
$$;
comment on function gdq.revoke_all(oid) is 'Takes all rights of a capture role in this database away.';
