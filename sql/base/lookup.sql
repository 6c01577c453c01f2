-- Lookups and checks with which nearly every function begins: of the queue, the table, the era, the role and the
-- transaction.

-- find_queue(queue): the id of a queue. Every function that begins with it refuses a queue that was restored and not
-- rebased. Writes: nothing. Errors: 42704 when there is none of that name; GDQ07.
create or replace function gdq.find_queue(queue text) returns integer
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
begin
  select q.queue_id into id from gdq.queue q where q.queue_name = queue;
  if id is null then
    raise exception 'queue "%" does not exist', queue
      using errcode = 'undefined_object',
            hint = 'List the queues with gdq.queue_info(), make one with gdq.create_queue().';
  end if;
  perform gdq.require_era(id);
  return id;
end
$$;
comment on function gdq.find_queue(text) is 'Id of a queue by name; error 42704 when there is none.';

-- find_table(queue, tbl): the id of a captured table of a queue. Writes: nothing. Errors: 42704, GDQ07.
create or replace function gdq.find_table(queue text, tbl regclass) returns integer
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
  queue_of integer := gdq.find_queue(queue);
begin
  select ct.table_id into id from gdq.captured_table ct where ct.queue_id = queue_of and ct.relid = tbl;
  if id is null then
    raise exception 'table % is not captured by queue "%"', tbl, queue
      using errcode = 'undefined_object', hint = 'Add it with gdq.add_table().';
  end if;
  return id;
end
$$;
comment on function gdq.find_table(text, regclass) is
  'Id of a captured table of a queue; error 42704 when the queue does not capture it.';

-- table_name(relid): the schema-qualified, quoted name of a table, whatever the search_path; NULL when it is gone.
-- Writes: nothing.
create or replace function gdq.table_name(relid oid) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
as $$
#variable_conflict use_column
begin
  return (
    select format('%I.%I', n.nspname, c.relname)
      from pg_class c join pg_namespace n on n.oid = c.relnamespace
     where c.oid = relid);
end
$$;
comment on function gdq.table_name(oid) is 'Schema-qualified, quoted name of a table; NULL when it is gone.';

-- last_table_name(table_id): the last known name of a captured table, which may be gone. Writes: nothing.
create or replace function gdq.last_table_name(table_id integer) returns text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce((select r.table_name from gdq.table_rename r
                    where r.table_id = last_table_name.table_id order by r.rename_id desc limit 1),
                  (select ct.table_name from gdq.captured_table ct where ct.table_id = last_table_name.table_id))
$$;
comment on function gdq.last_table_name(integer) is 'The last known name of a captured table.';

-- current_version(table_id): id of the newest version of a captured table. Writes: nothing.
create or replace function gdq.current_version(table_id integer) returns bigint
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select max(v.version_id) from gdq.table_version v where v.table_id = current_version.table_id
$$;
comment on function gdq.current_version(integer) is 'Id of the newest version of a captured table.';

-- era_of(queue_id): the era that a queue is in; NULL when the queue was restored from a dump and not rebased. Writes:
-- nothing.
create or replace function gdq.era_of(queue_id integer) returns gdq.era
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select e
      from (select ee as e, ee.written_by = ee.xmin and ee.written_in = 'gdq.era'::regclass as own
              from gdq.era ee where ee.queue_id = era_of.queue_id order by ee.era_no desc limit 1) newest
     where own);
end
$$;
comment on function gdq.era_of(integer) is
  'The era that a queue is in; NULL when it was restored from a dump and not rebased.';

