-- sequence_info(queue): one row for each published sequence of a queue (NULL: of all queues).
-- Result: last_value, is_called: as published last, with the tick; last_value NULL: it could not be read at that tick,
-- or no tick was taken since the sequence was added. state: ok; dropped; unreadable when the owner of gdq has lost the
-- right to read it. Writes: nothing. Errors: 42704.
create or replace function gdq.sequence_info(queue text default null)
  returns table (queue_name text, sequence_name text, last_value bigint, is_called boolean, tick bigint, state text)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select q.queue_name, coalesce(gdq.table_name(ps.relid), ps.sequence_name),
         st.last_values[place], st.called[place], st.tick_id,
         case when gdq.table_name(ps.relid) is null then 'dropped'
              when has_table_privilege(ps.relid, 'select')
                   and has_schema_privilege((select c.relnamespace from pg_class c where c.oid = ps.relid), 'usage')
                then 'ok'
              else 'unreadable' end
    from gdq.queue q join gdq.published_sequence ps using (queue_id)
    left join lateral gdq.sequences_at(q.queue_id, null) st on true
   cross join lateral array_position(st.sequence_ids, ps.sequence_id) place
   where queue is null or q.queue_id = gdq.find_queue(queue) order by 1, 2
$$;
comment on function gdq.sequence_info(text) is 'Published sequences with the value published last.';
