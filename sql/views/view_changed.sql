-- view_changed(view): whether a refresh would find changes: a row or event of the view's tables that became visible
-- after the position of its consumer, or a gap. It costs a look at the index of each log. Two things do not count:
-- changes made to the target itself, and capture being off, as changes are then not captured. Writes: nothing. Errors:
-- 42704.
create or replace function gdq.view_changed(view text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
begin
  select ss.subscription_id into id
    from gdq.view v
    join gdq.consumer c on c.consumer_name = v.consumer_name
    join gdq.subscription ss on ss.queue_id = v.queue_id and ss.consumer_id = c.consumer_id
   where v.view_name = view;
  if id is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  perform gdq.require_era((select v.queue_id from gdq.view v where v.view_name = view));
  return gdq.changed_since(id, (gdq.position_of(id)).snapshot);
exception when undefined_table then
  return true;  -- a log or a table is gone or being dropped: the refresh reports that
end
$$;
comment on function gdq.view_changed(text) is 'Whether a refresh of a view would find changes.';

-- changed_since(subscription_id, since): whether the logs hold a change or event, messages aside, of a subscription's
-- tables that is not visible in the snapshot since, or lack some. since: a position of the subscription, so that later
-- rows are kept. Writes: nothing. Errors: 42P01 for a log that is being dropped.
create or replace function gdq.changed_since(subscription_id integer, since pg_snapshot) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off
as $$
#variable_conflict use_variable
declare
  queue_of integer := (select s.queue_id from gdq.subscription s where s.subscription_id = subscription_id);
  relids oid[] := array(select t.relid::oid from gdq.subscribed_tables(subscription_id) t);
  running bigint[] := array(select x::text::bigint from pg_snapshot_xip(since) x);
  looks text;
  found_row boolean;
begin
  select string_agg(format('exists (select from %1$s where ev_txid >= $1%2$s)'
                           || case when running <> '{}' then
                                ' or exists (select from %1$s where ev_txid = any ($2)%2$s)' else '' end,
                           log, condition), ' or ')
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
    execute 'select ' || looks into found_row using pg_snapshot_xmax(since)::text::bigint, running, relids;
  end if;
  -- after the look: what is cut is noted before it is truncated
  return coalesce(found_row, false)
      or exists (select from gdq.cut_tables(subscription_id))
      or exists (select from gdq.log_loss l
                  where l.queue_id = queue_of and not pg_visible_in_snapshot(l.txid::text::xid8, since));
end
$$;
comment on function gdq.changed_since(integer, pg_snapshot) is
  'Whether the logs hold changes of a subscription''s tables that are later than a snapshot.';
