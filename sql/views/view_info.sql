-- view_info(view): one row for each view (NULL: all views), with its age and its last refresh.
-- Result: age: time since the start of the last refresh that succeeded, so the target's snapshot is at most that old;
-- NULL before the first. last_refresh: when the last refresh ended; last_action (full, delta, none or failed),
-- last_reason, rows_changed, error, kind and delta_rows belong to that refresh. group_name: the group that the view is
-- in. owner: the role with whose rights it is refreshed. audit_share, audit_keys: as set_view_audit() has them;
-- audit_credit, audit_need: the seconds that audits may take by now, and that the next is expected to take; last_audit,
-- audits, audits_skipped, audits_failed: those that were; diverged: what an audit found different, until a full load.
-- Writes: nothing. Errors: 42704.
create or replace function gdq.view_info(view text default null)
  returns table (view_name text, queue_name text, consumer_name text, tables text[], target text, definition text,
                 options jsonb, created_at timestamptz, age interval, last_refresh timestamptz, last_action text,
                 last_reason text, rows_changed bigint, error text, kind text, delta_rows bigint, group_name text,
                 owner text, audit_share double precision, audit_keys integer, audit_credit double precision,
                 audit_need double precision, last_audit timestamptz, audits bigint, audits_skipped bigint,
                 audits_failed bigint, diverged text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if view is not null and not exists (select from gdq.view v where v.view_name = view) then
    raise exception 'view "%" does not exist', view
      using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  return query
    select v.view_name, q.queue_name, v.consumer_name,
           array(select coalesce(gdq.table_name(ct.relid), ct.table_name)
                   from gdq.subscription s join gdq.consumer c using (consumer_id),
                        gdq.subscribed_tables(s.subscription_id) ct
                  where s.queue_id = v.queue_id and c.consumer_name = v.consumer_name order by 1),
           v.target, v.definition, v.options, v.created_at, clock_timestamp() - done.started_at,
           r.finished_at, r.action, r.reason, r.rows_changed, r.error, r.kind, r.delta_rows, g.group_name,
           owned.owner_role::text, v.audit_share, v.audit_keys, v.audit_credit, v.audit_need, v.last_audit, v.audits,
           v.audits_skipped, v.audits_failed, v.diverged
      from gdq.view v
      join gdq.queue q using (queue_id)
      left join gdq.view_group g using (group_id)
      left join lateral (select s.owner_role from gdq.subscription s join gdq.consumer c using (consumer_id)
                          where s.queue_id = v.queue_id and c.consumer_name = v.consumer_name) owned on true
      left join lateral (select * from gdq.view_run vr where vr.view_id = v.view_id and vr.finished_at is not null
                          order by vr.run_id desc limit 1) r on true
      left join lateral (select vr.started_at from gdq.view_run vr
                          where vr.view_id = v.view_id and vr.action <> 'failed'
                          order by vr.run_id desc limit 1) done on true
     where view is null or v.view_name = view order by v.view_name;
end
$$;
comment on function gdq.view_info(text) is 'Views with their age and their last refresh.';
