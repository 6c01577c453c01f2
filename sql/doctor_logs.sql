-- doctor_logs(queue_id, patience): the part of doctor() about logs: those that cannot switch to their next segment or
-- be emptied, with who is in the way, and indexes that are behind. Writes: nothing.
create or replace function gdq.doctor_logs(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  block constant bigint := current_setting('block_size')::bigint;
  behind_max constant bigint := 16777216;
  control_max constant bigint := 4194304;
begin
  return query
  with logs as materialized (
    select l.* from gdq.filled_logs(doctor_logs.queue_id) l
  ), held as materialized (
    select h.relation, h.who, h.cure from gdq.lock_holders(array(select l.segment::oid from logs l where not l.written), '{}', patience) h
  ), large as (
    select l.queue_id, l.table_id, sum(l.total) filter (where l.written) as total, array_agg(l.segment) filter (where l.next) as next
      from logs l group by 1, 2
  )
  select 'warning', 'rotation_blocked', n.name, format('the log of %s holds %s and cannot switch: %s', n.name, pg_size_pretty(l.total), b.who), b.cure, false
    from large l join gdq.queue q using (queue_id)
   cross join lateral gdq.log_name(l.queue_id, l.table_id) n(name)
   cross join lateral (select * from gdq.segment_blockers(l.queue_id, l.table_id, l.next) where l.next is not null
                       union all
                       select h.who, h.cure from gdq.captured_table ct, gdq.lock_holders('{}', array[gdq.lock_key('capture', ct.relid)], patience) h
                        where l.next is null and ct.table_id = l.table_id) b
   where l.total > 2 * q.rotation_bytes
  union all
  select 'warning', 'truncation_blocked', l.segment::text, format('segment %s is read by all and cannot be emptied: held by %s', l.segment, h.who), h.cure, false
    from held h join logs l on l.segment = h.relation
   where gdq.segment_is_consumed(l.segment, gdq.held_snapshot(l.queue_id, l.table_id))
  union all
  select 'warning', 'index_behind', b.segment::text,
         format('%s of segment %s are not in the summary of its index: every batch reads them whole', pg_size_pretty(b.behind), b.segment),
         'Start gdq ticker, which keeps it up to date.', true
    from (select l.segment, gdq.unsummarised_pages(l.segment) * block as behind from logs l where l.bytes > behind_max) b where b.behind > behind_max;
  -- what keeps every log of a queue, and the control tables, from being emptied
  return query
  select 'warning', 'truncation_blocked', q.queue_name, format('no log of queue %I can be emptied: %s is registering or moving a consumer', q.queue_name, h.who), h.cure, false
    from gdq.queue q cross join lateral gdq.lock_holders('{}', array[gdq.lock_key('position', q.queue_id)], patience) h
   where doctor_logs.queue_id is null or q.queue_id = doctor_logs.queue_id;
  return query
  select 'warning', 'truncation_blocked', 'gdq.pin', format('the control tables cannot be emptied, and %s holds %s: rows are read by %s', c.name, pg_size_pretty(c.bytes), h.who), h.cure, false
    from (select s.name, s.bytes from gdq.control_sizes() s order by s.bytes desc limit 1) c, gdq.lock_holders(array['gdq.pin'::regclass::oid], '{}', patience) h
   where c.bytes > control_max;
end
$$;
comment on function gdq.doctor_logs(integer, interval) is 'The part of doctor() about logs that cannot be emptied or are slow to read.';

-- filled_logs(queue_id): the log segments of a queue (NULL: all) that hold rows, and their bytes, as log_sizes(). written:
-- what is captured now goes there; next: it will go there after the next switch. table_id NULL: the event log.
-- Writes: nothing.
create or replace function gdq.filled_logs(queue_id integer)
  returns table (queue_id integer, table_id integer, segment regclass, bytes bigint, total bigint, written boolean, next boolean)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  with sizes as materialized (
    select * from gdq.log_sizes(filled_logs.queue_id, true)
  ), newest as materialized (
    -- what is gone or captured through its root is written to no more
    select v.table_id, max(v.version_id) as version_id
      from gdq.captured_table ct join gdq.table_version v using (table_id)
     where not exists (select from gdq.resync r where r.queue_id = ct.queue_id and r.relid = ct.relid and r.kind in ('dropped', 'covered'))
        or gdq.capture_state(ct.queue_id, ct.relid) not in ('dropped', 'covered')
     group by 1
  )
  select z.queue, z.table_id, z.segment, z.bytes, z.total, coalesce(g.slot = r.current_slot, false), coalesce(g.slot = (r.current_slot + 1) % 3, false)
    from sizes z join gdq.log_segment g using (segment)
    left join newest n on n.version_id = g.version_id
    left join gdq.log_ring r on r.version_id = n.version_id
   where z.table_id is not null
  union all
  select z.queue, null, z.segment, z.bytes, z.total, z.segment = e.current, z.segment = e.next
    from sizes z join (select er.queue_id, to_regclass(format('gdq_log.q%s_s%s', er.queue_id, er.current_slot)) as current,
                              to_regclass(format('gdq_log.q%s_s%s', er.queue_id, (er.current_slot + 1) % 3)) as next from gdq.event_ring er) e on e.queue_id = z.queue
   where z.table_id is null
$$;
comment on function gdq.filled_logs(integer) is 'The log segments of a queue that hold rows, and which of them are written.';

-- log_name(queue_id, table_id): a log by the name of its table, or the event log (table_id NULL) by that of its queue.
-- Writes: nothing.
create or replace function gdq.log_name(queue_id integer, table_id integer) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return coalesce((select coalesce(gdq.table_name(ct.relid), ct.table_name) from gdq.captured_table ct where ct.table_id = log_name.table_id),
                  (select format('queue %I', q.queue_name) from gdq.queue q where q.queue_id = log_name.queue_id));
end
$$;
comment on function gdq.log_name(integer, integer) is 'Name of a log as the doctor says it.';

-- segment_blockers(queue_id, table_id, segments): why log segments that hold rows are not empty yet, and the cure: they
-- were written after the last tick; else who has not read them; else who holds them. Writes: nothing.
create or replace function gdq.segment_blockers(queue_id integer, table_id integer, segments regclass[]) returns table (who text, cure text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set intervalstyle = postgres
as $$
#variable_conflict use_column
declare
  last pg_snapshot := (gdq.last_tick(queue_id)).snapshot;
begin
  if exists (select from unnest(segments) s where not gdq.segment_is_consumed(s, last)) then
    return query select 'its next segment has rows from after the last tick', 'Start gdq ticker, or look at its log.';
    return;
  end if;
  return query
  select format('its next segment is kept for %s', string_agg(k.name, ', ' order by k.name)), string_agg(distinct k.cure, ' ')
    from (select format('consumer %I%s', c.consumer_name, case when sp.subscription_id is not null then ', which is paused' end) as name,
                 'See whether the consumer runs and keeps up; unregister it when it is not needed.' as cure, (gdq.position_of(s.subscription_id)).snapshot as held
            from gdq.subscription s join gdq.consumer c using (consumer_id) left join gdq.subscription_pause sp using (subscription_id)
           where s.queue_id = segment_blockers.queue_id and gdq.takes_table(s, segment_blockers.table_id)
          union all
          select format('the retention of %s', q.retention), 'Wait, or set a shorter retention with gdq set-queue.', t.snapshot
            from gdq.queue q join gdq.tick t on t.tick_id = greatest(gdq.retained_tick(q.queue_id, q.retention), q.retain_after)
           where q.queue_id = segment_blockers.queue_id and q.retention > interval '0') k
   where exists (select from unnest(segments) s where not gdq.segment_is_consumed(s, k.held))
  having count(*) > 0;
  if not found then
    return query
    select coalesce('its next segment is read by all and held by ' || string_agg(h.who, '; '), 'its next segment is read by all, and nobody empties it'),
           coalesce(string_agg(h.cure, ' '), 'Start gdq ticker, or look at its log.')
      from gdq.lock_holders(segments::oid[], array[gdq.lock_key('position', queue_id)], interval '0') h;
  end if;
end
$$;
comment on function gdq.segment_blockers(integer, integer, regclass[]) is 'Why log segments that hold rows are not empty yet.';

-- lock_holders(relations, keys, patience): who has held a lock on relations, or advisory locks by their keys, for longer
-- than patience, and how to end that; relation is NULL for keys. Where the age of a transaction is hidden from the owner
-- of gdq, it counts. Writes: nothing.
create or replace function gdq.lock_holders(relations oid[], keys bigint[], patience interval) returns table (relation oid, who text, cure text)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  with locks as materialized (
    select * from pg_locks
  )
  select l.relation, string_agg(distinct case when l.pid is null then format('prepared transaction %L of user %s', p.gid, p.owner) else gdq.session_name(l.pid, null) end, '; '),
         'Wait for it, or end it: ' || string_agg(distinct case when l.pid is null then format('ROLLBACK PREPARED %L, or COMMIT PREPARED', p.gid)
                                                                else format('select pg_terminate_backend(%s)', l.pid) end, '; ')
    from locks l
    left join pg_stat_activity a on a.pid = l.pid
    -- a prepared transaction has no pid, and shows by its xid which it is
    left join locks x on l.pid is null and x.pid is null and x.virtualtransaction = l.virtualtransaction and x.locktype = 'transactionid'
    left join pg_prepared_xacts p on p.transaction = x.transactionid
   where l.granted and l.pid is distinct from pg_backend_pid() and l.database = (select d.oid from pg_database d where d.datname = current_database())
     and ((l.locktype = 'relation' and l.relation = any (relations))
          or (l.locktype = 'advisory' and l.objsubid = 1 and (l.classid::bigint << 32 | l.objid::bigint) = any (keys)))
     and coalesce(a.xact_start, p.prepared, '-infinity') < clock_timestamp() - patience
   group by 1
$$;
comment on function gdq.lock_holders(oid[], bigint[], interval) is 'Who has held locks for long, and how to end that.';

-- session_name(pid, since): a session with its user, application, state and the age of its transaction; since: what is
-- known of that where the server hides it. NULL without a pid. Writes: nothing.
create or replace function gdq.session_name(pid integer, since timestamptz) returns text
language sql volatile security definer set search_path = pg_catalog, pg_temp set intervalstyle = postgres
as $$
  select format('pid %s (%s)', session_name.pid, concat_ws(', ', 'user ' || a.usename, 'application ' || nullif(a.application_name, ''), a.state,
           'in a transaction for ' || case when a.xact_start is null then 'at least ' end || date_trunc('second', clock_timestamp() - least(a.xact_start, since))))
    from (select session_name.pid as n) s left join pg_stat_activity a on a.pid = s.n where s.n is not null
$$;
comment on function gdq.session_name(integer, timestamptz) is 'A session with its user, application, state and the age of its transaction.';

-- control_sizes(): bytes of the control tables that rotate, both slots. Writes: nothing.
create or replace function gdq.control_sizes() returns table (name text, bytes bigint)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select c.oid::regclass::text, (select sum(pg_relation_size(i.inhrelid)) from pg_inherits i where i.inhparent = c.oid)::bigint
    from pg_class c where c.relnamespace = 'gdq'::regnamespace and c.relkind = 'p'
$$;
comment on function gdq.control_sizes() is 'Bytes of the control tables that rotate.';

-- unsummarised_pages(segment): pages of a log segment that its BRIN index does not describe: what a look for a number
-- that no row has must read all the same. Writes: nothing.
create or replace function gdq.unsummarised_pages(segment regclass) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set max_parallel_workers_per_gather = 0
as $$
declare
  plan json;
begin
  execute format('explain (analyze, timing off, summary off, format json) select from %s where ev_txid = -1', gdq.table_name(segment)) into plan;
  return coalesce((plan->0->'Plan'->>'Lossy Heap Blocks')::bigint, 0);
end
$$;
comment on function gdq.unsummarised_pages(regclass) is 'Pages of a log segment that its BRIN index does not describe.';
