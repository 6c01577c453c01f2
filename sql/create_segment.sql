-- create_segment(version_id, slot): one log table of a version, with its BRIN index.
-- The settings are pinned because this also runs inside the application's DDL, whose session may have others.
-- BRIN on ev_txid with minmax_multi: plain minmax would read the whole log when one long transaction is interleaved.
-- Writes: creates gdq_log.t<table>_v<version>_s<slot>, inserts into log_segment.
create or replace function gdq.create_segment(version_id bigint, slot integer) returns regclass
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set default_table_access_method = 'heap' set default_tablespace = '' set client_min_messages = warning
as $$
declare
  v gdq.table_version;
  name text;
  images text;
begin
  select * into strict v from gdq.table_version tv where tv.version_id = create_segment.version_id;
  name := format('t%s_v%s_s%s', v.table_id, v.version_id, slot);
  select string_agg(format(', %I %s', col, c.log_type), '' order by place, c.attnum) into images
    from jsonb_to_recordset(v.columns) c(attnum int, log_type text, log_key text, log_old text, log_new text),
         lateral (values (1, log_key), (2, log_old), (3, log_new)) image(place, col)
   where col is not null;
  execute format(
    'create table gdq_log.%I (ev_id bigint, ev_txid bigint, ev_time timestamptz, ev_op "char"%s) '
    'with (fillfactor = 100, autovacuum_enabled = false, toast.autovacuum_enabled = false)', name, images);
  execute format('create index %I on gdq_log.%I using brin (ev_txid int8_minmax_multi_ops) with (pages_per_range = 16)',
                 name || '_txid', name);
  insert into gdq.log_segment values (v.version_id, slot, format('gdq_log.%I', name)::regclass);
  return format('gdq_log.%I', name)::regclass;
end
$$;
comment on function gdq.create_segment(bigint, integer) is 'Creates one log table of a version, with its BRIN index.';
