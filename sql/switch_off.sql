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

-- switch_off_locked(reason, mode): switches capture off for every captured table that this transaction may have changed,
-- without trusting control rows or catalogs that are read through the snapshot, which may be old: what this transaction
-- did itself is visible in any. A table that only a partition or a child of it was locked for keeps its functions,
-- which still fit: for it, maintain() has to look at its partitions anew. While an upgrade of gdq holds the control
-- tables, the triggers that a partition has kept tell its root. mode: the weakest lock of a command that may have
-- changed a table. Writes: as switch_off().
create or replace function gdq.switch_off_locked(reason text, mode text default 'AccessExclusiveLock') returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  altered oid[] := gdq.locked_tables('AccessExclusiveLock', mode);
  touched oid[] := gdq.locked_tables('ShareRowExclusiveLock');
  roots oid[];
  r record;
begin
  begin
    roots := array(select ct.relid from gdq.captured_leaf cl join gdq.captured_table ct using (table_id) where cl.leaf = any (altered));
  exception when lock_not_available then
    roots := array(select split_part(tg.tgname, '_', 2)::oid from pg_trigger tg where tg.tgrelid = any (altered) and tg.tgname ~ '^!gdq_\d+_\d+_[iudtb]$');
  end;
  for r in select rel, q, bool_or(own) as own
             from (select unnest(altered) as rel, true as own
                   union all
                   -- the trigger's name has the root, whose partition it may be on
                   select split_part(tg.tgname, '_', 2)::oid, split_part(tg.tgname, '_', 2)::oid = tg.tgrelid from pg_trigger tg
                    where tg.tgrelid = any (touched) and tg.tgname ~ '^!gdq_\d+_\d+_[iudtb]$'
                      and (tg.tgenabled not in ('O', 'A') or tg.tgqual is not null or tg.tgattr <> ''
                           or tg.tgfoid is distinct from gdq.capture_function(split_part(tg.tgname, '_', 3)::integer, split_part(tg.tgname, '_', 2)::oid,
                                                                              translate(right(tg.tgname, 1), 'b', 't')))
                   union all
                   select a.relid, false from unnest(altered) l, pg_partition_ancestors(l) a
                   union all
                   select i.inhparent, false from pg_inherits i where i.inhrelid = any (altered)
                   union all
                   select unnest(roots), false) near,
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
comment on function gdq.switch_off_locked(text, text) is 'Switches capture off for every captured table that this transaction may have changed.';
