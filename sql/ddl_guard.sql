-- The DDL guard keeps capture functions in step with their tables, inside the transaction of the DDL itself. It fires
-- for every DDL of the database and never lets an error out: where it cannot go on it switches capture of the table
-- off and records that. It only ever inserts into control tables.

-- locked_tables(): the relations that this transaction has locked as column DDL does (ACCESS EXCLUSIVE). The lock
-- table is exact where the list of DDL commands is not: it has the children, leaves and typed tables that a command
-- reached through a parent or a type, and it is fresh in an old snapshot. Writes: nothing.
create or replace function gdq.locked_tables() returns setof oid
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select l.relation from pg_locks l
   where l.pid = pg_backend_pid() and l.locktype = 'relation' and l.granted
     and l.mode in ('AccessExclusiveLock', 'ShareRowExclusiveLock')
     and l.database = (select d.oid from pg_database d where d.datname = current_database())
$$;
comment on function gdq.locked_tables() is 'Relations that this transaction has locked as column or trigger DDL does.';

-- disarm_locked(reason): switches capture off for every captured table that this transaction may have changed, without
-- reading control rows or catalogs through the snapshot, which may be old. maintain() switches it on again.
-- Writes: replaces capture functions, inserts into resync and the event log.
create or replace function gdq.disarm_locked(reason text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  rel oid;
  queues integer;
begin
  select case when is_called then last_value else 0 end into queues from gdq.queue_queue_id_seq;
  for rel in select l from gdq.locked_tables() l union select a.relid from gdq.locked_tables() l, pg_partition_ancestors(l) a order by 1 loop
    for q in 1 .. queues loop
      if gdq.disarm(q, rel) then
        perform gdq.note_resync(q, rel, 'disarmed', reason);
      end if;
    end loop;
  end loop;
end
$$;
comment on function gdq.disarm_locked(text) is 'Switches capture off for every captured table that this transaction may have changed.';

-- capture_state(queue_id, relid): armed, disarmed, dropped or covered: the last word of resync about a captured table.
-- Writes: nothing.
create or replace function gdq.capture_state(queue_id integer, relid oid) returns text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce((select r.kind from gdq.resync r
                    where r.queue_id = capture_state.queue_id and r.relid = capture_state.relid and r.kind <> 'gap'
                    order by r.resync_id desc limit 1), 'armed')
$$;
comment on function gdq.capture_state(integer, oid) is 'armed, disarmed, dropped or covered.';

-- note_once(queue_id, relid, kind, reason): note_resync() unless this transaction has noted the same already.
-- Writes: resync and the event log.
create or replace function gdq.note_once(queue_id integer, relid oid, kind text, reason text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if not exists (select from gdq.resync r where r.queue_id = note_once.queue_id and r.relid = note_once.relid
                    and r.kind = note_once.kind and r.reason = note_once.reason and r.txid = txid_current()) then
    perform gdq.note_resync(queue_id, relid, kind, reason);
  end if;
end
$$;
comment on function gdq.note_once(integer, oid, text, text) is 'note_resync() unless this transaction has noted the same already.';

-- guard_columns(table_id, tag): gives a table whose columns have changed a new version and capture functions to match.
-- Writes: table_version, log_ring, log_segment, one segment, the capture functions, a ddl event. Errors: any; the
-- caller disarms.
create or replace function gdq.guard_columns(table_id integer, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  t gdq.captured_table;
  old_version gdq.table_version;
  columns jsonb := gdq.describe_table(table_id);
  version bigint;
  filled text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_columns.table_id;
  select * into strict old_version from gdq.table_version v where v.version_id = gdq.current_version(t.table_id);
  if columns = old_version.columns then
    return;
  end if;
  perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
  perform gdq.check_key(t.table_id, columns);
  version := gdq.create_version(t.table_id, columns, 1);
  perform gdq.arm(version, 0);
  perform gdq.log_event(t.queue_id, 'ddl', t.relid, jsonb_build_object('tag', tag, 'table', gdq.table_name(t.relid),
    'statement', current_query(), 'old_version', old_version.version_id, 'new_version', version,
    'old_columns', (select jsonb_agg(c->'name') from jsonb_array_elements(old_version.columns) c),
    'new_columns', (select jsonb_agg(c->'name') from jsonb_array_elements(columns) c)));
  -- a new column with a default shows values in old rows for which there is no event
  select string_agg(quote_ident(a.attname), ', ') into filled
    from pg_attribute a
   where a.attrelid = t.relid and a.atthasmissing
     and exists (select from jsonb_array_elements(columns) c where (c->>'attnum')::int = a.attnum)
     and not exists (select from jsonb_array_elements(old_version.columns) c where (c->>'attnum')::int = a.attnum);
  if filled is not null then
    perform gdq.note_once(t.queue_id, t.relid, 'gap', format('column %s was added with a default: existing rows changed without events', filled));
  end if;
end
$$;
comment on function gdq.guard_columns(integer, text) is 'Gives a table whose columns have changed a new log version and capture functions to match.';

-- guard_leaves(table_id, tag): brings the partitions and inheritance children of a captured table under capture, and
-- records what came or went with rows. Writes: triggers, captured_leaf, resync and the event log.
create or replace function gdq.guard_leaves(table_id integer, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  t gdq.captured_table;
  leaf record;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_leaves.table_id;
  for leaf in select p.relid, c.relkind from pg_partition_tree(t.relid) p join pg_class c on c.oid = p.relid
               where p.relid <> t.relid
                 and not exists (select from gdq.captured_leaf l where l.table_id = t.table_id and l.leaf = p.relid) loop
    insert into gdq.captured_leaf values (t.table_id, leaf.relid) on conflict do nothing;
    if leaf.relkind not in ('r', 'p') then
      perform gdq.note_once(t.queue_id, t.relid, 'gap', format('partition %s is a foreign table: its changes are not seen', gdq.table_name(leaf.relid)));
      continue;
    end if;
    if pg_relation_size(leaf.relid) > 0 then
      perform gdq.note_once(t.queue_id, t.relid, 'gap', format('partition %s was attached with rows', gdq.table_name(leaf.relid)));
    end if;
    begin
      perform gdq.create_truncate_triggers(t.queue_id, t.relid, leaf.relid);
    exception when insufficient_privilege then
      perform gdq.note_once(t.queue_id, t.relid, 'gap', format('no right to put TRUNCATE triggers on partition %s: GRANT TRIGGER on it to %I',
        gdq.table_name(leaf.relid), current_user));
    end;
    if exists (select from gdq.captured_table ct where ct.queue_id = t.queue_id and ct.relid = leaf.relid)
       and gdq.capture_state(t.queue_id, leaf.relid) <> 'covered' then
      perform gdq.disarm(t.queue_id, leaf.relid);
      perform gdq.replace_capture(t.queue_id, leaf.relid, 't', E'begin\n  return null;\nend');
      perform gdq.note_resync(t.queue_id, leaf.relid, 'covered', format('attached to %s, which is captured', gdq.table_name(t.relid)));
    end if;
  end loop;
  for leaf in select l.leaf as relid from gdq.captured_leaf l
               where l.table_id = t.table_id and l.leaf in (select gdq.locked_tables())
                 and not exists (select from pg_partition_tree(t.relid) p where p.relid = l.leaf) loop
    perform gdq.note_once(t.queue_id, t.relid, 'gap', format('partition %s was detached or dropped', coalesce(gdq.table_name(leaf.relid), leaf.relid::text)));
    -- the one row that this deletes is the concern of nobody else: the transaction holds the partition
    delete from gdq.captured_leaf l where l.table_id = t.table_id and l.leaf = leaf.relid;
  end loop;
  for leaf in select i.inhrelid as relid from pg_inherits i join pg_class c on c.oid = i.inhparent
               where i.inhparent = t.relid and c.relkind = 'r' and i.inhrelid in (select gdq.locked_tables())
                 and not exists (select from gdq.captured_table ct where ct.queue_id = t.queue_id and ct.relid = i.inhrelid) loop
    perform gdq.note_once(t.queue_id, t.relid, 'gap', format('inheritance child %s is not captured', gdq.table_name(leaf.relid)));
  end loop;
end
$$;
comment on function gdq.guard_leaves(integer, text) is 'Brings new partitions of a captured table under capture and records what came or went with rows.';

-- guard_table(table_id, tag): what DDL may have done to one captured table. Errors: any; the caller disarms.
-- Writes: as guard_columns() and guard_leaves().
create or replace function gdq.guard_table(table_id integer, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  state text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_table.table_id;
  state := gdq.capture_state(t.queue_id, t.relid);
  if state in ('dropped', 'covered') then
    return;
  elsif not exists (select from pg_class c where c.oid = t.relid) then
    insert into gdq.resync (queue_id, relid, kind, reason) values (t.queue_id, t.relid, 'dropped', tag);
    perform gdq.log_event(t.queue_id, 'ddl', t.relid,
      jsonb_build_object('tag', tag, 'table', t.table_name, 'statement', current_query(), 'dropped', true));
    return;
  end if;
  if state = 'armed' then
    perform gdq.guard_columns(t.table_id, tag);
    if (select count(*) from pg_trigger tg
         where tg.tgrelid = t.relid and tg.tgname ~ format('^!gdq_%s_%s_[iudt]$', t.relid::oid, t.queue_id) and tg.tgenabled in ('O', 'A')) < 4 then
      perform gdq.disarm(t.queue_id, t.relid);
      perform gdq.note_once(t.queue_id, t.relid, 'disarmed', 'a capture trigger was dropped or disabled');
    end if;
  end if;
  perform gdq.guard_leaves(t.table_id, tag);
end
$$;
comment on function gdq.guard_table(integer, text) is 'Follows what DDL did to one captured table.';

-- guard_tables(tag): guard_table() for every captured table that this transaction has locked, or whose partition it has.
-- Writes: as guard_table().
create or replace function gdq.guard_tables(tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t record;
  locked oid[] := array(select gdq.locked_tables());
begin
  for t in select ct.table_id, ct.queue_id, ct.relid from gdq.captured_table ct
            where ct.relid = any (locked)
               or ct.relid in (select a.relid from unnest(locked) l, pg_partition_ancestors(l) a)
               or ct.relid in (select i.inhparent from pg_inherits i where i.inhrelid = any (locked))
               or ct.table_id in (select cl.table_id from gdq.captured_leaf cl where cl.leaf = any (locked))
            order by ct.relid, ct.queue_id loop
    begin
      perform gdq.guard_table(t.table_id, tag);
    exception when others then
      perform gdq.disarm(t.queue_id, t.relid);
      perform gdq.note_resync(t.queue_id, t.relid, 'disarmed', format('capture could not follow %s: %s', tag, sqlerrm));
    end;
  end loop;
end
$$;
comment on function gdq.guard_tables(text) is 'Follows what DDL did to every captured table that this transaction has locked.';

-- ddl_guard(): event trigger on ddl_command_end. Which tables a command may have changed is read from the transaction's
-- locks; that makes an sql_drop trigger needless, since a DROP holds the same locks when its command ends.
-- In REPEATABLE READ and SERIALIZABLE the snapshot is older than what others have committed, so there it only disarms.
-- Writes: as guard_tables(). Errors: none but a cancel or a statement_timeout of the session.
create or replace function gdq.ddl_guard() returns event_trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set default_table_access_method = 'heap' set default_tablespace = '' set lock_timeout = '100ms' set client_min_messages = error
as $$
begin
  -- commands that change no table, however often they come
  if TG_TAG in ('CREATE INDEX', 'DROP INDEX', 'REINDEX', 'GRANT', 'REVOKE', 'COMMENT', 'SECURITY LABEL', 'CREATE FUNCTION', 'CREATE PROCEDURE',
                'ALTER FUNCTION', 'CREATE VIEW', 'CREATE SEQUENCE', 'CREATE TYPE', 'CREATE TABLE AS', 'SELECT INTO', 'CREATE MATERIALIZED VIEW',
                'REFRESH MATERIALIZED VIEW', 'ALTER DEFAULT PRIVILEGES', 'CREATE POLICY', 'CREATE STATISTICS') then
    return;
  elsif TG_TAG = 'CREATE TABLE' and not exists (select from pg_event_trigger_ddl_commands() c
                                                 where c.object_type = 'table' and c.schema_name not in ('pg_temp', 'gdq_log')) then
    return;
  end if;
  begin
    if current_setting('transaction_isolation') in ('read committed', 'read uncommitted') then
      perform gdq.guard_tables(TG_TAG);
    else
      perform gdq.disarm_locked(TG_TAG || ' in a ' || upper(current_setting('transaction_isolation')) || ' transaction');
    end if;
  exception when others then
    begin
      perform gdq.disarm_locked('capture could not follow ' || TG_TAG || ': ' || sqlerrm);
    exception when others then
      raise log 'gdq: capture could neither follow nor be switched off after %: %', TG_TAG, sqlerrm;
    end;
  end;
end
$$;
comment on function gdq.ddl_guard() is 'Event trigger: keeps capture functions in step with DDL, or switches them off; never lets an error out.';

-- rewrite_guard(): event trigger on table_rewrite: a rewrite that computes values anew (a default, a new type) changes
-- rows without events. Writes: resync and the event log. Errors: none but a cancel.
create or replace function gdq.rewrite_guard() returns event_trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms' set client_min_messages = error
as $$
declare
  rewritten oid := pg_event_trigger_table_rewrite_oid();
  rel oid;
  queues integer;
begin
  -- 2: a default was filled in, 4: a column was converted; 1 (persistence) and 8 (access method) keep the values
  if pg_event_trigger_table_rewrite_reason() & 6 = 0 then
    return;
  end if;
  select case when is_called then last_value else 0 end into queues from gdq.queue_queue_id_seq;
  for rel in select rewritten union select a.relid from pg_partition_ancestors(rewritten) a loop
    for q in 1 .. queues loop
      if to_regprocedure(format('gdq_log.%I()', gdq.capture_name(q, rel, 'i'))) is not null then
        perform gdq.note_once(q, rel, 'gap', 'the table was rewritten: rows changed without events');
      end if;
    end loop;
  end loop;
exception when others then
  raise log 'gdq: a rewrite of % could not be recorded: %', rewritten::regclass, sqlerrm;
end
$$;
comment on function gdq.rewrite_guard() is 'Event trigger: records rewrites that change rows without events.';
