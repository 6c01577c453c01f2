-- check_captured(queue, tbl, snapshot): error unless all changes of a captured table after a snapshot were captured: so
-- a copy of the table at a later snapshot can be taken back to this one, as far as the logs are kept.
-- Result: true. Writes: nothing. Errors: 42704; 22023; GDQ03 when capture had a gap after the snapshot, is off, or
-- began after it.
create or replace function gdq.check_captured(queue text, tbl regclass, snapshot pg_snapshot) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  captured integer := gdq.find_table(queue, tbl);
begin
  if snapshot is null then
    raise exception 'snapshot is NULL' using errcode = 'invalid_parameter_value';
  end if;
  perform gdq.refuse_gap(gdq.find_queue(queue), tbl, snapshot);
  -- adding a table waits for its writers: whatever sees the addition sees all changes from before it
  if not exists (select from gdq.table_version v
                  where v.table_id = captured and pg_visible_in_snapshot(v.txid::text::xid8, snapshot)) then
    raise exception 'capture of table % begins after snapshot %', gdq.table_name(tbl), snapshot
      using errcode = 'GDQ03', hint = 'Take a later snapshot.';
  end if;
  return true;
end
$$;
comment on function gdq.check_captured(text, regclass, pg_snapshot) is
  'True when all changes of a table after a snapshot were captured; else error GDQ03.';
