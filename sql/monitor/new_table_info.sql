-- new_table_info(queue): one row for each rule of add_new_tables() of a queue (NULL: of all queues).
-- Result: missing: tables that match the rule and are not captured, though they were made later; reason: why the first
-- of them is not. Writes: nothing. Errors: 42704.
create or replace function gdq.new_table_info(queue text default null)
  returns table (queue_name text, pattern text, excepted text[], options jsonb, missing text[], reason text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  only_queue integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
  with wanted as materialized (
    select w.rule_id, gdq.table_name(w.relid) as name, gdq.why_missing(w.reason) as reason from gdq.wanted_tables() w
  )
  select q.queue_name, r.pattern, r.excepted, r.options,
         array(select w.name from wanted w where w.rule_id = r.rule_id order by 1),
         (select w.reason from wanted w where w.rule_id = r.rule_id order by w.name limit 1)
    from gdq.new_table_rule r
    join gdq.queue q using (queue_id)
   where only_queue is null or r.queue_id = only_queue
   order by 1, r.rule_id;
end
$$;
comment on function gdq.new_table_info(text) is 'Rules for tables that do not exist yet, and the tables they miss.';

-- why_missing(reason): why a table that matches a rule is not captured, for a reason of wanted_tables(). Writes:
-- nothing.
create or replace function gdq.why_missing(reason text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce(reason, 'it was made or got its name unseen, and no maintenance has run since')
$$;
comment on function gdq.why_missing(text) is 'Why a table that matches a rule is not captured.';

-- doctor_new_tables(queue_id, patience): the findings of doctor() about tables that match a rule and are not captured.
-- Writes: nothing.
create or replace function gdq.doctor_new_tables(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select 'error', 'new_table_not_captured', gdq.table_name(w.relid),
         format('table %s matches %s, a rule of queue "%s" for new tables, and is not captured: %s',
                gdq.table_name(w.relid), r.pattern, q.queue_name, gdq.why_missing(w.reason)),
         coalesce(w.hint || ' gdq ticker then captures it within a minute.', 'Let gdq ticker run, which captures it.'),
         false
    from gdq.wanted_tables() w
    join gdq.new_table_rule r using (rule_id)
    join gdq.queue q on q.queue_id = w.queue_id
   where doctor_new_tables.queue_id is null or w.queue_id = doctor_new_tables.queue_id
   order by 3, 4
$$;
comment on function gdq.doctor_new_tables(integer, interval) is
  'Findings of doctor() about tables that match a rule and are not captured.';
