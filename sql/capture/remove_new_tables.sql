-- remove_new_tables(queue, patterns): removes rules of add_new_tables(). Tables that were captured by them stay
-- captured. patterns: as they were given; NULL: all rules of the queue.
-- Result: how many rules it removed. Writes: new_table_rule, passed_table. Errors: 42704.
create or replace function gdq.remove_new_tables(queue text, patterns text[] default null) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  unknown text;
  removed integer;
begin
  select p into unknown
    from unnest(patterns) p
   where not exists (select from gdq.new_table_rule r where r.queue_id = queue_of and r.pattern = p) limit 1;
  if unknown is not null then
    raise exception 'queue "%" has no rule for new tables %', queue, unknown
      using errcode = 'undefined_object', hint = 'gdq.new_table_info() lists the rules.';
  end if;
  delete from gdq.new_table_rule r where r.queue_id = queue_of and (patterns is null or r.pattern = any (patterns));
  get diagnostics removed = row_count;
  delete from gdq.passed_table p
   where p.queue_id = queue_of
     and ((p.reason is not null and p.relid <> all (array(select w.relid from gdq.wanted_tables() w
                                                            where w.queue_id = queue_of)))
          or not exists (select from gdq.new_table_rule r where r.queue_id = queue_of));
  return removed;
end
$$;
comment on function gdq.remove_new_tables(text, text[]) is 'Removes rules for tables that do not exist yet.';
