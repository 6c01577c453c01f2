-- doctor_logs(queue_id, patience): the findings of doctor() about logs that cannot be switched or emptied, with the
-- sessions in the way, and about indexes that are behind. Writes: nothing.
create or replace function gdq.doctor_logs(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  block constant bigint := current_setting('block_size')::bigint;
  behind_max constant bigint := 16777216;
  control_max constant bigint := 4194304;
begin
  return query
  with logs as materialized (
    select l.* from gdq.filled_logs(doctor_logs.queue_id) l
  ), held as materialized (
    select h.relation, h.who, h.cure
      from gdq.lock_holders(array(select l.segment::oid from logs l where not l.written), '{}', patience) h
  ), large as (
    select l.queue_id, l.table_id, sum(l.total) filter (where l.written) as total,
           array_agg(l.segment) filter (where l.next) as next
      from logs l
     group by 1, 2
  )
  select 'warning', 'rotation_blocked', n.name,
         format('the log of %s holds %s and cannot switch: %s', n.name, pg_size_pretty(l.total), b.who), b.cure, false
    from large l join gdq.queue q using (queue_id)
   cross join lateral gdq.log_name(l.queue_id, l.table_id) n(name)
   cross join lateral (select * from gdq.segment_blockers(l.queue_id, l.table_id, l.next) where l.next is not null
                       union all
                       select h.who, h.cure
                         from gdq.captured_table ct,
                              gdq.lock_holders('{}', array[gdq.lock_key('capture', ct.relid)], patience) h
                        where l.next is null and ct.table_id = l.table_id) b
   where l.total > 2 * q.rotation_bytes
  union all
  select 'warning', 'truncation_blocked', l.segment::text,
         format('segment %s is read by all and cannot be emptied: held by %s', l.segment, h.who), h.cure, false
    from held h join logs l on l.segment = h.relation
   where gdq.segment_is_consumed(l.segment, gdq.held_snapshot(l.queue_id, l.table_id))
  union all
  select 'warning', 'index_behind', b.segment::text,
         format('%s of segment %s are not in the summary of its index: every batch reads them whole',
                pg_size_pretty(b.behind), b.segment),
         'Start gdq ticker, which keeps it up to date.', true
    from (select l.segment, gdq.unsummarised_pages(l.segment) * block as behind
            from logs l where l.bytes > behind_max) b
   where b.behind > behind_max;
  -- locks that keep every log of a queue, or the control tables, from being emptied
  return query
  select 'warning', 'truncation_blocked', q.queue_name,
         format('no log of queue %I can be emptied: %s is registering or moving a consumer', q.queue_name, h.who),
         h.cure, false
    from gdq.queue q
   cross join lateral gdq.lock_holders('{}', array[gdq.lock_key('position', q.queue_id)], patience) h
   where doctor_logs.queue_id is null or q.queue_id = doctor_logs.queue_id;
  return query
  select 'warning', 'truncation_blocked', 'gdq.pin',
         format('the control tables cannot be emptied, and %s holds %s: rows are read by %s',
                c.name, pg_size_pretty(c.bytes), h.who), h.cure, false
    from (select s.name, s.bytes from gdq.control_sizes() s order by s.bytes desc limit 1) c,
         gdq.lock_holders(array['gdq.pin'::regclass::oid], '{}', patience) h
   where c.bytes > control_max;
end
$$;
comment on function gdq.doctor_logs(integer, interval) is
  'Findings of doctor() about logs that cannot be emptied or are slow to read.';
