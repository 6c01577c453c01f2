-- doctor_writers(queue_id, patience): the findings of doctor() about transactions that do not end. One that has changed
-- captured tables, or is prepared, holds back its changes and the segments that it wrote to. Any other with an xid or a
-- snapshot is a note, since batches and truncation go on beside it. Writes: nothing.
create or replace function gdq.doctor_writers(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set intervalstyle = postgres
as $$
#variable_conflict use_column
begin
  return query
  with open as materialized (
    select w.*
      from gdq.queue q, gdq.open_writers(q.queue_id) w
     where doctor_writers.queue_id is null or q.queue_id = doctor_writers.queue_id
  ), writers as (
    select w.pid, min(w.since) as since, count(distinct s) as segments
      from open w, unnest(w.segments) s
     where w.pid is not null
     group by 1
  )
  select 'warning', 'long_writer', 'pid ' || w.pid,
         format('%s has changed captured tables and does not end: its changes reach nobody, and %s log segments cannot '
                'be emptied', gdq.session_name(w.pid, w.since), w.segments),
         format('Wait for it, or end it: select pg_terminate_backend(%s)', w.pid), false
    from writers w where w.since < clock_timestamp() - patience
  union all
  select 'warning', 'prepared_transaction', p.gid,
         format('transaction %L of user %s is prepared since %s and not over%s',
                p.gid, p.owner, date_trunc('second', p.prepared),
                case when w.xid is not null then
                  ': its changes reach nobody, and log segments that it wrote to cannot be emptied' end),
         format('COMMIT PREPARED %L or ROLLBACK PREPARED %1$L', p.gid), false
    from pg_prepared_xacts p
    left join (select distinct o.xid::xid as xid from open o where o.pid is null) w on w.xid = p.transaction
   where p.database = current_database() and p.prepared < clock_timestamp() - patience
  union all
  select 'note', 'long_transaction', 'pid ' || t.pid,
         format(case when t.writes then
                       '%s has written, though not to captured tables, and does not end: every tick lists it as open, '
                       'and if it still changes captured tables, these changes come after its end'
                     else '%s keeps an old snapshot%s: dead rows stay, and capture of a table that it alters goes off '
                          'until it ends' end,
                gdq.session_name(t.pid, t.since),
                case when t.switched > 0 then format(', from before %s logs were switched', t.switched) end),
         format('Wait for it, or end it: select pg_terminate_backend(%s)', t.pid), false
    from gdq.open_transactions() t
   where t.since < clock_timestamp() - patience and t.pid not in (select w.pid from writers w);
end
$$;
comment on function gdq.doctor_writers(integer, interval) is 'Findings of doctor() about transactions that do not end.';
