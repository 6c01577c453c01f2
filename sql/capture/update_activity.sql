-- Quiet logs: batches must not read the logs of a thousand tables when three of them change. So a log that has long
-- been empty is quiet: its capture functions announce each change by a row of kind "active" in the queue's event log,
-- see capture_body(). A batch reads only logs that are not quiet, or were announced in its own interval. A log that has
-- rows again becomes busy, and its functions announce nothing.
--   busy -> cooling    empty for a rotation period (a minute at least): the functions announce from now on
--   cooling -> quiet   no transaction can still run functions that do not announce, and the log is empty after that
--   any -> busy        the log holds rows

-- update_activity(): sets the activity of every log: busy, cooling or quiet. It finds quiet logs that hold rows by
-- their announcements of the last 10 seconds, and in one call of 50, at random, by looking at all logs.
-- Result: whether it replaced capture functions; those of 20 tables at most. Writes: as set_activity().
create or replace function gdq.update_activity() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  q gdq.queue;
  t record;
  announced oid[];
  replaced integer := 0;
  all_of_them constant boolean := random() < 0.02;
begin
  for q in select * from gdq.queue loop
    announced := gdq.announced_tables(
      q.queue_id,
      (select k.snapshot from gdq.tick k where k.tick_id = (select gdq.retained_tick(q.queue_id, interval '10 s'))),
      pg_current_snapshot());
    for t in select ct.table_id, r.activity,
                    gdq.is_past(r.switched_at, greatest(q.rotation_period, interval '1 minute')) as idle
               from gdq.captured_table ct
               join gdq.log_ring r on r.version_id = (select max(v.version_id) from gdq.table_version v
                                                       where v.table_id = ct.table_id)
              where ct.queue_id = q.queue_id
                and (r.activity <> 'quiet' or all_of_them or ct.relid = any (announced)) loop
      exit when replaced >= 20;
      if gdq.log_bytes(t.table_id) > 0 then
        if t.activity <> 'busy' then
          replaced := replaced + gdq.set_activity(t.table_id, 'busy')::integer;
        end if;
      elsif t.activity = 'busy' and t.idle then
        replaced := replaced + gdq.set_activity(t.table_id, 'cooling')::integer;
      elsif t.activity = 'cooling' and not gdq.writes_unannounced(t.table_id) then
        -- measured again: rows of a writer that has just ended are in the log now
        if gdq.log_bytes(t.table_id) = 0 then
          perform gdq.set_activity(t.table_id, 'quiet');
        end if;
      end if;
    end loop;
  end loop;
  return replaced > 0;
end
$$;
comment on function gdq.update_activity() is 'Sets the activity of every log: busy, cooling or quiet.';

-- set_activity(table_id, activity): sets the activity of a table's log and arms its capture functions to match, unless
-- DDL or switched-off capture forbids it. Result: whether it was done. Writes: log_ring, the capture functions.
create or replace function gdq.set_activity(table_id integer, activity text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  t gdq.captured_table;
  ring gdq.log_ring;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = set_activity.table_id;
  if not pg_try_advisory_xact_lock(gdq.lock_key('capture', t.relid)) then
    return false;
  end if;
  select * into strict ring from gdq.log_ring r where r.version_id = gdq.current_version(t.table_id);
  if gdq.capture_state(t.queue_id, t.relid) <> 'armed' and activity <> 'busy' then
    return false;
  end if;
  update gdq.log_ring r set activity = set_activity.activity, switched_at = clock_timestamp()
   where r.version_id = ring.version_id;
  if (activity = 'busy') <> (ring.activity = 'busy') and gdq.capture_state(t.queue_id, t.relid) = 'armed' then
    perform gdq.arm(ring.version_id, ring.current_slot);
  end if;
  return true;
exception when lock_not_available or internal_error then
  return false;  -- DDL in an old snapshot is switching capture off, without the advisory lock
end
$$;
comment on function gdq.set_activity(integer, text) is 'Sets the activity of a table''s log: busy, cooling or quiet.';

-- log_bytes(table_id): bytes of a captured table's log in all its versions, without indexes. Writes: nothing.
create or replace function gdq.log_bytes(table_id integer) returns bigint
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  -- an array is looked up by the index also while the tables have no statistics
  select coalesce(sum(pg_relation_size(s.segment)), 0)::bigint
    from gdq.log_segment s
   where s.version_id = any (array(select v.version_id from gdq.table_version v where v.table_id = log_bytes.table_id))
$$;
comment on function gdq.log_bytes(integer) is 'Bytes of a captured table''s log.';

-- writes_unannounced(table_id): whether a transaction may still run the capture functions that do not announce. Every
-- write first locks its table ROW EXCLUSIVE, and a transaction that does so after the functions were replaced runs the
-- new ones. Writes: nothing.
create or replace function gdq.writes_unannounced(table_id integer) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (select from gdq.captured_table ct, pg_locks l
                  where ct.table_id = writes_unannounced.table_id
                    and l.locktype = 'relation' and l.mode = 'RowExclusiveLock'
                    and l.database = (select d.oid from pg_database d where d.datname = current_database())
                    and (l.relation = ct.relid
                         or exists (select from pg_partition_tree(ct.relid) p where p.relid = l.relation)));
end
$$;
comment on function gdq.writes_unannounced(integer) is
  'Whether a transaction may still run capture functions that do not announce.';
