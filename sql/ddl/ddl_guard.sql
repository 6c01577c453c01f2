-- The DDL guard keeps capture functions in step with their tables, inside the transaction of the DDL itself. It fires
-- for every DDL of the database and never lets an error out: where it cannot go on, it switches capture of the table
-- off and records that. It only inserts into control tables; the one row that it updates or deletes is that of a
-- partition which the transaction has locked.

-- ddl_guard(): the event trigger on ddl_command_end and on sql_drop. sql_drop comes first and sees what a DROP did:
-- event triggers of the application that write to a captured table must not meet functions that do not fit the table.
-- It has qualified operators and no SET clauses, since it runs for every DDL of the database. Writes and errors: as
-- capture_created(), follow_drop() and follow_ddl().
create or replace function gdq.ddl_guard() returns event_trigger
language plpgsql volatile security definer
as $$
begin
  -- first: the guard of an inheritance parent then finds its new child captured
  if TG_EVENT operator(pg_catalog.=) 'ddl_command_end'
     and TG_TAG operator(pg_catalog.=) any (
           '{CREATE TABLE,CREATE TABLE AS,SELECT INTO,CREATE SCHEMA}'::pg_catalog.text[])
  then
    perform gdq.capture_created();
  end if;
  if TG_EVENT operator(pg_catalog.=) 'sql_drop' then
    perform gdq.follow_drop();
  end if;
  -- leave out frequent commands that change no table
  if TG_TAG operator(pg_catalog.=) any (pg_catalog.string_to_array(
       'CREATE INDEX,REINDEX,GRANT,REVOKE,COMMENT,SECURITY LABEL,ALTER DEFAULT PRIVILEGES,'
       'CREATE FUNCTION,CREATE PROCEDURE,CREATE AGGREGATE,ALTER FUNCTION,ALTER PROCEDURE,ALTER ROUTINE,'
       'CREATE TABLE AS,SELECT INTO,CREATE VIEW,CREATE MATERIALIZED VIEW,REFRESH MATERIALIZED VIEW,'
       'CREATE SEQUENCE,CREATE TYPE,CREATE DOMAIN,CREATE POLICY,CREATE STATISTICS,CREATE CAST,CREATE OPERATOR', ','))
     is not true
     and (TG_EVENT operator(pg_catalog.=) 'sql_drop' or pg_catalog.starts_with(TG_TAG, 'DROP ') is not true
          or TG_TAG operator(pg_catalog.=) 'DROP OWNED') then
    perform gdq.follow_ddl(TG_EVENT, TG_TAG);
  end if;
end
$$;
comment on function gdq.ddl_guard() is
  'Event trigger: keeps capture functions in step with DDL, or switches them off; never lets an error out.';

-- follow_drop(): forget_dropped() for the tables that the current command has dropped. In an old snapshot it leaves
-- that to maintain(): reading could make a SERIALIZABLE transaction fail. Writes: as forget_dropped(). Errors: none but
-- a cancel or a statement_timeout.
create or replace function gdq.follow_drop() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if gdq.snapshot_is_fresh() and exists (select from gdq.passed_table) then
    perform gdq.forget_dropped(array(select o.objid from pg_event_trigger_dropped_objects() o
                                      where o.classid = 'pg_class'::regclass and o.objsubid = 0));
  end if;
exception when others then
  raise log 'gdq: dropped tables could not be forgotten: %', sqlerrm;
end
$$;
comment on function gdq.follow_drop() is 'Removes the tables that the current command has dropped from passed_table.';

