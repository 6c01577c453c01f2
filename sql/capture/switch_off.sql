-- switch_off(queue_id, relid, reason): disarms a table and records that its capture is off. Each is tried although the
-- other failed. Where it could not be recorded, a tick finds that the functions are not those that were witnessed.
-- Nothing happens when both are done already, which in a SERIALIZABLE transaction the text of the capture function
-- tells, as reading resync could make it fail.
-- Result: whether capture is recorded as off. Writes: resync, the event log, the capture functions.
create or replace function gdq.switch_off(queue_id integer, relid oid, reason text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  f regprocedure := gdq.capture_function(queue_id, relid, 'i');
  off boolean;
begin
  if f is null then
    return true;
  end if;
  off := strpos(pg_get_functiondef(f), 'insert into') = 0;
  begin
    if not off then
      perform gdq.disarm(queue_id, relid);
    end if;
  exception when others then
    raise log 'gdq: capture of % could not be disarmed (%): %', relid, reason, sqlerrm;
  end;
  begin
    if not off
       or (current_setting('transaction_isolation') <> 'serializable'
           and gdq.capture_state(queue_id, relid) = 'armed') then
      perform gdq.note_resync(queue_id, relid, 'disarmed', reason);
    end if;
    return true;
  exception when others then
    raise log 'gdq: it could not be recorded that capture of % is off (%): %', relid, reason, sqlerrm;
    return false;
  end;
end
$$;
comment on function gdq.switch_off(integer, oid, text) is 'Disarms a table and records that its capture is off.';

-- note_or_disarm(queue_id, relid, kind, reason): note_once(), or where it fails, switch_off(): the functions that do
-- nothing are then the trace which the next tick finds. Result: whether it is recorded. Writes: as note_once() or
-- switch_off().
create or replace function gdq.note_or_disarm(queue_id integer, relid oid, kind text, reason text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform gdq.note_once(queue_id, relid, kind, reason);
  return true;
exception when others then
  return gdq.switch_off(queue_id, relid, reason);
end
$$;
comment on function gdq.note_or_disarm(integer, oid, text, text) is
  'Records a gap of capture, or where that fails, switches capture off.';

-- switch_off_locked(reason, mode): switches capture off for every captured table that this transaction may have
-- changed. It relies only on the transaction's own locks and functions, since its snapshot, and the control rows in it,
-- may be old. A table of which only a partition or child was locked keeps its functions, which still fit; maintain()
-- looks at its partitions anew. While an upgrade of gdq has locked the control tables, the triggers on a partition tell
-- its root.
--   mode: the weakest lock of a command that may have changed a table.
-- Result: whether all of it is recorded. Writes: as switch_off().
create or replace function gdq.switch_off_locked(reason text, mode text default 'AccessExclusiveLock') returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  altered oid[] := gdq.locked_tables('AccessExclusiveLock', mode);
  touched oid[] := gdq.locked_tables('ShareRowExclusiveLock');
  roots oid[];
  r record;
  recorded boolean := true;
begin
  begin
    roots := array(select ct.relid from gdq.witness w join gdq.captured_table ct using (table_id)
                    where w.relid = any (altered) and w.relid <> ct.relid);
  exception when lock_not_available then
    roots := array(select split_part(tg.tgname, '_', 2)::oid from pg_trigger tg
                    where tg.tgrelid = any (altered) and tg.tgname ~ E'^!gdq_\\d+_\\d+_[iudtb]$');
  end;
  for r in select rel, q, bool_or(own) as own
             from (select unnest(altered) as rel, true as own
                   union all
                   -- the trigger's name contains the oid of the root, of which its table may be a partition
                   select split_part(tg.tgname, '_', 2)::oid, split_part(tg.tgname, '_', 2)::oid = tg.tgrelid
                     from pg_trigger tg
                    where tg.tgrelid = any (touched) and tg.tgname ~ E'^!gdq_\\d+_\\d+_[iudtb]$'
                      and (tg.tgenabled not in ('O', 'A') or tg.tgqual is not null or tg.tgattr <> ''
                           or tg.tgfoid is distinct from gdq.capture_function(
                                split_part(tg.tgname, '_', 3)::integer,
                                split_part(tg.tgname, '_', 2)::oid,
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
      recorded := gdq.switch_off(r.q, r.rel, reason) and recorded;
    else
      recorded := gdq.note_or_disarm(r.q, r.rel, 'disarmed', reason || ' of a partition') and recorded;
    end if;
  end loop;
  return recorded;
end
$$;
comment on function gdq.switch_off_locked(text, text) is
  'Switches capture off for every captured table that this transaction may have changed.';

-- disarm_restored(tag): does the work of the DDL guard for tables of a queue that waits for its rebase. Control rows
-- and the names of capture functions hold oids of the old cluster, so only the triggers tell which functions a table
-- has. The functions of every table that this transaction has locked for column DDL are switched off; rebase() makes
-- them anew. Writes: capture functions, resync, the event log.
create or replace function gdq.disarm_restored(tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
begin
  for r in select tg.tgrelid, split_part(tg.tgname, '_', 3)::integer as queue_id, array_agg(p.proname) as functions
             from unnest(gdq.locked_tables('AccessExclusiveLock')) l
             join pg_trigger tg on tg.tgrelid = l and tg.tgname ~ E'^!gdq_\\d+_\\d+_[iud]$'
             join pg_proc p on p.oid = tg.tgfoid
                           and p.pronamespace = 'gdq_log'::regnamespace
                           and strpos(p.prosrc, 'insert into') > 0
            where split_part(tg.tgname, '_', 3)::integer in (select q.queue_id from gdq.restored_queues() q)
            group by 1, 2 loop
    for i in 1 .. cardinality(r.functions) loop
      execute format('create or replace function gdq_log.%I() returns trigger language plpgsql security definer as %L',
                     r.functions[i], E'begin\n  return null;\nend');
    end loop;
    perform gdq.note_resync(r.queue_id, r.tgrelid, 'disarmed', tag || ' between restore and rebase');
  end loop;
end
$$;
comment on function gdq.disarm_restored(text) is
  'Switches capture off for tables whose columns change between restore and rebase.';
