-- view_changed(view): whether a refresh would find changes: a row or event of the view's tables that became visible
-- after the position of its consumer, or a gap. It costs a look at the index of each log. Two things do not count:
-- changes made to the target itself, and capture being off, as changes are then not captured. Writes: nothing. Errors:
-- 42704.
create or replace function gdq.view_changed(view text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  s record;
  since pg_snapshot;
  log regclass;
  found_row boolean;
begin
  select q.queue_name, ss.subscription_id into s
    from gdq.view v
    join gdq.queue q using (queue_id)
    join gdq.consumer c on c.consumer_name = v.consumer_name
    join gdq.subscription ss on ss.queue_id = v.queue_id and ss.consumer_id = c.consumer_id
   where v.view_name = view;
  if s.subscription_id is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  since := (gdq.position_of(s.subscription_id)).snapshot;
  if exists (select from gdq.cut_tables(s.subscription_id))
     or exists (select from gdq.delta_events(s.queue_name, since, pg_current_snapshot(),
                              array(select t.relid::regclass from gdq.subscribed_tables(s.subscription_id) t)) e
                 where e.kind <> 'message' and e.ev_id is not null) then
    return true;
  end if;
  for log in select g.segment
               from gdq.subscribed_tables(s.subscription_id) t
               join gdq.table_version tv using (table_id)
               join gdq.log_segment g using (version_id)
              where pg_relation_size(g.segment) > 0 loop
    execute format($sql$
      select exists (select from %1$s where ev_txid >= $1)
          or exists (select from %1$s where ev_txid = any ($2)) $sql$, log)
      into found_row
      using pg_snapshot_xmax(since)::text::bigint, array(select x::text::bigint from pg_snapshot_xip(since) x);
    if found_row then
      return true;
    end if;
  end loop;
  return false;
exception when sqlstate 'GDQ02' or undefined_table then
  return true;  -- a log or a table is gone or being dropped: the refresh reports that
end
$$;
comment on function gdq.view_changed(text) is 'Whether a refresh of a view would find changes.';
