-- Ticks as positions use them: the last tick, the tick at a time, and the oldest snapshot for which a log keeps rows.

-- last_tick(queue_id): the newest tick of a queue, except those of refreshes. Writes: nothing.
create or replace function gdq.last_tick(queue_id integer) returns gdq.tick
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select t from gdq.tick t where t.queue_id = last_tick.queue_id and not t.refresh order by t.tick_id desc limit 1);
end
$$;
comment on function gdq.last_tick(integer) is 'The newest tick of a queue.';

-- last_event(queue_id): the event number that a queue's sequence gave out last; 0 before the first. It does not depend
-- on the snapshot. Writes: nothing.
create or replace function gdq.last_event(queue_id integer) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return coalesce(pg_sequence_last_value(to_regclass(format('gdq_log.%I', 'q' || queue_id || '_ev'))), 0);
end
$$;
comment on function gdq.last_event(integer) is 'The event number that a queue gave out last.';

-- tick_at(queue_id, moment): the newest tick of a queue that was taken at that moment or before, else its oldest. A
-- binary search, since there may be a million ticks. Writes: nothing.
create or replace function gdq.tick_at(queue_id integer, moment timestamptz) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  oldest bigint;
  newest bigint;
  middle bigint;
  t gdq.tick;
begin
  select min(tt.tick_id), max(tt.tick_id) into oldest, newest
    from gdq.tick tt where tt.queue_id = tick_at.queue_id and not tt.refresh;
  while oldest < newest loop
    middle := oldest + (newest - oldest + 1) / 2;
    select * into t from gdq.tick tt
     where tt.queue_id = tick_at.queue_id and not tt.refresh and tt.tick_id between middle and newest
     order by tt.tick_id limit 1;
    if t.created_at <= moment then
      oldest := t.tick_id;
    else
      newest := middle - 1;
    end if;
  end loop;
  return oldest;
end
$$;
comment on function gdq.tick_at(integer, timestamptz) is
  'The newest tick of a queue at a moment or before, else its oldest.';

-- retained_tick(queue_id, age): the newest tick of a queue that has at least this age, else its oldest.
-- Writes: nothing.
create or replace function gdq.retained_tick(queue_id integer, age interval) returns bigint
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select gdq.tick_at(queue_id, clock_timestamp() - age)
$$;
comment on function gdq.retained_tick(integer, interval) is
  'The newest tick of a queue that has at least this age, else its oldest.';

-- held_snapshot(queue_id, table_id): the oldest snapshot for which a table's log (NULL: the event log) must keep rows:
-- of the positions of the subscriptions that take the table, the last tick, and the tick that is retention old. A
-- subscription without a position keeps everything. Writes: nothing.
create or replace function gdq.held_snapshot(queue_id integer, table_id integer) returns pg_snapshot
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select h
    from (select coalesce(p.snapshot, '1:1:') as h
            from gdq.subscription s
            left join lateral (select pp.snapshot from gdq.position pp
                                where pp.subscription_id = s.subscription_id
                                order by pp.batch_no desc limit 1) p on true
           where s.queue_id = held_snapshot.queue_id
             and (s.all_tables or held_snapshot.table_id is null
                  or exists (select from gdq.subscription_table st
                              where st.subscription_id = s.subscription_id and st.table_id = held_snapshot.table_id))
           union all
          select (gdq.last_tick(held_snapshot.queue_id)).snapshot
           union all
          select t.snapshot
            from (select greatest(gdq.retained_tick(q.queue_id, q.retention), q.retain_after) as tick_id
                    from gdq.queue q
                   where q.queue_id = held_snapshot.queue_id and q.retention > interval '0') kept
            join gdq.tick t using (tick_id)) held
   order by pg_snapshot_xmax(h), (select count(*) from pg_snapshot_xip(h)) desc limit 1
$$;
comment on function gdq.held_snapshot(integer, integer) is 'The oldest snapshot for which a log must keep rows.';
