-- Transactions and locks of other sessions that hold up batches and logs.

-- open_writers(queue_id): the open transactions that have written to the logs of a queue.
-- Result: pid, or gid when prepared; segments: the log segments that they hold; since: when they began. Without
-- pg_monitor the server hides the start of other roles' transactions; the first tick that met one gives it instead, and
-- NULL means that no tick did. Writes: nothing.
create or replace function gdq.open_writers(queue_id integer)
  returns table (pid integer, gid text, owner text, xid xid8, segments oid[], since timestamptz)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
  with locks as materialized (
    select l.pid, l.virtualtransaction, l.relation, l.locktype, l.transactionid, l.mode
      from pg_locks l
     where l.granted and ((l.locktype = 'relation' and l.mode = 'RowExclusiveLock'
                           and l.database = (select d.oid from pg_database d where d.datname = current_database()))
                          or (l.locktype = 'transactionid' and l.mode = 'ExclusiveLock'))
  ), logs as (
    select s.segment::oid
      from gdq.captured_table ct
      join gdq.table_version tv using (table_id)
      join gdq.log_segment s using (version_id)
     where ct.queue_id = open_writers.queue_id
    union all
    select e from gdq.event_segments(open_writers.queue_id) e
  ), writers as (
    -- a transaction with savepoints holds several xids: the oldest is its own
    select l.pid, l.virtualtransaction, array_agg(distinct l.relation) as segments,
           (select gdq.full_xid(x.transactionid)
              from locks x
             where x.virtualtransaction = l.virtualtransaction and x.locktype = 'transactionid'
             order by age(x.transactionid) desc limit 1) as xid
      from locks l join logs on logs.segment = l.relation
     where l.locktype = 'relation'
     group by 1, 2
  )
  select w.pid, p.gid, coalesce(a.usename, p.owner)::text, w.xid, w.segments,
         least(a.xact_start, p.prepared, gdq.seen_since(open_writers.queue_id, w.xid))
    from writers w
    left join pg_stat_activity a on a.pid = w.pid
    left join pg_prepared_xacts p on w.pid is null and p.transaction = w.xid::xid
   where w.pid is distinct from pg_backend_pid();
end
$$;
comment on function gdq.open_writers(integer) is 'Open transactions that have written to the logs of a queue.';

-- open_transactions(): sessions of this database whose open transaction has an xid or a snapshot.
-- Result: writes: it has an xid; since: when the transaction began, at the latest, as open_writers() has it; switched:
-- how many logs were switched after that. Writes: nothing.
create or replace function gdq.open_transactions()
  returns table (pid integer, writes boolean, since timestamptz, switched bigint)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  with sessions as (
    select a.pid, a.xact_start, gdq.full_xid(a.backend_xid) as xid, gdq.full_xid(a.backend_xmin) as xmin
      from pg_stat_activity a
     where a.datname = current_database()
       and a.pid <> pg_backend_pid()
       and coalesce(a.backend_type, 'client backend') = 'client backend'
       and (a.backend_xid is not null or a.backend_xmin is not null)
  ), aged as (
    select s.pid, s.xid is not null as writes,
           coalesce(s.xact_start,
                    (select min(least(gdq.seen_since(q.queue_id, s.xid), gdq.seen_since(q.queue_id, s.xmin, true)))
                       from gdq.queue q)) as since
      from sessions s
  )
  select a.pid, a.writes, a.since, (select count(*) from gdq.log_ring r where r.switched_at > a.since) from aged a
$$;
comment on function gdq.open_transactions() is 'Sessions with an open transaction that has an xid or a snapshot.';

-- full_xid(short): the xid of an open transaction with its epoch. Writes: nothing.
create or replace function gdq.full_xid(short xid) returns xid8
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  next_xid constant bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
begin
  -- short may be a little above the snapshot's xmax
  return (next_xid - (((next_xid - short::text::bigint + 2147483648) & 4294967295) - 2147483648))::text::xid8;
end
$$;
comment on function gdq.full_xid(xid) is 'The xid of an open transaction with its epoch.';

-- seen_since(queue_id, xid, ended): the time of the first tick that met an open transaction, which began before that.
-- ended: of the first tick that found the transaction over; a snapshot that lists it as open is older than that. NULL
-- when there is no such tick. A binary search, since there may be a million ticks. Writes: nothing.
create or replace function gdq.seen_since(queue_id integer, xid xid8, ended boolean default false) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  low bigint;
  high bigint;
  middle bigint;
  t gdq.tick;
begin
  select min(tt.tick_id), max(tt.tick_id) + 1 into low, high
    from gdq.tick tt where tt.queue_id = seen_since.queue_id and not tt.refresh;
  while low < high loop
    middle := (low + high) / 2;
    select * into t
      from gdq.tick tt
     where tt.queue_id = seen_since.queue_id and not tt.refresh and tt.tick_id >= middle
     order by tt.tick_id limit 1;
    if (ended and pg_visible_in_snapshot(xid, t.snapshot)) or (not ended and pg_snapshot_xmax(t.snapshot) > xid) then
      high := middle;
    else
      low := t.tick_id + 1;
    end if;
  end loop;
  return (
    select tt.created_at
      from gdq.tick tt
     where tt.queue_id = seen_since.queue_id and not tt.refresh and tt.tick_id >= low
     order by tt.tick_id limit 1);
