-- rewrite_guard(): event trigger on table_rewrite: a rewrite that computes values anew (a default, a new type) changes
-- rows without events. Writes: resync and the event log. Errors: none but a cancel.
create or replace function gdq.rewrite_guard() returns event_trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set lock_timeout = '100ms' set client_min_messages = error
as $$
declare
  rewritten oid := pg_event_trigger_table_rewrite_oid();
  r record;
begin
  -- 2: a default was filled in, 4: a column was converted; 1 (persistence) and 8 (access method) keep the values
  if pg_event_trigger_table_rewrite_reason() & 6 = 0 then
    return;
  end if;
  for r in select rel, q
             from (select rewritten union select a.relid from pg_partition_ancestors(rewritten) a) t(rel),
                  gdq.queue_ids() q
            where gdq.capture_function(q, rel, 'i') is not null loop
    perform gdq.note_once(r.q, r.rel, 'gap', 'the table was rewritten: rows changed without events');
  end loop;
exception when others then
  raise log 'gdq: a rewrite of % could not be recorded: %', rewritten, sqlerrm;
end
$$;
comment on function gdq.rewrite_guard() is 'Event trigger: records rewrites that change rows without events.';
