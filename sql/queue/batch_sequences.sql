-- batch_sequences(batch_id, token, changed): the values of the queue's sequences at the end of an open batch. No
-- transaction of the batch, or before it, took a later value, counted in the sequence's own direction. setval(sequence,
-- last_value, is_called) brings a copy to the same state.
--   changed: only sequences whose value differs from that at the start of the batch.
-- Result: one row for each sequence, by name; last_value NULL where the sequence could not be read at that tick: a
-- later batch has the value. Writes: nothing. Errors: GDQ01, GDQ07, 42501.
create or replace function gdq.batch_sequences(batch_id bigint, token uuid, changed boolean default true)
  returns table (sequence_name text, last_value bigint, is_called boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
  queue_of integer := (select s.queue_id from gdq.subscription s where s.subscription_id = b.subscription_id);
begin
  return query
    select coalesce(gdq.table_name(ps.relid), ps.sequence_name), new.last_value, new.is_called
      from gdq.sequences_at(queue_of, b.tick_to) till,
           unnest(till.sequence_ids, till.last_values, till.called) new(sequence_id, last_value, is_called)
      join gdq.published_sequence ps using (sequence_id)
      left join (select old.*
                   from gdq.sequences_at(queue_of, b.tick_from) since,
                        unnest(since.sequence_ids, since.last_values, since.called)
                          old(sequence_id, last_value, is_called)
                  where b.tick_from is not null) old using (sequence_id)
     where not changed or (old.last_value, old.is_called) is distinct from (new.last_value, new.is_called)
     order by 1;
end
$$;
comment on function gdq.batch_sequences(bigint, uuid, boolean) is
  'The values of the queue''s sequences at the end of an open batch.';