end
$$;
comment on function gdq.seen_since(integer, xid8, boolean) is
  'Time of the first tick that met a transaction, or found it over.';

-- session_name(pid, since): a session with its user, application, state and the age of its transaction. since: the
-- start of the transaction where the server hides it. NULL without a pid. Writes: nothing.
create or replace function gdq.session_name(pid integer, since timestamptz) returns text
language sql volatile security definer set search_path = pg_catalog, pg_temp set intervalstyle = postgres
as $$
  select format('pid %s (%s)', session_name.pid,
                concat_ws(', ', 'user ' || a.usename, 'application ' || nullif(a.application_name, ''), a.state,
                          'in a transaction for ' || case when a.xact_start is null then 'at least ' end
                          || gdq.span_text(clock_timestamp() - least(a.xact_start, since))))
    from (select session_name.pid as n) s
    left join pg_stat_activity a on a.pid = s.n
   where s.n is not null
$$;
comment on function gdq.session_name(integer, timestamptz) is
  'A session with its user, application, state and the age of its transaction.';

-- lock_holders(relations, keys, patience): the sessions that hold a lock on relations, or an advisory lock by its key,
-- in a transaction older than patience, and how to end them. A transaction whose age is hidden from the owner of gdq
-- counts as older.
-- Result: one row for each relation, and one with relation NULL for the keys. Writes: nothing.
create or replace function gdq.lock_holders(relations oid[], keys bigint[], patience interval)
  returns table (relation oid, who text, cure text)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  with locks as materialized (
    select * from pg_locks
  )
  select l.relation,
         string_agg(distinct case when l.pid is null then
                                    format('prepared transaction %L of user %s', p.gid, p.owner)
                                  else gdq.session_name(l.pid, null) end, '; '),
         'Wait for it, or end it: '
         || string_agg(distinct case when l.pid is null then format('ROLLBACK PREPARED %L, or COMMIT PREPARED', p.gid)
                                     else format('select pg_terminate_backend(%s)', l.pid) end, '; ')
    from locks l
    left join pg_stat_activity a on a.pid = l.pid
    -- a prepared transaction has no pid: its xid leads to its gid
    left join locks x on l.pid is null and x.pid is null
                         and x.virtualtransaction = l.virtualtransaction and x.locktype = 'transactionid'
    left join pg_prepared_xacts p on p.transaction = x.transactionid
   where l.granted
     and l.pid is distinct from pg_backend_pid()
     and l.database = (select d.oid from pg_database d where d.datname = current_database())
     and ((l.locktype = 'relation' and l.relation = any (relations))
          or (l.locktype = 'advisory' and l.objsubid = 1 and (l.classid::bigint << 32 | l.objid::bigint) = any (keys)))
     and coalesce(a.xact_start, p.prepared, '-infinity') < clock_timestamp() - patience
   group by 1
$$;
comment on function gdq.lock_holders(oid[], bigint[], interval) is
  'Sessions that hold locks in a transaction older than patience, and how to end them.';

-- segment_blockers(queue_id, table_id, segments): why log segments that hold rows are not empty yet, and the cure. The
-- first of these that holds: rows were written after the last tick; a consumer or the retention keeps them; a session
-- holds a lock. Writes: nothing.
create or replace function gdq.segment_blockers(queue_id integer, table_id integer, segments regclass[])
  returns table (who text, cure text)
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
  select format('its next segment is kept for %s', string_agg(k.name, ', ' order by k.name)),
         string_agg(distinct k.cure, ' ')
    from (select format('consumer %I%s', c.consumer_name,
                        case when sp.subscription_id is not null then ', which is paused' end) as name,
                 'See whether the consumer runs and keeps up; unregister it when it is not needed.' as cure,
                 (gdq.position_of(s.subscription_id)).snapshot as held
            from gdq.subscription s
            join gdq.consumer c using (consumer_id)
            left join gdq.subscription_pause sp using (subscription_id)
           where s.queue_id = segment_blockers.queue_id and gdq.takes_table(s, segment_blockers.table_id)
          union all
          select format('the retention of %s', q.retention), 'Wait, or set a shorter retention with gdq set-queue.',
                 t.snapshot
            from gdq.queue q
            join gdq.tick t on t.tick_id = greatest(gdq.retained_tick(q.queue_id, q.retention), q.retain_after)
           where q.queue_id = segment_blockers.queue_id and q.retention > interval '0') k
   where exists (select from unnest(segments) s where not gdq.segment_is_consumed(s, k.held))
  having count(*) > 0;
  if not found then
    return query
    select coalesce('its next segment is read by all and held by ' || string_agg(h.who, '; '),
                    'its next segment is read by all, and nobody empties it'),
           coalesce(string_agg(h.cure, ' '), 'Start gdq ticker, or look at its log.')
      from gdq.lock_holders(segments::oid[], array[gdq.lock_key('position', queue_id)], interval '0') h;
  end if;
end
$$;
comment on function gdq.segment_blockers(integer, integer, regclass[]) is
  'Why log segments that hold rows are not empty yet.';
