-- summarise_logs(segments): brings the BRIN indexes of log segments of 1 MB and more up to date, since autovacuum is
-- off for logs. A locked segment is left for the next call.
--   segments: these, whatever else is among them; NULL: those of all logs that are not quiet.
-- Sizes are taken of segments only: pg_relation_size() of another table would wait for that table's DDL. Writes: BRIN
-- summaries.
create or replace function gdq.summarise_logs(segments regclass[] default null) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  index oid;
begin
  segments := case when segments is null then array(select s from gdq.queue q, gdq.queue_segments(q.queue_id) s)
                   else array(select c.oid from pg_class c
                               where c.oid = any (segments) and c.relnamespace = 'gdq_log'::regnamespace) end;
  for index in select i.indexrelid
                 from (select s from unnest(segments) s where pg_relation_size(s) >= 1048576 offset 0) large
                 join pg_index i on i.indrelid = large.s loop
    begin
      perform brin_summarize_new_values(index);
    exception when lock_not_available then
      null;
    end;
  end loop;
end
$$;
comment on function gdq.summarise_logs(regclass[]) is 'Brings the BRIN index of growing logs up to date.';
