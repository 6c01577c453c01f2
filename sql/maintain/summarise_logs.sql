-- summarise_logs(): brings the BRIN indexes of log segments of 1 MB and more up to date, since autovacuum is off for
-- logs. A locked segment is left for the next call. Sizes are taken of segments only: pg_relation_size() of another
-- table would wait for that table's DDL. Writes: BRIN summaries.
create or replace function gdq.summarise_logs() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  log record;
begin
  for log in select i.indexrelid
               from (select s from gdq.queue q, gdq.queue_segments(q.queue_id) s
                      where pg_relation_size(s) >= 1048576 offset 0) large
               join pg_index i on i.indrelid = large.s loop
    begin
      perform brin_summarize_new_values(log.indexrelid);
    exception when lock_not_available then
      null;
    end;
  end loop;
end
$$;
comment on function gdq.summarise_logs() is 'Brings the BRIN index of growing logs up to date.';
