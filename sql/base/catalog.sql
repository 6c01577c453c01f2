-- What the catalogs of the server and the names of schema gdq_log say about capture.

-- capture_owner(): the role that owns capture functions: gdq_capture, or the installer where it may not use that role.
-- Writes: nothing.
create or replace function gdq.capture_owner() returns name
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select case when exists (select from pg_roles where rolname = 'gdq_capture' and not rolcanlogin and not rolsuper)
               and pg_has_role(current_user, (select oid from pg_roles where rolname = 'gdq_capture'), 'usage')
               and has_schema_privilege('gdq_capture', 'gdq_log', 'usage')
              then 'gdq_capture' else current_user end
$$;
comment on function gdq.capture_owner() is 'The role that owns capture functions.';

-- capture_name(queue_id, relid, op): the name of a capture function; op is i, u, d (changes) or t (TRUNCATE). The name
-- is made of oids, so to_regprocedure() finds it where control rows are invisible (in an old snapshot). Writes:
-- nothing.
create or replace function gdq.capture_name(queue_id integer, relid oid, op text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format('t%s_q%s_%s', relid, queue_id, op)
$$;
comment on function gdq.capture_name(integer, oid, text) is 'Name of a capture function in gdq_log.';

-- capture_function(queue_id, relid, op): a capture function by its name; NULL when there is none. Functions are
-- looked up outside MVCC, so the answer is right in an old snapshot too. Writes: nothing.
create or replace function gdq.capture_function(queue_id integer, relid oid, op text) returns regprocedure
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return to_regprocedure(format('gdq_log.%I()', gdq.capture_name(queue_id, relid, op)));
end
$$;
comment on function gdq.capture_function(integer, oid, text) is
  'A capture function by its name; NULL when there is none.';

-- capture_state(queue_id, relid): armed, disarmed, dropped or covered: the last word of resync about a captured table.
-- Writes: nothing.
create or replace function gdq.capture_state(queue_id integer, relid oid) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return coalesce((select r.kind from gdq.resync r
                    where r.queue_id = capture_state.queue_id and r.relid = capture_state.relid and r.kind <> 'gap'
                    order by r.resync_id desc limit 1), 'armed');
end
$$;
comment on function gdq.capture_state(integer, oid) is 'armed, disarmed, dropped or covered.';

-- queue_ids(): the numbers that queues may have, dropped ones included. They come from a sequence, which is fresh in
-- an old snapshot. Writes: nothing.
create or replace function gdq.queue_ids() returns setof integer
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select generate_series(1, case when is_called then last_value else 0 end)::integer from gdq.queue_queue_id_seq
$$;
comment on function gdq.queue_ids() is 'Numbers of the queues that there may be.';

-- busy_relations(): the relations of this database that other transactions hold in ACCESS EXCLUSIVE. Whoever looks at
-- one waits until that transaction ends. Writes: nothing.
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
comment on function gdq.busy_relations() is 'Relations that other transactions hold in ACCESS EXCLUSIVE.';

-- relation_bytes(relation, fork): the bytes of one fork of a relation, or (fork NULL) of all of it with its indexes
-- and out-of-line values; NULL when it is gone or cannot be looked at within the caller's lock_timeout.
-- Writes: nothing.
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

-- event_triggers_on(): whether the event triggers exist, fire always, and the server fires event triggers at all.
-- Writes: nothing.
create or replace function gdq.event_triggers_on() returns boolean
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  -- PL/pgSQL keeps the plan: every tick asks
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
