-- consumer_tables(queue, consumer): the captured tables that a consumer takes, with what it needs to know of each. It
-- reads no log and no file, so that a program may ask often.
-- Result: tbl: also the oid of a table that is gone; table_name: the last one known. is_there: false once the table was
-- dropped, or is captured through its root alone. version: the newest. From mode on: options of add_table(). Writes:
-- nothing. Errors: 42704; 42501 for the consumer of another role.
create or replace function gdq.consumer_tables(queue text, consumer text)
  returns table (tbl regclass, table_name text, is_there boolean, version bigint, mode text, key text[],
                 operations text[], "where" text, always boolean, origin boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
as $$
#variable_conflict use_column
declare
  id integer := gdq.find_subscription(queue, consumer);
begin
  perform gdq.check_consumer_role(id);
  return query
    select ct.relid, coalesce(n.name, gdq.last_table_name(ct.table_id)),
           n.name is not null and gdq.capture_state(ct.queue_id, ct.relid) not in ('dropped', 'covered'),
           v.version_id, ct.mode,
           (select array_agg(c->>'name') from jsonb_array_elements(v.columns) c where (c->>'key')::boolean),
           ct.operations, ct.row_filter->>'text', ct.always, ct.origin
      from gdq.subscribed_tables(id) ct
     cross join lateral (select gdq.table_name(ct.relid) as name offset 0) n
     cross join lateral (select tv.version_id, tv.columns from gdq.table_version tv
                          where tv.table_id = ct.table_id order by tv.version_id desc limit 1) v
     order by 2;
end
$$;
comment on function gdq.consumer_tables(text, text) is 'The captured tables that a consumer takes.';
