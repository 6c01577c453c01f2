-- remove_sequence(queue, sequence): stops publishing the values of a sequence with each tick of a queue.
--   sequence: its name as sequence_info() lists it, also when it is gone.
-- Result: true; false when it was not published. Writes: deletes from published_sequence. Errors: 42704 for the queue.
create or replace function gdq.remove_sequence(queue text, sequence text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  delete from gdq.published_sequence ps
   where ps.queue_id = gdq.find_queue(queue)
     and sequence in (gdq.table_name(ps.relid), case when gdq.table_name(ps.relid) is null then ps.sequence_name end);
  return found;
end
$$;
comment on function gdq.remove_sequence(text, text) is
  'Stops publishing the values of a sequence; false when it was not published.';
