-- rebase(queue, keep): starts a new era of queues that were restored from a dump (queue NULL: of all). Capture is made
-- anew, and every consumer gets a resync event, with the reason, for each of its tables. Messages that a consumer has
-- not passed are still delivered.
--   keep: consumers go on at their positions in the dump, and no table is read afresh. This needs three things. Writers
--   were stopped before the old server's last tick, and begin again after rebase(); both are checked, except for
--   TRUNCATE and for statement triggers of partitions. And consumers read nothing on the old server after the dump,
--   which cannot be checked.
-- It also helps where the last tick is later than the server's transactions: after pg_resetwal, or on a replica made by
-- logical replication.
-- Result: one row for each consumer and table, outcome: resync or kept; no rows when there was nothing to do.
-- Writes: all control tables of the queue, its logs, capture functions and triggers.
-- Errors: 42704; 55000 where event triggers or captured tables are missing or positions cannot be kept; 42501; 54000
-- when consumers have more than 500 different positions; 55P03 when writers or readers hold a table or log: nothing is
-- changed, try again; GDQ04.
create or replace function gdq.rebase(queue text default null, keep boolean default false)
  returns table (queue_name text, consumer_name text, table_name text, outcome text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  q record;
begin
  perform gdq.require_read_committed('rebase');
  if queue is not null and not exists (select from gdq.queue qq where qq.queue_name = queue) then
    raise exception 'queue "%" does not exist', queue
      using errcode = 'undefined_object', hint = 'List the queues with gdq.queue_info().';
  end if;
  if exists (select from gdq.table_version v
              where not exists (select from gdq.captured_table ct where ct.table_id = v.table_id)) then
    raise exception 'the dump was restored in part: captured tables are missing'
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'Restore the whole database; or gdq uninstall and install, and start anew.';
  end if;
  for q in select qq.queue_id, qq.queue_name from gdq.queue qq
            where queue is null or qq.queue_name = queue order by 2 loop
    perform pg_advisory_xact_lock(gdq.lock_key('tick', q.queue_id));
    continue when (gdq.era_of(q.queue_id)).era is not null
                  and gdq.snapshot_le((gdq.last_tick(q.queue_id)).snapshot, pg_current_snapshot());
    if not gdq.event_triggers_on()
       and exists (select from gdq.captured_table ct where ct.queue_id = q.queue_id and ct.format = 'typed') then
      raise exception 'the event triggers of gdq are missing or off: an ALTER TABLE could make writes fail'
        using errcode = 'object_not_in_prerequisite_state',
              hint = 'As a superuser: gdq create-event-triggers, or SELECT gdq.create_event_triggers().';
    end if;
    perform gdq.restore_rights();
    perform gdq.drop_strays();
    execute format('truncate gdq_log.q%s_truncation', q.queue_id);  -- notes of the old cluster's transactions
    perform gdq.rebase_queue(q.queue_id, keep);
    return query
      select q.queue_name, c.consumer_name, t.table_name,
             case when keep and gdq.capture_state(q.queue_id, t.relid) = 'armed' then 'kept' else 'resync' end
        from gdq.subscription s join gdq.consumer c using (consumer_id), gdq.subscribed_tables(s.subscription_id) t
       where s.queue_id = q.queue_id
       order by 2, 3;
  end loop;
end
$$;
comment on function gdq.rebase(text, boolean) is 'Starts a new era of queues that were restored from a dump.';

-- rebase_queue(queue_id, keep): does rebase() for one queue, whose tick lock the caller holds. The numbers that its
-- rows and positions get: restore/rebase_positions.sql. Writes and errors: as rebase().
create or replace function gdq.rebase_queue(queue_id integer, keep boolean) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  positions record;
  tick bigint;
  p record;
  last_number bigint := (select max(t.event_seq) from gdq.tick t
                          where t.queue_id = rebase_queue.queue_id and not t.refresh);
begin
  perform pg_advisory_xact_lock(gdq.lock_key('position', queue_id));
  perform from gdq.subscription s where s.queue_id = rebase_queue.queue_id order by s.subscription_id for update;
  if keep then
    perform gdq.require_kept(queue_id);
  end if;
  perform gdq.rebase_retries(queue_id);
  perform gdq.rebase_resync(queue_id, keep);
  select array_agg(r.old_snapshot order by n) as old, array_agg(r.new_snapshot order by n) as new,
         array_agg(r.event_seq order by n) as seq
    into positions
    from gdq.rebase_positions(queue_id) with ordinality r(old_snapshot, new_snapshot, event_seq, n);
  perform gdq.rebase_events(queue_id, keep, coalesce(positions.old, '{}'), last_number);
  if keep then
    perform gdq.move_rows(ls.segment, coalesce(positions.old, '{}'), last_number)
       from gdq.captured_table ct
       join gdq.table_version v using (table_id)
       join gdq.log_segment ls using (version_id)
      where ct.queue_id = rebase_queue.queue_id;
  end if;
  -- no consumer may start from an old tick; this happens once for each restore, so the dead rows do not matter
  delete from gdq.tick t where t.queue_id = rebase_queue.queue_id;
  delete from gdq.log_loss l where l.queue_id = rebase_queue.queue_id;
  insert into gdq.tick (queue_id, snapshot, event_seq) values (queue_id, gdq.era_snapshot(0), 0);
  perform gdq.start_era(queue_id);
  perform gdq.rebase_tables(queue_id, keep, 'the database was restored from a dump');
  update gdq.horizon h set snapshot = gdq.era_snapshot(0) where h.queue_id = rebase_queue.queue_id;
  for i in 1 .. coalesce(cardinality(positions.new), 0) loop
    insert into gdq.tick (queue_id, snapshot, event_seq) values (queue_id, positions.new[i], positions.seq[i])
      returning tick_id into tick;
    for p in select s.subscription_id, pos.batch_no, pos.event_seq,
                    (select max(b.batch_no) from gdq.batch b where b.subscription_id = s.subscription_id) as open_no
               from gdq.subscription s, gdq.position_of(s.subscription_id) pos
              where s.queue_id = rebase_queue.queue_id and pos.snapshot::text = positions.old[i]::text loop
      perform gdq.fence(p.subscription_id);
      insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
        values (p.subscription_id, greatest(p.batch_no, p.open_no) + 1, tick, positions.new[i], p.event_seq);
    end loop;
  end loop;
end
$$;
comment on function gdq.rebase_queue(integer, boolean) is 'Starts a new era of one restored queue.';

-- require_kept(queue_id): error unless the positions of a restored queue can be kept: every event number that was given
-- out lies before the last tick, so nothing was written after it, on the old server or this one. Writes: nothing.
-- Errors: 55000.
create or replace function gdq.require_kept(queue_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  why text;
begin
  select case when gdq.last_event(q.queue_id) <> (gdq.last_tick(q.queue_id)).event_seq
                then 'changes were captured after its last tick'
              when exists (select from gdq.log_loss l where l.queue_id = q.queue_id)
                then 'a crash had emptied its unlogged logs'
              else coalesce((select 'capture of ' || ct.table_name || ' was off'
                               from gdq.captured_table ct
                              where ct.queue_id = q.queue_id
                                and gdq.capture_state(ct.queue_id, ct.relid) <> 'armed' limit 1),
                            (select 'members of consumer ' || c.consumer_name || ' finished batches before an older one'
                               from gdq.subscription s join gdq.consumer c using (consumer_id),
                                    gdq.position_of(s.subscription_id) p
                              where s.queue_id = q.queue_id
                                and exists (select from gdq.batch_end e
                                             where e.subscription_id = s.subscription_id
                                               and e.batch_no > p.batch_no) limit 1)) end
    into why
    from gdq.queue q
   where q.queue_id = require_kept.queue_id;
  if why is not null then
    raise exception 'the positions of queue "%" cannot be kept: %',
      (select q.queue_name from gdq.queue q where q.queue_id = require_kept.queue_id), why
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'Rebase without keep: every consumer then reads its tables afresh.';
  end if;
end
$$;
comment on function gdq.require_kept(integer) is 'Error unless the positions of a restored queue can be kept.';

-- drop_strays(): drops logs that no control row names. A dump that was restored over an installed database leaves such
-- logs, and new logs may get their names. Writes: drops tables in gdq_log.
create or replace function gdq.drop_strays() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500ms'
as $$
declare
  stray record;
begin
  for stray in select c.oid from pg_class c
                where c.relnamespace = 'gdq_log'::regnamespace and c.relkind = 'r'
                  and c.relname ~ E'^t\\d+_v\\d+_[su]\\d$'
                  and not exists (select from gdq.log_segment s where s.segment = c.oid) loop
    execute format('drop table %s', gdq.table_name(stray.oid));
  end loop;
end
$$;
comment on function gdq.drop_strays() is 'Drops logs that no control row names.';

-- restore_rights(): gives the roles of gdq the rights that a restore without roles or privileges has lost, and takes
-- those of PUBLIC away. Writes: roles and ACLs of gdq and gdq_log. Errors: 42501.
create or replace function gdq.restore_rights() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  revoke execute on all routines in schema gdq from public;
  perform gdq.grant_roles();
  -- in this cluster their names may be those of the roles of other owners; rebase_tables() makes them anew
  perform gdq.revoke_all(r.oid) from pg_roles r where r.rolname ~ '^gdq_capture_[0-9]+$';
  if exists (select from pg_roles where rolname = 'gdq_capture' and not rolcanlogin and not rolsuper) then
    grant usage on schema gdq_log to gdq_capture;
    perform gdq.grant_queue(q.queue_id, gdq.capture_owner()) from gdq.queue q;
  end if;
end
$$;
comment on function gdq.restore_rights() is
  'Gives the roles of gdq the rights that a restore without privileges has lost.';
