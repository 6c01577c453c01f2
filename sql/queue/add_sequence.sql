-- add_sequence(queue, sequence): publishes the value of a sequence with each tick of a queue, for consumers that keep a
-- standby copy: a batch then comes with values that no transaction in it has passed. The owner of gdq reads the
-- sequence at each tick, so it needs SELECT on the sequence and USAGE on its schema.
-- Result: true; false when it is published already. Writes: published_sequence. Errors: 42704 for the queue; 42501;
-- 42809 when it is no sequence, or a temporary one.
create or replace function gdq.add_sequence(queue text, sequence regclass) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500ms'
as $$
declare
  queue_of integer := gdq.find_queue(queue);
begin
  if not exists (select from pg_class c where c.oid = sequence and c.relkind = 'S' and c.relpersistence <> 't') then
    raise exception '% is no sequence, or a temporary one', coalesce(gdq.table_name(sequence), sequence::text)
      using errcode = 'wrong_object_type';
  elsif not has_table_privilege(sequence, 'select')
     or not has_schema_privilege((select c.relnamespace from pg_class c where c.oid = sequence), 'usage') then
    raise exception '% may not read sequence %', current_user, gdq.table_name(sequence)
      using errcode = 'insufficient_privilege',
            hint = format('Grant SELECT on the sequence, and USAGE on its schema, to %I.', current_user);
  end if;
  insert into gdq.published_sequence (queue_id, relid, sequence_name)
    values (queue_of, sequence, gdq.table_name(sequence))
    on conflict do nothing;
  return found;
end
$$;
comment on function gdq.add_sequence(text, regclass) is
  'Publishes the value of a sequence with each tick of a queue; false when it was published.';
