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
#variable_conflict use_variable
declare
  queue_of integer := (select s.queue_id from gdq.subscription s where s.subscription_id = subscription_id);
  relids oid[] := array(select t.relid::oid from gdq.subscribed_tables(subscription_id) t);
  running bigint[] := array(select x::text::bigint from pg_snapshot_xip(since) x);
  looks text;
  found_rows regclass[];
begin
  select string_agg(format('case when exists (select from %1$s where ev_txid >= $1%2$s)'
                           || case when running <> '{}' then
                                ' or exists (select from %1$s where ev_txid = any ($2)%2$s)' else '' end
                           || ' then %3$s::regclass end',
                           log, condition, log::oid), ', ')
    into looks
    from (select g.segment as log, '' as condition
            from gdq.captured_table ct
            join gdq.table_version tv using (table_id)
            join gdq.log_segment g using (version_id)
           where ct.queue_id = queue_of and ct.relid = any (relids)
           union all
          -- the rows that queue_events_sql() takes
          select e, ' and ev_id is not null and ev_kind <> ''message'' and (ev_table is null or ev_table = any ($3))'
            from gdq.event_segments(queue_of) e) logs
   where pg_relation_size(log) > 0;
  if looks is not null then
    execute format('select array_remove(array[%s], null)', looks)
      into found_rows using pg_snapshot_xmax(since)::text::bigint, running, relids;
  end if;
  -- after the look: what is cut is noted before it is truncated
  if exists (select from gdq.cut_tables(subscription_id))
     or exists (select from gdq.log_loss l
                 where l.queue_id = queue_of and not pg_visible_in_snapshot(l.txid::text::xid8, since)) then
    return null;
  end if;
  return coalesce(found_rows, '{}');
end
$$;
comment on function gdq.changed_logs(integer, pg_snapshot) is
  'The segments of logs with changes of a subscription''s tables that are later than a snapshot.';

-- view_changes(view, position, stamp, definitions, audited, until_changed): the segments of logs with changes of a
-- view, empty if there are none by now; NULL where a whole refresh is to look: also while another refresh is at work,
-- and when an audit is due. The view stays locked until the transaction ends.
--   position, stamp, definitions, audited: as for refresh_unchanged(). until_changed: whether to look no further when
--   there are changes.
-- Writes: nothing.
create or replace function gdq.view_changes(view text, "position" text, stamp text, definitions text, audited boolean,
  until_changed boolean) returns regclass[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v record;
  who name;
  id integer;
  pos gdq.position;
  changed regclass[];
begin
  select vv.*, q.queue_name into v from gdq.view vv join gdq.queue q using (queue_id) where vv.view_name = view;
  if "position" is null or v.view_id is null or v.diverged is not null
     or (audited and coalesce(v.audit_share > 0, v.audit_credit >= v.audit_need))
     or not pg_try_advisory_xact_lock(gdq.lock_key('view', v.view_id::oid)) then
    return null;
  end if;
  who := gdq.invoker();
  id := gdq.own_subscription(v.queue_name, v.consumer_name);
  perform gdq.require_member(id, null);
  if gdq.queue_paused(v.queue_id) then
    return null;
  end if;
  -- the logs before the position, so that nothing later can have been dropped; and early, as they change most often
  changed := gdq.changed_logs(id, split_part("position", '/', 5)::pg_snapshot);
  if changed is null or (changed <> '{}' and until_changed) then
    return changed;
  elsif gdq.view_stamp(view) is distinct from stamp then
    return null;
  elsif definitions is not null and gdq.user_definitions() <> definitions then
    return null;
  elsif exists (select from gdq.subscribed_tables(id) t left join pg_class c on c.oid = t.relid
                 where c.relrowsecurity is not false
                    or not has_table_privilege(who, t.relid, 'select')
                    or gdq.capture_state(t.queue_id, t.relid) in ('disarmed', 'dropped')) then
    return null;
  end if;
  pos := gdq.position_of(id);
  return case when "position" = gdq.position_text(v.queue_id, pos.tick_id, pos.snapshot)
               and (changed <> '{}'
                    or exists (select from gdq.tick t
                                where t.tick_id = pos.tick_id
                                  and t.created_at > clock_timestamp() - interval '1 minute')) then changed end;
exception when others then
  return null;  -- a whole refresh tells
end
$$;
comment on function gdq.view_changes(text, text, text, text, boolean, boolean) is
  'The segments of logs with changes of a view; NULL where a whole refresh is to look.';
