-- create_segment(version_id, slot): the log tables of one slot of a version, each with its BRIN index: s<slot> for rows
-- with one image (INSERT, DELETE), u<slot> for both images of an UPDATE. Two tables, because a third of a capture
-- function's time goes by the number of columns of the table that it writes to, null or not.
-- The settings are pinned because this also runs inside the application's DDL, whose session may have others.
-- BRIN on ev_txid with minmax_multi: plain minmax would read the whole log when one long transaction is interleaved.
-- Writes: creates gdq_log.t<table>_v<version>_s<slot> and _u<slot>, inserts into log_segment.
create or replace function gdq.create_segment(version_id bigint, slot integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set default_table_access_method = 'heap' set default_tablespace = '' set client_min_messages = warning
as $$
declare
  v gdq.table_version;
  kept record;
  s record;
  images text;
begin
  select * into strict v from gdq.table_version tv where tv.version_id = create_segment.version_id;
  select ct.origin, q.unlogged into strict kept
    from gdq.captured_table ct join gdq.queue q using (queue_id) where ct.table_id = v.table_id;
  for s in select pair, prefixes, format('t%s_v%s_%s%s', v.table_id, v.version_id, letter, slot) as name
             from (values (false, 's', array['row_']), (true, 'u', array['old_', 'new_'])) kind(pair, letter, prefixes)
            where not (pair and v.split) loop
    select string_agg(format(', %I %s', prefix || c.suffix, c.log_type), '' order by place, c.attnum) into images
      from jsonb_to_recordset(gdq.log_columns(v)) c(attnum int, log_type text, suffix text), unnest(s.prefixes) with ordinality p(prefix, place);
    execute format(
      'create %s table gdq_log.%I (ev_id bigint, ev_txid bigint, ev_time timestamptz, ev_op "char"%s%s) '
      'with (fillfactor = 100, autovacuum_enabled = false, toast.autovacuum_enabled = false)',
      case when kept.unlogged then 'unlogged' else '' end, s.name, case when kept.origin then ', ev_origin text' else '' end, images);
    execute format('create index %I on gdq_log.%I using brin (ev_txid int8_minmax_multi_ops) with (pages_per_range = 16)',
                   s.name || '_txid', s.name);
    insert into gdq.log_segment values (v.version_id, slot, s.pair, format('gdq_log.%I', s.name)::regclass);
  end loop;
end
$$;
comment on function gdq.create_segment(bigint, integer) is 'Creates the log tables of one slot of a version, with their BRIN indexes.';
