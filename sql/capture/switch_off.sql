-- switch_off(queue_id, relid, reason): records that capture of a table is off, then disarms it. In this order, as the
-- second step may fail: maintain() mends whatever is recorded. Nothing happens when capture is off already, which the
-- text of the function tells even in an old snapshot.
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

-- switch_off_locked(reason, mode): switches capture off for every captured table that this transaction may have
-- changed. It trusts no control rows and no catalogs read through the snapshot, which may be old: only what this
-- transaction did itself is visible in any snapshot. A table of which only a partition or child was locked keeps its
-- functions, which still fit; maintain() looks at its partitions anew. While an upgrade of gdq holds the control
-- tables, the triggers on a partition tell its root.
--   mode: the weakest lock of a command that may have changed a table.
-- Writes: as switch_off().
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
    roots := array(select ct.relid from gdq.captured_leaf cl join gdq.captured_table ct using (table_id)
                    where cl.leaf = any (altered));
  exception when lock_not_available then
    roots := array(select split_part(tg.tgname, '_', 2)::oid from pg_trigger tg
                    where tg.tgrelid = any (altered) and tg.tgname ~ '^!gdq_\d+_\d+_[iudtb]$');
  end;
  for r in select rel, q, bool_or(own) as own
             from (select unnest(altered) as rel, true as own
                   union all
                   -- the trigger's name has the root, whose partition it may be on
                   select split_part(tg.tgname, '_', 2)::oid, split_part(tg.tgname, '_', 2)::oid = tg.tgrelid
                     from pg_trigger tg
                    where tg.tgrelid = any (touched) and tg.tgname ~ '^!gdq_\d+_\d+_[iudtb]$'
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
      perform gdq.switch_off(r.q, r.rel, reason);
    else
      perform gdq.note_resync(r.q, r.rel, 'disarmed', reason || ' of a partition');
    end if;
  end loop;
end
$$;
comment on function gdq.switch_off_locked(text, text) is
  'Switches capture off for every captured table that this transaction may have changed.';

-- disarm_restored(tag): does the work of the DDL guard while a queue waits for its rebase. Control rows and the names
-- of capture functions hold oids of the other cluster, so only the triggers tell which functions a table has. The
-- functions of every table that this transaction has locked for column DDL are switched off; rebase() makes them
-- anew.
-- Writes: capture functions, resync, the event log.
create or replace function gdq.disarm_restored(tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
begin
  for r in select tg.tgrelid, split_part(tg.tgname, '_', 3)::integer as queue_id, array_agg(p.proname) as functions
             from unnest(gdq.locked_tables('AccessExclusiveLock')) l
             join pg_trigger tg on tg.tgrelid = l and tg.tgname ~ '^!gdq_\d+_\d+_[iud]$'
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
