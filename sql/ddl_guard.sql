-- The DDL guard keeps capture functions in step with their tables, inside the transaction of the DDL itself. It fires
-- for every DDL of the database and never lets an error out: where it cannot go on it switches capture of the table
-- off and records that. Into control tables it only inserts, but for the one row of a partition that it has locked.

-- locked_tables(modes): the relations of this database that this transaction has locked in one of these modes. Column
-- DDL takes ACCESS EXCLUSIVE, trigger DDL SHARE ROW EXCLUSIVE. The lock table is exact where the list of DDL commands
-- is not: it has the children, leaves and typed tables that a command reached through a parent or a type, and what a
-- CASCADE took a column from; and it is fresh in an old snapshot. Writes: nothing.
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

-- capture_function(queue_id, relid, op): a capture function by its name, NULL when there is none. Looked up outside
-- MVCC, so it is right in an old snapshot too. Writes: nothing.
create or replace function gdq.capture_function(queue_id integer, relid oid, op text) returns regprocedure
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return to_regprocedure(format('gdq_log.%I()', gdq.capture_name(queue_id, relid, op)));
end
$$;
comment on function gdq.capture_function(integer, oid, text) is 'A capture function by its name; NULL when there is none.';

-- queue_ids(): the queues that there may be, dropped ones included: a sequence is fresh in an old snapshot.
-- Writes: nothing.
create or replace function gdq.queue_ids() returns setof integer
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select generate_series(1, case when is_called then last_value else 0 end)::integer from gdq.queue_queue_id_seq
$$;
comment on function gdq.queue_ids() is 'Numbers of the queues that there may be.';

