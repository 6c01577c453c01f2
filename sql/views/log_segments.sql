-- log_segments(queue, tables): the log segments of these tables (NULL: of all), those of the event log, and gdq.pin. A
-- reader locks them ACCESS SHARE before its first snapshot. Writes: nothing. Errors: 42704.
create or replace function gdq.log_segments(queue text, tables regclass[] default null) returns setof regclass
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
begin
  return query
    select s.segment
      from gdq.captured_table ct
      join gdq.table_version v using (table_id)
      join gdq.log_segment s using (version_id)
     where ct.queue_id = queue_of and (tables is null or ct.relid = any (tables))
    union all
    select e from gdq.event_segments(queue_of) e
    union all
    select 'gdq.pin'::regclass;
end
$$;
comment on function gdq.log_segments(text, regclass[]) is
  'The log segments of captured tables, to lock before a first snapshot.';
