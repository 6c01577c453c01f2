-- rewrite_guard(): the event trigger on table_rewrite. It records a gap when a rewrite computes values anew (a default,
-- a new type), which changes rows without events.
-- Writes: as note_or_disarm() and follow_owner(); the alarm. Errors: none but a cancel.
create or replace function gdq.rewrite_guard() returns event_trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set lock_timeout = '100ms' set client_min_messages = error
as $$
declare
  rewritten oid := pg_event_trigger_table_rewrite_oid();
  r record;
  alarm bigint;
  recorded boolean := true;
begin
  -- 2: a default was filled in, 4: a column was converted; 1 (persistence) and 8 (access method) keep the values
  if pg_event_trigger_table_rewrite_reason() & 6 = 0 then
    return;
  end if;
  perform gdq.shorten_lock_timeout();
  for r in select rel, q
             from (select rewritten union select a.relid from pg_partition_ancestors(rewritten) a) t(rel),
                  gdq.queue_ids() q
            where gdq.capture_function(q, rel, 'i') is not null loop
    alarm := coalesce(alarm, gdq.raise_alarm());
    -- before the owner's code converts values: no event trigger has seen a REASSIGN OWNED
    begin
      perform gdq.follow_owner(r.q, r.rel);
    exception when others then
      perform gdq.switch_off(r.q, r.rel, 'its capture functions belong to the role of an earlier owner: ' || sqlerrm);
    end;
    recorded := gdq.note_or_disarm(r.q, r.rel, 'gap', 'the table was rewritten: rows changed without events')
                and recorded;
  end loop;
  if recorded then
    perform gdq.answer_alarm(alarm);
  end if;
exception when others then
  raise log 'gdq: a rewrite of % could not be recorded: %', rewritten, sqlerrm;
end
$$;
comment on function gdq.rewrite_guard() is 'Event trigger: records rewrites that change rows without events.';
