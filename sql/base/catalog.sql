-- Lookups in the catalogs of the server: capture functions by their names, states of capture, locks and sizes.

-- capture_owner(): the role that owns the functions that write TRUNCATE, and all capture functions where gdq may not
-- make a role for each owner of tables: gdq_capture, or the installer where it may not use that role. Writes: nothing.
create or replace function gdq.capture_owner() returns name
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select case when gdq.is_capture_role('gdq_capture') then 'gdq_capture' else current_user end
$$;
comment on function gdq.capture_owner() is
  'The role that owns capture functions where their table''s owner has no role of his own for them.';

-- capture_role(relid): the role that owns the functions that capture changes of a table: gdq_capture_<oid of the
-- table's owner>, which may write into the logs of this owner's tables alone; capture_owner() where gdq has no such
-- role. See make_capture_role(). Writes: nothing.
create or replace function gdq.capture_role(relid oid) returns name
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  role name := (select 'gdq_capture_' || c.relowner from pg_class c where c.oid = relid);
begin
  return case when gdq.is_capture_role(role) then role else gdq.capture_owner() end;
end
$$;
comment on function gdq.capture_role(oid) is 'The role that owns the functions that capture changes of a table.';

-- is_capture_role(role): whether a role exists that can own capture functions: nobody can log in as it, the installer
-- may use it, and it finds the logs. Writes: nothing.
create or replace function gdq.is_capture_role(role name) returns boolean
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (select from pg_roles r
                  where r.rolname = role and not r.rolcanlogin and not r.rolsuper
                    and pg_has_role(current_user, r.oid, 'usage')
                    and has_schema_privilege(r.oid, 'gdq_log', 'usage'));
end
$$;
comment on function gdq.is_capture_role(name) is 'Whether a role exists that can own capture functions.';

-- capture_name(queue_id, relid, op): the name of a capture function; op is i, u, d (changes) or t (TRUNCATE). The name
-- is made of oids, so to_regprocedure() finds it where control rows are invisible (in an old snapshot). Writes:
-- nothing.
create or replace function gdq.capture_name(queue_id integer, relid oid, op text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format('t%s_q%s_%s', relid, queue_id, op)
$$;
comment on function gdq.capture_name(integer, oid, text) is 'Name of a capture function in gdq_log.';

-- capture_function(queue_id, relid, op): the capture function of a table and operation; NULL when there is none.
-- Functions are looked up outside MVCC, so the answer is right in an old snapshot too. A join with pg_proc asks it in a
-- subquery with OFFSET 0: it is volatile, and would be called for each row of pg_proc. Writes: nothing.
create or replace function gdq.capture_function(queue_id integer, relid oid, op text) returns regprocedure
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return to_regprocedure(format('gdq_log.%I()', gdq.capture_name(queue_id, relid, op)));
end
$$;
comment on function gdq.capture_function(integer, oid, text) is
  'The capture function of a table and operation; NULL when there is none.';

-- capture_state(queue_id, relid): the state of capture of a table: armed, disarmed, dropped or covered (captured
-- through its root). It is the newest kind in resync, gaps aside; armed without any. Writes: nothing.
create or replace function gdq.capture_state(queue_id integer, relid oid) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return coalesce((select r.kind from gdq.resync r
                    where r.queue_id = capture_state.queue_id and r.relid = capture_state.relid and r.kind <> 'gap'
                    order by r.resync_id desc limit 1), 'armed');
end
$$;
comment on function gdq.capture_state(integer, oid) is
  'The state of capture of a table: armed, disarmed, dropped or covered.';

-- queue_ids(): the ids that queues may have, dropped queues included. They come from a sequence, whose value is current
-- even in an old snapshot. Writes: nothing.
create or replace function gdq.queue_ids() returns setof integer
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select generate_series(1, case when is_called then last_value else 0 end)::integer from gdq.queue_queue_id_seq
$$;
comment on function gdq.queue_ids() is 'The ids that queues may have, dropped queues included.';

-- busy_relations(): the relations of this database that other transactions have locked ACCESS EXCLUSIVE. A session that
-- reads one waits until that transaction ends. Writes: nothing.
create or replace function gdq.busy_relations() returns oid[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return array(select l.relation from pg_locks l
                where l.locktype = 'relation' and l.mode = 'AccessExclusiveLock' and l.granted
                  and l.pid is distinct from pg_backend_pid()
                  and l.database = (select d.oid from pg_database d where d.datname = current_database()));
end
$$;
comment on function gdq.busy_relations() is 'Relations that other transactions have locked ACCESS EXCLUSIVE.';

-- locked_tables(modes): the relations of this database that this transaction has locked in one of these modes. Column
-- DDL takes ACCESS EXCLUSIVE, trigger DDL SHARE ROW EXCLUSIVE. The lock table is more exact than the list of DDL
-- commands: it contains the children, leaves and typed tables that a command reached through a parent or a type, and
-- the tables from which a CASCADE removed a column. And it is current in an old snapshot. Writes: nothing.
create or replace function gdq.locked_tables(variadic modes text[]) returns oid[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return array(select l.relation from pg_locks l
                where l.pid = pg_backend_pid() and l.locktype = 'relation' and l.granted and l.mode = any (modes)
                  and l.database = (select d.oid from pg_database d where d.datname = current_database()));
end
$$;
comment on function gdq.locked_tables(text[]) is 'Relations that this transaction has locked in one of these modes.';

-- relation_bytes(relation, fork): bytes of one fork of a relation; fork NULL: of the whole relation with indexes and
-- out-of-line values. NULL when it is gone, or locked for longer than the caller's lock_timeout. Writes: nothing.
create or replace function gdq.relation_bytes(relation regclass, fork text default null) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return case when fork is null then pg_total_relation_size(relation) else pg_relation_size(relation, fork) end;
exception when lock_not_available or undefined_table or internal_error then
  return null;
end
$$;
comment on function gdq.relation_bytes(regclass, text) is 'Bytes of a relation; NULL when it is gone or busy.';

-- event_triggers_on(): whether the event triggers of gdq exist and fire always, and the setting event_triggers is on.
-- Writes: nothing.
create or replace function gdq.event_triggers_on() returns boolean
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  -- in PL/pgSQL, which keeps the plan: every tick comes here
  return coalesce(current_setting('event_triggers', true), 'on') = 'on'
     and 4 = (select count(*) from pg_event_trigger e
               where e.evtenabled = 'A'
                 and (e.evtname, e.evtevent, e.evtfoid) in (
                   ('!gdq_ddl', 'ddl_command_end', 'gdq.ddl_guard'::regproc),
                   ('!gdq_drop', 'sql_drop', 'gdq.ddl_guard'::regproc),
                   ('!gdq_rewrite', 'table_rewrite', 'gdq.rewrite_guard'::regproc),
                   ('!gdq_capture_role', 'ddl_command_start', 'gdq.capture_role_guard'::regproc)));
end
$$;
comment on function gdq.event_triggers_on() is 'Whether the event triggers of gdq exist and fire.';