-- require_era(queue_id): error when a queue (NULL: any queue) was restored from a dump and not rebased. Writes:
-- nothing. Errors: GDQ07.
create or replace function gdq.require_era(queue_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  restored text;
begin
  if queue_id is null then
    select r.queue_name into restored from gdq.restored_queues() r limit 1;
  else
    -- era_of() in the same query: every call of a consumer comes here
    select q.queue_name into restored
      from gdq.queue q
     where q.queue_id = require_era.queue_id
       and (select ee.written_by = ee.xmin and ee.written_in = 'gdq.era'::regclass from gdq.era ee
             where ee.queue_id = q.queue_id order by ee.era_no desc limit 1) is not true;
  end if;
  if restored is not null then
    raise exception 'queue "%" was restored from a dump: its ticks, positions and logs are of another cluster', restored
      using errcode = 'GDQ07',
            hint = 'gdq rebase, or SELECT * FROM gdq.rebase(), starts a new era: consumers read their tables afresh.';
  end if;
end
$$;
comment on function gdq.require_era(integer) is 'Error GDQ07 when a queue was restored from a dump and not rebased.';

-- restored_queues(): the queues that were restored from a dump and not rebased yet. Writes: nothing.
create or replace function gdq.restored_queues() returns setof gdq.queue
language plpgsql volatile rows 1 security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return query
    select q.* from gdq.queue q
     where not exists (select from (select ee.xmin as xmin, ee.written_by, ee.written_in from gdq.era ee
                                     where ee.queue_id = q.queue_id order by ee.era_no desc limit 1) e
                        where e.written_by = e.xmin and e.written_in = 'gdq.era'::regclass)
     order by q.queue_name;
end
$$;
comment on function gdq.restored_queues() is 'The queues that were restored from a dump and not rebased yet.';

-- queue_paused(queue_id): whether a queue is paused. Writes: nothing.
create or replace function gdq.queue_paused(queue_id integer) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (select q.paused from gdq.queue q where q.queue_id = queue_paused.queue_id);
end
$$;
comment on function gdq.queue_paused(integer) is 'Whether a queue is paused.';

-- refuse_paused(queue_id): error when a queue is paused. Writes: nothing. Errors: 55000.
create or replace function gdq.refuse_paused(queue_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if gdq.queue_paused(queue_id) then
    raise exception 'queue "%" is paused',
      (select q.queue_name from gdq.queue q where q.queue_id = refuse_paused.queue_id)
      using errcode = 'object_not_in_prerequisite_state', hint = 'gdq.resume() lets it go on.';
  end if;
end
$$;
comment on function gdq.refuse_paused(integer) is 'Error 55000 when a queue is paused.';

-- require_read_committed(what): error unless the transaction is READ COMMITTED, on the primary; what: the caller's
-- task, for the message.
-- Ticks, positions and truncation checks need a fresh snapshot per statement: in REPEATABLE READ they would see neither
-- a row committed since nor another worker's position. A standby's snapshot lists no running transactions.
-- Writes: nothing. Errors: GDQ04.
create or replace function gdq.require_read_committed(what text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception '% needs READ COMMITTED, this transaction is %',
      what, upper(current_setting('transaction_isolation'))
      using errcode = 'GDQ04', hint = 'Begin the transaction with ISOLATION LEVEL READ COMMITTED.';
  end if;
  if pg_is_in_recovery() then
    raise exception '% needs the primary server, this is a standby', what using errcode = 'GDQ04';
  end if;
end
$$;
comment on function gdq.require_read_committed(text) is
  'Error GDQ04 unless the transaction is READ COMMITTED on the primary.';

-- lock_key(class, id): the advisory lock key of one thing.
--   class: tick: a queue's tick order; position: a queue's registrations against its truncations; capture: the capture
--   functions of one table (id: its oid); control: rotation of the control tables (id: 0); token: events put aside
--   under a batch's token against the end of the batch; view: the refreshes of one view; drop: dropping logs
--   against maintenance, which has looked for them (id: 0); alarm: shared by transactions that alter captured tables
--   (id: 0); reader: the reader of one version's log.
-- Keys have a prefix of gdq's own ("gdq" in the top bytes). Writes: nothing.
create or replace function gdq.lock_key(class text, id oid) returns bigint
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (x'676471'::bigint << 40)
       | (case class when 'tick' then 1
                     when 'position' then 2
                     when 'capture' then 3
                     when 'control' then 4
                     when 'token' then 5
                     when 'view' then 6
                     when 'drop' then 7
                     when 'alarm' then 8
                     when 'reader' then 9 end::bigint << 32)
       | id::bigint;
end
$$;
comment on function gdq.lock_key(text, oid) is
  'The advisory lock key of one thing, such as a queue''s ticks or a table''s capture functions.';

-- invoker(): the role that the session acts as: that of SET ROLE, else the login's. It is not current_user, which
-- inside the functions of gdq is their owner. Code that a session calls acts as that role too, as always in PostgreSQL.
-- But VACUUM, ANALYZE, REINDEX and REFRESH run code of a table's owner in another role's session, and that code must
-- not get the session's rights. PostgreSQL refuses some commands there, which shows such a call. Writes: nothing.
-- Errors: 42501.
create or replace function gdq.invoker() returns name
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  begin
    deallocate "gdq: no statement has this name";
  exception
    when invalid_sql_statement_name then
      null;
    when insufficient_privilege then
      raise exception 'gdq cannot tell for whom this runs: maintenance of a table runs code of its owner'
        using errcode = 'insufficient_privilege',
              hint = 'Call gdq from a session of its own, not from an index or a materialized view.';
  end;
  return coalesce(nullif(current_setting('role'), 'none'), session_user);
end
$$;
comment on function gdq.invoker() is 'The role that the session acts as.';

-- is_administrator(role): whether a role has the rights of gdq_admin or of the owner of gdq. Writes: nothing.
create or replace function gdq.is_administrator(role name) returns boolean
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select coalesce(bool_or(pg_has_role(r.oid, a.oid, 'usage')), false)
      from pg_roles r, pg_roles a
     where r.rolname = role
       and (a.rolname = 'gdq_admin' or a.oid = (select n.nspowner from pg_namespace n where n.nspname = 'gdq')));
end
$$;
comment on function gdq.is_administrator(name) is 'Whether a role has the rights of gdq_admin or of the owner of gdq.';
