-- remove_table(queue, tbl): stops capturing a table and drops its logs, read or not. tbl may be the oid of a table that
-- is gone. Writes: drops triggers, functions, logs; deletes control rows.
-- Errors: 42704; 55P03 when writers or readers hold the table or a log: nothing is changed, try again.
create or replace function gdq.remove_table(queue text, tbl regclass) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set lock_timeout = '500ms' set client_min_messages = warning
as $$
declare
  id integer := gdq.find_table(queue, tbl);
  queue_of integer := gdq.find_queue(queue);
  op text;
  s record;
begin
  perform gdq.require_read_committed('remove_table');
  -- tells the DDL guard that what follows is no accident
  insert into gdq.resync (queue_id, relid, kind, reason) values (queue_of, tbl, 'dropped', 'remove_table');
  begin
    -- dropping the functions takes the triggers along, and needs no ownership of the table
    foreach op in array array['i', 'u', 'd', 't'] loop
      execute format('drop function if exists gdq_log.%I() cascade', gdq.capture_name(queue_of, tbl, op));
    end loop;
    perform pg_advisory_xact_lock(gdq.lock_key('capture', tbl));
    for s in select gdq.table_name(ls.segment) as name
               from gdq.log_segment ls join gdq.table_version v using (version_id) where v.table_id = id loop
      execute format('drop table %s', s.name);
    end loop;
    perform gdq.drop_row_type(v.version_id) from gdq.table_version v where v.table_id = id;
  exception when lock_not_available then
    raise exception 'table % or its log is busy: no lock within 500 ms', coalesce(gdq.table_name(tbl), tbl::text)
      using errcode = 'lock_not_available', hint = 'Nothing was changed. Try again.';
  end;
  delete from gdq.resync r where r.queue_id = queue_of and r.relid = tbl;
  delete from gdq.captured_table ct where ct.table_id = id;
end
$$;
comment on function gdq.remove_table(text, regclass) is 'Stops capturing a table and drops its logs.';
