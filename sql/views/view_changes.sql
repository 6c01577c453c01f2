-- What a refresh by a few prepared statements asks: which logs have changes, and whether all else is as it was.

-- changed_since(subscription_id, since): whether the logs hold a change or event, messages aside, of a subscription's
-- tables that is not visible in the snapshot since, or lack some. since: a position of the subscription, so that later
-- rows are kept. Writes: nothing. Errors: 42P01 for a log that is being dropped.
create or replace function gdq.changed_since(subscription_id integer, since pg_snapshot) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return coalesce(gdq.changed_logs(subscription_id, since) <> '{}', true);
end
$$;
comment on function gdq.changed_since(integer, pg_snapshot) is
  'Whether the logs hold changes of a subscription''s tables that are later than a snapshot.';

-- changed_logs(subscription_id, since): the segments of logs that hold a change or event, messages aside, of a
-- subscription's tables that is not visible in the snapshot since; NULL where the logs lack some. since: as for
-- changed_since(). Writes: nothing. Errors: 42P01 for a log that is being dropped.
create or replace function gdq.changed_logs(subscription_id integer, since pg_snapshot) returns regclass[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off
as $$
declare
  running bigint[] := array(select x::text::bigint from pg_snapshot_xip(since) x);
  looks text;
  found_rows regclass[];
begin
  select string_agg(format('case when exists (select from %1$s where ev_txid >= $1%2$s)'
                           || case when running <> '{}' then
                                ' or exists (select from %1$s where ev_txid = any ($2)%2$s)' else '' end
                           || ' then %3$s::regclass end',
                           l.log, l.condition, l.log::oid), ', ')
    into looks
    from gdq.view_logs(subscription_id) l
   where pg_relation_size(l.log) > 0;
  if looks is not null then
    execute format('select array_remove(array[%s], null)', looks)
      into found_rows using pg_snapshot_xmax(since)::text::bigint, running;
  end if;
  -- after the look: what is cut is noted before it is truncated
  return case when not gdq.lacks_changes(subscription_id, since) then coalesce(found_rows, '{}') end;
end
$$;
comment on function gdq.changed_logs(integer, pg_snapshot) is
  'The segments of logs with changes of a subscription''s tables that are later than a snapshot.';

-- view_logs(subscription_id): the segments of all logs that a view reads, with a condition (and ...) on their rows,
-- empty for none. Writes: nothing.
create or replace function gdq.view_logs(subscription_id integer) returns table (log regclass, condition text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  queue_of integer := (select s.queue_id from gdq.subscription s where s.subscription_id = view_logs.subscription_id);
  relids oid[] := array(select t.relid::oid from gdq.subscribed_tables(view_logs.subscription_id) t);
begin
  return query
    select g.segment, ''
      from gdq.captured_table ct
      join gdq.table_version tv using (table_id)
      join gdq.log_segment g using (version_id)
     where ct.queue_id = queue_of and ct.relid = any (relids)
     union all
    -- the rows that queue_events_sql() takes
    select e, format(' and ev_id is not null and ev_kind <> ''message'' and (ev_table is null or ev_table = any (%L))',
                     relids)
      from gdq.event_segments(queue_of) e;
end
$$;
comment on function gdq.view_logs(integer) is 'The segments of all logs that a view reads.';

-- lacks_changes(subscription_id, since): whether the logs lack changes of a subscription's tables that are not visible
-- in the snapshot since. Writes: nothing.
create or replace function gdq.lacks_changes(subscription_id integer, since pg_snapshot) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return case when exists (select from gdq.subscription_resync r
                            where r.subscription_id = lacks_changes.subscription_id and r.kind = 'cut')
              then exists (select from gdq.cut_tables(lacks_changes.subscription_id)) else false end
      or exists (select from gdq.log_loss l join gdq.subscription s using (queue_id)
                  where s.subscription_id = lacks_changes.subscription_id
                    and not pg_visible_in_snapshot(l.txid::text::xid8, since));
end
$$;
comment on function gdq.lacks_changes(integer, pg_snapshot) is
  'Whether the logs lack changes of a subscription that are later than a snapshot.';

-- view_changes(view, position, stamp, definitions, audited, until_changed, looked): the logs with changes of a view,
-- which stays locked until the transaction ends.
--   position, stamp, definitions, audited: as for refresh_unchanged(). until_changed: whether to look no further when
--   there are changes. looked: the segments that the function of look_body() has found; NULL: changed_logs() looks.
-- Result: changed: the segments, empty if there are none by now; NULL where a whole refresh is to look: also while
-- another refresh is at work, and when an audit is due. stays: whether the position may stay where it is without
-- changes; one of a minute is to move, as it keeps logs from being dropped. Writes: nothing.
create or replace function gdq.view_changes(view text, "position" text, stamp text, definitions text, audited boolean,
  until_changed boolean, looked regclass[] default null, out changed regclass[], out stays boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  who name;
  since pg_snapshot := split_part("position", '/', 5)::pg_snapshot;
  found_rows regclass[] := looked;
begin
  if "position" is null then
    return;
  end if;
  if looked is null then
    -- after the lock, and before the position, so that nothing later can have been dropped
    select gdq.changed_logs(s.subscription_id, since) into found_rows
      from gdq.view vv
      join gdq.consumer c on c.consumer_name = vv.consumer_name
      join gdq.subscription s on s.queue_id = vv.queue_id and s.consumer_id = c.consumer_id
     where vv.view_name = view and pg_try_advisory_xact_lock(gdq.lock_key('view', vv.view_id::oid));
    if found_rows is null or (found_rows <> '{}' and until_changed) then
      changed := found_rows;
      return;
    end if;
  end if;
  who := gdq.invoker();
  -- all else in one query; the position has the era
  select found_rows, t.created_at > clock_timestamp() - interval '1 minute'
    into changed, stays
    from gdq.view vv
    join gdq.queue q using (queue_id)
    join gdq.consumer c on c.consumer_name = vv.consumer_name
    join gdq.subscription s on s.queue_id = vv.queue_id and s.consumer_id = c.consumer_id
   cross join lateral (select * from gdq.position pp where pp.subscription_id = s.subscription_id
                        order by pp.batch_no desc limit 1) p
    join gdq.tick t on t.tick_id = p.tick_id
   where vv.view_name = view and vv.diverged is null and not q.paused
     and not (audited and coalesce(vv.audit_share > 0, vv.audit_credit >= vv.audit_need))
     and pg_try_advisory_xact_lock(gdq.lock_key('view', vv.view_id::oid))
     and (s.owner_role = who or gdq.own_subscription(q.queue_name, vv.consumer_name) is not null)
     -- position_text() in the same query
     and "position" = format('queue/%s/%s/%s/%s',
           (select e.era from (select ee.era, ee.written_by = ee.xmin and ee.written_in = 'gdq.era'::regclass as own
                                 from gdq.era ee where ee.queue_id = vv.queue_id order by ee.era_no desc limit 1) e
             where own), t.tick_id, t.nonce, p.snapshot)
     and gdq.view_stamp(view) = stamp
     and (definitions is null or gdq.user_definitions() = definitions)
     and (looked is null
          or not exists (select from gdq.subscription_resync r
                          where r.subscription_id = s.subscription_id and r.kind = 'cut')
             and not exists (select from gdq.log_loss l where l.queue_id = vv.queue_id)
          or not gdq.lacks_changes(s.subscription_id, since))
     and not exists (select from gdq.member m where m.subscription_id = s.subscription_id)
     -- subscribed_tables() and capture_state() in the same query
     and not exists (select from gdq.captured_table ct left join pg_class k on k.oid = ct.relid
                      where ct.queue_id = vv.queue_id
                        and (s.all_tables
                             or exists (select from gdq.subscription_table st
                                         where st.subscription_id = s.subscription_id and st.table_id = ct.table_id))
                        and (k.relrowsecurity is not false
                             or not has_schema_privilege(who, k.relnamespace, 'usage')
                             or not has_table_privilege(who, ct.relid, 'select')
                             or (select r.kind from gdq.resync r
                                  where r.queue_id = ct.queue_id and r.relid = ct.relid and r.kind <> 'gap'
                                  order by r.resync_id desc limit 1) in ('disarmed', 'dropped')));
exception when others then
  changed := null;  -- a whole refresh tells
end
$$;
comment on function gdq.view_changes(text, text, text, text, boolean, boolean, regclass[]) is
  'The segments of logs with changes of a view; NULL where a whole refresh is to look.';