-- follow_ddl(event, tag): does the work of ddl_guard() for a command that may have changed a captured table. First it
-- raises the alarm, last it answers it. Settings are pinned because the session of the DDL may have others.
-- Writes: as guard_tables() and note_types(); the alarm. Errors: none but a cancel or a statement_timeout.
create or replace function gdq.follow_ddl(event text, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set default_table_access_method = 'heap' set default_tablespace = '' set lock_timeout = '100ms'
  set client_min_messages = error
as $$
declare
  touched oid[];
  tables gdq.captured_table[];
  types oid[];
  alarm bigint;
  recorded boolean;
begin
  perform gdq.shorten_lock_timeout();
  if gdq.touches_nothing(event, tag) then
    return;
  end if;
  types := gdq.altered_types(event, tag);
  begin
    touched := gdq.touched_relations(tag);
    tables := gdq.concerned_tables(event, touched, tag);
    if tables = '{}' and types = '{}' and not exists (select from gdq.restored_queues()) then
      return;
    end if;
  exception when others then
    raise log 'gdq: it cannot be told what % has changed: %', tag, sqlerrm;
  end;
  alarm := gdq.raise_alarm();
  recorded := gdq.note_types(types, tag);
  begin
    if exists (select from gdq.restored_queues()) then
      perform gdq.disarm_restored(tag);
    end if;
    if gdq.snapshot_is_fresh() then
      recorded := gdq.guard_tables(tables, touched, tag) and recorded;
    else
      recorded := gdq.switch_off_locked(
        tag || ' in a ' || upper(current_setting('transaction_isolation')) || ' transaction', gdq.weakest_lock(tag))
        and recorded;
    end if;
  exception when others then
    recorded := gdq.switch_off_locked('capture could not follow ' || tag || ': ' || sqlerrm, gdq.weakest_lock(tag))
                and recorded;
  end;
  if recorded then
    perform gdq.answer_alarm(alarm);
  end if;
exception when others then
  raise log 'gdq: capture could neither follow nor be switched off after %: %', tag, sqlerrm;
end
$$;
comment on function gdq.follow_ddl(text, text) is
  'Keeps capture functions in step with one DDL command, or switches them off; never lets an error out.';

-- shorten_lock_timeout(): makes the guard wait less for locks where the session has a short statement_timeout, since
-- that error cannot be caught. Writes: nothing.
create or replace function gdq.shorten_lock_timeout() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if current_setting('statement_timeout')::interval between interval '1 ms' and interval '1 s' then
    perform set_config('lock_timeout',
      (extract(epoch from current_setting('statement_timeout')::interval) * 1000 / 10 + 1)::integer::text, true);
  end if;
end
$$;
comment on function gdq.shorten_lock_timeout() is
  'Makes the guard wait less where the session has a short statement_timeout.';

-- snapshot_is_fresh(): whether each statement of this transaction has a snapshot of its own. Writes: nothing.
create or replace function gdq.snapshot_is_fresh() returns boolean
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return current_setting('transaction_isolation') in ('read committed', 'read uncommitted');
end
$$;
comment on function gdq.snapshot_is_fresh() is 'Whether each statement of this transaction has a snapshot of its own.';

-- guard_tables(tables, touched, tag): guard_table() for these captured tables. Result: whether all is recorded. Writes:
-- as guard_table(). Errors: when the tables are not known.
create or replace function gdq.guard_tables(tables gdq.captured_table[], touched oid[], tag text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  recorded boolean := true;
begin
  if tables is null then
    raise exception 'the captured tables cannot be told';
  end if;
  foreach t in array tables loop
    begin
      recorded := gdq.guard_table(t.table_id, tag, touched) and recorded;
    exception when others then
      recorded := gdq.switch_off(t.queue_id, t.relid, format('capture could not follow %s: %s', tag, sqlerrm))
                  and recorded;
    end;
  end loop;
  return recorded;
end
$$;
comment on function gdq.guard_tables(gdq.captured_table[], oid[], text) is
  'Follows DDL for these captured tables.';

-- guard_table(table_id, tag, touched): follows the changes that DDL may have made to one captured table, and witnesses
-- the touched relations. What differs from the witness, and this transaction has not done, is a gap. While capture of
-- the table is off, only its functions matter: maintain() looks at everything anew.
-- Result: whether all is recorded. Writes: as guard_columns(), guard_leaves(), guard_children() and switch_off();
-- witness. Errors: any; the caller switches off.
create or replace function gdq.guard_table(table_id integer, tag text, touched oid[]) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  state text;
  fault text;
  unseen text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_table.table_id;
  state := gdq.capture_state(t.queue_id, t.relid);
  if state in ('dropped', 'covered') then
    return true;
  elsif not exists (select from pg_class c where c.oid = t.relid) then
    perform gdq.note_dropped(t.table_id, tag);
    return true;
  elsif state = 'disarmed' then
    -- the old functions may still be there: only a partition was the reason, or replacing them failed
    return gdq.switch_off(t.queue_id, t.relid, tag || ' while capture was off');
  elsif strpos(pg_get_functiondef(gdq.capture_function(t.queue_id, t.relid, 'i')), 'insert into') = 0 then
    -- An earlier command could not be recorded, and the unanswered alarm tells it; or alter_table_options() is making
    -- triggers, before it arms the functions. Witnessing now would hide the one and disturb the other.
    return true;
  end if;
  perform gdq.follow_owner(t.queue_id, t.relid);
  unseen := (select min(u.what) from gdq.unwitnessed(array[t.table_id], touched, tag) u);
  perform gdq.guard_columns(t.table_id, tag);
  perform gdq.guard_leaves(t.table_id, tag);
  perform gdq.guard_children(t.table_id);
  fault := coalesce(gdq.capture_fault(t.table_id), gdq.trigger_fault(t.table_id));
  if fault is not null then
    return gdq.switch_off(t.queue_id, t.relid, fault);
  elsif unseen is not null then
    perform gdq.note_once(t.queue_id, t.relid, 'gap', unseen);
  end if;
  -- a table that an older gdq has captured has no witness at all
  perform gdq.witness(array[t.table_id],
                      case when exists (select from gdq.witness w where w.table_id = t.table_id) then touched end);
  return true;
end
$$;
comment on function gdq.guard_table(integer, text, oid[]) is
  'Follows the changes that DDL may have made to one captured table.';