-- note_once(queue_id, relid, kind, reason): note_resync() unless this transaction has noted the same already. It reads
-- resync, which could fail a SERIALIZABLE transaction: there the note is written again.
-- Writes: resync and the event log.
create or replace function gdq.note_once(queue_id integer, relid oid, kind text, reason text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if current_setting('transaction_isolation') <> 'serializable'
     and exists (select from gdq.resync r where r.queue_id = note_once.queue_id and r.relid = note_once.relid
                    and r.kind = note_once.kind and r.reason = note_once.reason and r.txid = txid_current()) then
    return;
  end if;
  perform gdq.note_resync(queue_id, relid, kind, reason);
end
$$;
comment on function gdq.note_once(integer, oid, text, text) is 'note_resync() unless this transaction has noted the same already.';

-- switch_off(queue_id, relid, reason): records that capture of a table is off, then disarms it. In this order, and the
-- second may fail: maintain() mends whatever is recorded. Nothing is done when it is off already, which the
-- function's text tells even in an old snapshot.
-- Writes: resync, the event log, the capture functions.
create or replace function gdq.switch_off(queue_id integer, relid oid, reason text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  f regprocedure := gdq.capture_function(queue_id, relid, 'i');
begin
  if f is null or strpos(pg_get_functiondef(f), 'insert into') = 0 then
    return;
  end if;
  perform gdq.note_resync(queue_id, relid, 'disarmed', reason);
  begin
    perform gdq.disarm(queue_id, relid);
  exception when others then
    raise log 'gdq: capture of % could not be switched off (%): %', relid, reason, sqlerrm;
  end;
end
$$;
comment on function gdq.switch_off(integer, oid, text) is 'Records that capture of a table is off, and disarms it.';

-- switch_off_locked(reason): switches capture off for every captured table that this transaction may have changed,
-- without trusting control rows or catalogs that are read through the snapshot, which may be old: what this transaction
-- did itself is visible in any. A table that only a partition or a child of it was locked for keeps its functions,
-- which still fit: for it, maintain() has to look at its partitions anew. Writes: as switch_off().
create or replace function gdq.switch_off_locked(reason text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  altered oid[] := gdq.locked_tables('AccessExclusiveLock');
  touched oid[] := gdq.locked_tables('ShareRowExclusiveLock');
  r record;
begin
  for r in select rel, q, bool_or(own) as own
             from (select unnest(altered) as rel, true as own
                   union all
                   select tg.tgrelid, true from pg_trigger tg
                    where tg.tgrelid = any (touched) and tg.tgname ~ '^!gdq_\d+_\d+_[iudtb]$'
                      and (tg.tgenabled not in ('O', 'A') or tg.tgqual is not null or tg.tgattr <> ''
                           or tg.tgfoid is distinct from gdq.capture_function(split_part(tg.tgname, '_', 3)::integer, split_part(tg.tgname, '_', 2)::oid,
                                                                              translate(right(tg.tgname, 1), 'b', 't')))
                   union all
                   select a.relid, false from unnest(altered) l, pg_partition_ancestors(l) a
                   union all
                   select i.inhparent, false from pg_inherits i where i.inhrelid = any (altered)
                   union all
                   select ct.relid, false from gdq.captured_leaf cl join gdq.captured_table ct using (table_id) where cl.leaf = any (altered)) near,
                  gdq.queue_ids() q
            where gdq.capture_function(q, rel, 'i') is not null
            group by rel, q order by rel, q loop
    if r.own then
      perform gdq.switch_off(r.q, r.rel, reason);
    else
      perform gdq.note_resync(r.q, r.rel, 'disarmed', reason || ' of a partition');
    end if;
  end loop;
end
$$;
comment on function gdq.switch_off_locked(text) is 'Switches capture off for every captured table that this transaction may have changed.';

-- guard_columns(table_id, tag): gives a table whose columns have changed a new version and capture functions to match.
-- Writes: table_version, log_ring, log_segment, one segment, the capture functions, a ddl event. Errors: any; the
-- caller switches off.
create or replace function gdq.guard_columns(table_id integer, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  old_version gdq.table_version;
  columns jsonb := gdq.describe_table(table_id);
  version bigint;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_columns.table_id;
  select * into strict old_version from gdq.table_version v where v.table_id = t.table_id order by v.version_id desc limit 1;
  -- also when nothing else has changed: the index that made the key unique may have gone
  perform gdq.check_key(t.table_id, columns);
  if columns = old_version.columns then
    return;
  end if;
  -- A log takes about ten locks. One transaction with hundreds of them would leave no room to the others.
  if (select count(*) from pg_locks l where l.pid = pg_backend_pid()) > current_setting('max_locks_per_transaction')::bigint
       * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 5 then
    raise exception 'one transaction with that many changes of tables would fill the lock table';
  end if;
  perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
  version := gdq.create_version(t.table_id, columns, 1);
  perform gdq.arm(version, 0);
  perform gdq.log_event(t.queue_id, 'ddl', t.relid, jsonb_build_object('tag', tag, 'table', gdq.table_name(t.relid),
    'statement', left(current_query(), 10000), 'old_version', old_version.version_id, 'new_version', version,
    'old_columns', (select jsonb_agg(c->'name') from jsonb_array_elements(old_version.columns) c),
    'new_columns', (select jsonb_agg(c->'name') from jsonb_array_elements(columns) c)));
  perform gdq.note_values(t.queue_id, t.relid, old_version.columns, columns);
end
$$;
comment on function gdq.guard_columns(integer, text) is 'Gives a table whose columns have changed a new log version and capture functions to match.';

-- note_values(queue_id, relid, old_columns, new_columns): a gap when old rows show other values from now on for which
-- there is no event. A rewrite is seen by rewrite_guard(); here is what needs none: a column added with a default (no
-- look at atthasmissing, which a rewrite for another reason clears, and a partitioned table does not have), a type that
-- reads the same bytes as another value (oid and integer; timestamp and timestamptz in UTC).
-- Writes: resync and the event log.
create or replace function gdq.note_values(queue_id integer, relid oid, old_columns jsonb, new_columns jsonb) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  filled text;
  retyped text;
begin
  select string_agg(quote_ident(n.name), ', ') filter (where o.attnum is null and (a.atthasdef or a.atthasmissing)),
         string_agg(quote_ident(n.name), ', ') filter (where o.log_type <> n.log_type
           and not (o.log_type in ('text', 'character varying') and n.log_type in ('text', 'character varying')))
    into filled, retyped
    from jsonb_to_recordset(new_columns) n(attnum int, name text, log_type text)
    left join jsonb_to_recordset(old_columns) o(attnum int, log_type text) on o.attnum = n.attnum
    join pg_attribute a on a.attrelid = note_values.relid and a.attnum = n.attnum;
  if filled is not null then
    perform gdq.note_once(queue_id, relid, 'gap', format('column %s was added with a default: existing rows changed without events', filled));
  end if;
  if retyped is not null then
    perform gdq.note_once(queue_id, relid, 'gap', format('column %s changed its type: existing rows changed without events', retyped));
  end if;
end
$$;
comment on function gdq.note_values(integer, oid, jsonb, jsonb) is 'Records that new columns or types show other values in old rows.';

-- guard_leaves(table_id): brings the partitions of a captured table under capture, and records what came or went with
-- rows. Writes: triggers, captured_leaf, resync and the event log.
create or replace function gdq.guard_leaves(table_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  leaf oid;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_leaves.table_id;
  for leaf in select p.relid from pg_partition_tree(t.relid) p join pg_class c on c.oid = p.relid
               where p.relid <> t.relid and c.relkind in ('r', 'p')
                 and not exists (select from gdq.captured_leaf l where l.table_id = t.table_id and l.leaf = p.relid) loop
    insert into gdq.captured_leaf values (t.table_id, leaf) on conflict do nothing;
    if pg_relation_size(leaf) > 0 then
      perform gdq.note_once(t.queue_id, t.relid, 'gap', format('partition %s was attached with rows', gdq.table_name(leaf)));
    end if;
    begin
      perform gdq.create_truncate_triggers(t.queue_id, t.relid, leaf);
    exception when insufficient_privilege then
      perform gdq.note_once(t.queue_id, t.relid, 'gap', format('no right to put TRUNCATE triggers on partition %s: GRANT TRIGGER on it to %I',
        gdq.table_name(leaf), current_user));
    end;
    if exists (select from gdq.captured_table ct where ct.queue_id = t.queue_id and ct.relid = leaf)
       and gdq.capture_state(t.queue_id, leaf) <> 'covered' then
      perform gdq.note_resync(t.queue_id, leaf, 'covered', format('attached to %s, which is captured', gdq.table_name(t.relid)));
      perform gdq.disarm(t.queue_id, leaf);
      perform gdq.replace_capture(t.queue_id, leaf, 't', E'begin\n  return null;\nend');
    end if;
  end loop;
  for leaf in delete from gdq.captured_leaf l
               where l.table_id = t.table_id and not exists (select from pg_partition_tree(t.relid) p where p.relid = l.leaf)
              returning l.leaf loop
    perform gdq.note_once(t.queue_id, t.relid, 'gap', format('partition %s was detached or dropped', coalesce(gdq.table_name(leaf), leaf::text)));
  end loop;
end
$$;
comment on function gdq.guard_leaves(integer) is 'Brings new partitions of a captured table under capture and records what came or went with rows.';

-- capture_fault(table_id): why capture of a table cannot be complete as its catalogs are now; NULL when it can. Rows
-- that escape the triggers later could not be recorded then, so such a table is off until that has changed.
-- Writes: nothing.
create or replace function gdq.capture_fault(table_id integer) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  rels oid[];
  fault text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = capture_fault.table_id;
  rels := t.relid::oid || array(select p.relid from pg_partition_tree(t.relid) p);
  select case when c.relpersistence <> 'p' then format('%s is unlogged: a crash empties it without any event', gdq.table_name(c.oid))
              when c.relkind = 'f' then format('partition %s is a foreign table: changes at its server are not seen', gdq.table_name(c.oid)) end
    into fault
    from pg_class c
   where c.oid = any (rels) and ((c.relkind = 'r' and c.relpersistence <> 'p') or c.relkind = 'f') limit 1;
  if fault is null then
    -- a child that only one session sees is no part of what others read
    select format('inheritance child %s is not captured', gdq.table_name(i.inhrelid)) into fault
      from pg_inherits i join pg_class p on p.oid = i.inhparent join pg_class c on c.oid = i.inhrelid
     where i.inhparent = t.relid and p.relkind = 'r' and c.relpersistence <> 't'
       and not exists (select from gdq.captured_table ct where ct.queue_id = t.queue_id and ct.relid = i.inhrelid) limit 1;
  end if;
  return fault;
end
$$;
comment on function gdq.capture_fault(integer) is 'Why capture of a table cannot be complete as its catalogs are now; NULL when it can.';

-- trigger_fault(table_id): the same for the capture triggers of a table and its partitions: missing, disabled, replaced
-- by something else, or renamed, so that a new one would double it. A partition for which there was no right to make
-- the TRUNCATE trigger is recorded elsewhere. Writes: nothing.
create or replace function gdq.trigger_fault(table_id integer) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  pattern text;
  functions oid[];
  rel record;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = trigger_fault.table_id;
  pattern := format('^!gdq_%s_%s_[iudtb]$', t.relid::oid, t.queue_id);
  functions := array(select gdq.capture_function(t.queue_id, t.relid, op) from unnest('{i,u,d,t}'::text[]) op);
  for rel in
    select c.oid, min(tg.tgname) filter (where tg.tgname !~ pattern) as renamed
      from (select t.relid::oid as relid
            union select cl.leaf from gdq.captured_leaf cl join pg_partition_tree(t.relid) p on p.relid = cl.leaf where cl.table_id = t.table_id) r
      join pg_class c on c.oid = r.relid
      left join pg_trigger tg on tg.tgrelid = c.oid and (tg.tgname ~ pattern or tg.tgfoid = any (functions))
     group by c.oid
    having count(*) filter (where right(tg.tgname, 1) <> 'b')
             < case when c.oid = t.relid or (has_table_privilege(c.oid, 'TRIGGER') and has_schema_privilege(c.relnamespace, 'USAGE')) then 4 else 3 end
        or bool_or(tg.tgname !~ pattern or tg.tgenabled not in ('O', 'A') or tg.tgqual is not null or tg.tgattr <> ''
                   or tg.tgfoid <> gdq.capture_function(t.queue_id, t.relid, translate(right(tg.tgname, 1), 'b', 't'))) loop
    return case when rel.renamed is null then format('a capture trigger of %s was dropped or disabled', gdq.table_name(rel.oid))
                else format('trigger %I of %s is a renamed capture trigger: drop it', rel.renamed, gdq.table_name(rel.oid)) end;
  end loop;
  return null;
end
$$;
comment on function gdq.trigger_fault(integer) is 'What is wrong with the capture triggers of a table and its partitions; NULL for nothing.';

-- guard_table(table_id, tag): follows what DDL may have done to one captured table. Of one that is off only the functions
-- matter: maintain() looks at everything anew. Errors: any; the caller switches off.
-- Writes: as guard_columns(), guard_leaves() and switch_off().
create or replace function gdq.guard_table(table_id integer, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  state text;
  fault text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_table.table_id;
  state := gdq.capture_state(t.queue_id, t.relid);
  if state in ('dropped', 'covered') then
    return;
  elsif not exists (select from pg_class c where c.oid = t.relid) then
    perform gdq.note_dropped(t.table_id, tag);
    return;
  elsif state = 'disarmed' then
    -- its functions may still be the old ones, where only a partition was the reason, or replacing them failed
    perform gdq.switch_off(t.queue_id, t.relid, tag || ' while capture was off');
    return;
  end if;
  perform gdq.guard_columns(t.table_id, tag);
  perform gdq.guard_leaves(t.table_id);
  fault := coalesce(gdq.capture_fault(t.table_id), gdq.trigger_fault(t.table_id));
  if fault is not null then
    perform gdq.switch_off(t.queue_id, t.relid, fault);
  end if;
end
$$;
comment on function gdq.guard_table(integer, text) is 'Follows what DDL did to one captured table.';

-- note_dropped(table_id, tag): records that a captured table is gone. Writes: resync, a ddl event.
create or replace function gdq.note_dropped(table_id integer, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = note_dropped.table_id;
  insert into gdq.resync (queue_id, relid, kind, reason) values (t.queue_id, t.relid, 'dropped', tag);
  perform gdq.log_event(t.queue_id, 'ddl', t.relid,
    jsonb_build_object('tag', tag, 'table', t.table_name, 'statement', left(current_query(), 10000), 'dropped', true));
end
$$;
comment on function gdq.note_dropped(integer, text) is 'Records that a captured table is gone.';

-- guard_tables(tag): guard_table() for every captured table that this transaction has locked, or a partition or child
-- of it. Writes: as guard_table().
create or replace function gdq.guard_tables(tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t record;
  locked oid[] := gdq.locked_tables('AccessExclusiveLock', 'ShareRowExclusiveLock');
begin
  for t in select ct.table_id, ct.queue_id, ct.relid
             from (select unnest(locked) as relid
                   union select a.relid from unnest(locked) l, pg_partition_ancestors(l) a
                   union select i.inhparent from pg_inherits i where i.inhrelid = any (locked)
                   union select ct.relid from gdq.captured_leaf cl join gdq.captured_table ct using (table_id) where cl.leaf = any (locked)) near
             join gdq.captured_table ct using (relid)
            where (gdq.era_of(ct.queue_id)).era is not null  -- else disarm_restored() has done what there is to do
            order by ct.relid, ct.queue_id loop
    begin
      perform gdq.guard_table(t.table_id, tag);
    exception when others then
      perform gdq.switch_off(t.queue_id, t.relid, format('capture could not follow %s: %s', tag, sqlerrm));
    end;
  end loop;
end
$$;
comment on function gdq.guard_tables(text) is 'Follows what DDL did to every captured table that this transaction has locked.';

-- follow_ddl(event, tag): what ddl_guard() does for a command that may have changed a captured table. The settings are
-- pinned because the session of the DDL may have others. Where statement_timeout is short it waits less: that error
-- cannot be caught. Writes: as guard_tables() and guard_types(). Errors: none but a cancel or a statement_timeout.
create or replace function gdq.follow_ddl(event text, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set default_table_access_method = 'heap' set default_tablespace = '' set lock_timeout = '100ms' set client_min_messages = error
as $$
declare
  fresh boolean := current_setting('transaction_isolation') in ('read committed', 'read uncommitted');
begin
  if current_setting('statement_timeout')::interval between interval '1 ms' and interval '1 s' then
    perform set_config('lock_timeout', (extract(epoch from current_setting('statement_timeout')::interval) * 1000 / 10 + 1)::integer::text, true);
  end if;
  if exists (select from gdq.restored_queues()) then
    perform gdq.disarm_restored(tag);
  end if;
  if tag = 'CREATE TABLE' and not exists (select from pg_event_trigger_ddl_commands() c
                                           where c.object_type = 'table' and c.schema_name not in ('pg_temp', 'gdq_log')) then
    return;
  elsif event = 'sql_drop' and not exists (select from pg_event_trigger_dropped_objects() o where not o.is_temporary) then
    return;
  elsif tag = 'ALTER TYPE' and event = 'ddl_command_end' then
    perform gdq.guard_types();
  end if;
  if fresh then
    perform gdq.guard_tables(tag);
  else
    perform gdq.switch_off_locked(tag || ' in a ' || upper(current_setting('transaction_isolation')) || ' transaction');
  end if;
exception when others then
  begin
    perform gdq.switch_off_locked('capture could not follow ' || tag || ': ' || sqlerrm);
  exception when others then
    raise log 'gdq: capture could neither follow nor be switched off after %: %', tag, sqlerrm;
  end;
end
$$;
comment on function gdq.follow_ddl(text, text) is 'Keeps capture functions in step with one DDL command, or switches them off; never lets an error out.';

-- ddl_guard(): event trigger on ddl_command_end, and on sql_drop, which comes before it: event triggers of the
-- application that write to a captured table must not meet functions that do not fit it. What a DROP did, sql_drop has
-- seen. Without SET clauses and with
-- qualified operators, as it runs for every DDL of the database. Writes and errors: as follow_ddl().
create or replace function gdq.ddl_guard() returns event_trigger
language plpgsql volatile security definer
as $$
begin
  -- commands that change no table, however often they come
  if TG_TAG operator(pg_catalog.=) any (pg_catalog.string_to_array('CREATE INDEX,REINDEX,GRANT,REVOKE,COMMENT,SECURITY LABEL,CREATE FUNCTION,'
       'CREATE PROCEDURE,ALTER FUNCTION,ALTER PROCEDURE,ALTER ROUTINE,CREATE AGGREGATE,CREATE VIEW,CREATE SEQUENCE,CREATE TYPE,CREATE DOMAIN,'
       'CREATE TABLE AS,SELECT INTO,CREATE MATERIALIZED VIEW,REFRESH MATERIALIZED VIEW,ALTER DEFAULT PRIVILEGES,CREATE POLICY,CREATE STATISTICS,'
       'CREATE CAST,CREATE OPERATOR', ',')) is not true
     and (TG_EVENT operator(pg_catalog.=) 'sql_drop' or pg_catalog.starts_with(TG_TAG, 'DROP ') is not true
          or TG_TAG operator(pg_catalog.=) 'DROP OWNED') then
    perform gdq.follow_ddl(TG_EVENT, TG_TAG);
  end if;
end
$$;
comment on function gdq.ddl_guard() is 'Event trigger: keeps capture functions in step with DDL, or switches them off; never lets an error out.';
