-- Ticks, positions and log rows hold transaction numbers of one cluster. A copy of them that was dumped and restored is
-- in a cluster with other numbers: rows would be delivered twice, or never. Each queue has a row that knows its own
-- xmin and the oid of its table, which only a dump changes: pg_upgrade, a promoted standby, VACUUM FULL or FREEZE and
-- CREATE DATABASE ... TEMPLATE keep both. (The system identifier is no test: pg_upgrade changes it.)

-- start_era(queue_id): marks that the queue's numbers are this cluster's from now on. Result: the era. Writes: era.
create or replace function gdq.start_era(queue_id integer) returns uuid
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  no bigint;
  started uuid;
begin
  insert into gdq.era (queue_id, written_by, written_in) values (queue_id, '0', 'gdq.era'::regclass)
    returning era_no, era into no, started;
  -- xmin is the number of this transaction or savepoint, which no function tells; the new row version has it too
  update gdq.era e set written_by = e.xmin where e.era_no = no;
  return started;
end
$$;
comment on function gdq.start_era(integer) is 'Starts an era of a queue.';

-- era_of(queue_id): the era that a queue is in; NULL when its rows were restored from a dump. Writes: nothing.
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
comment on function gdq.era_of(integer) is 'The era that a queue is in; NULL when it was restored from a dump.';

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

-- require_era(queue_id): error when a queue (NULL: any queue) was restored from a dump and not rebased. Writes: nothing.
-- Errors: GDQ07.
create or replace function gdq.require_era(queue_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  restored text;
begin
  if queue_id is null then
    select r.queue_name into restored from gdq.restored_queues() r limit 1;
  else
    -- era_of(), in one query: every call of a consumer asks
    select q.queue_name into restored
      from gdq.queue q
     where q.queue_id = require_era.queue_id
       and (select ee.written_by = ee.xmin and ee.written_in = 'gdq.era'::regclass from gdq.era ee
             where ee.queue_id = q.queue_id order by ee.era_no desc limit 1) is not true;
  end if;
  if restored is not null then
    raise exception 'queue "%" was restored from a dump: its ticks, positions and logs are of another cluster', restored
      using errcode = 'GDQ07', hint = 'gdq rebase, or SELECT * FROM gdq.rebase(), starts a new era: consumers read their tables afresh.';
  end if;
end
$$;
comment on function gdq.require_era(integer) is 'Error GDQ07 when a queue was restored from a dump and not rebased.';

-- disarm_restored(tag): what the DDL guard does while a queue waits for its rebase. Control rows and the names of capture
-- functions hold oids of the other cluster, so nothing but the triggers tells which functions a table has: those of
-- every table that this transaction has locked for column DDL are switched off, and rebase() makes them anew.
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
             join pg_proc p on p.oid = tg.tgfoid and p.pronamespace = 'gdq_log'::regnamespace and strpos(p.prosrc, 'insert into') > 0
            where split_part(tg.tgname, '_', 3)::integer in (select q.queue_id from gdq.restored_queues() q)
            group by 1, 2 loop
    for i in 1 .. cardinality(r.functions) loop
      execute format('create or replace function gdq_log.%I() returns trigger language plpgsql security definer as %L', r.functions[i], E'begin\n  return null;\nend');
    end loop;
    perform gdq.note_resync(r.queue_id, r.tgrelid, 'disarmed', tag || ' between restore and rebase');
  end loop;
end
$$;
comment on function gdq.disarm_restored(text) is 'Switches capture off for tables whose columns change between restore and rebase.';
