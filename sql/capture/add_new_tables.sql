-- add_new_tables(queue, patterns, excepted, options): makes rules for tables that do not exist yet: a queue captures
-- those that match a pattern when they are made, see capture_created(). Tables that exist are not captured; gdq
-- remembers them. A pattern that is a rule of the queue already gets these exceptions and options.
--   patterns, excepted: of find_tables(), with a schema.
--   options: of add_table(), as for alter_table_options().
-- Result: whether this changed a rule. Writes: new_table_rule, passed_table. Errors: 42704; 42602 for a pattern; 22023
-- for the options; GDQ04.
create or replace function gdq.add_new_tables(queue text, patterns text[], excepted text[] default '{}',
                                              options jsonb default '{}') returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  schemaless text;
  waiting oid[];
  changed bigint;
begin
  perform gdq.require_read_committed('add_new_tables');
  if coalesce(patterns, '{}') = '{}' then
    raise exception 'no pattern is given' using errcode = 'invalid_parameter_value', hint = 'Give some: {public.*}.';
  end if;
  select p into schemaless from unnest(patterns || excepted) p where (gdq.pattern_likes(p))[1] is null limit 1;
  if schemaless is not null then
    raise exception 'pattern % is not of the form SCHEMA.TABLE', schemaless
      using errcode = 'invalid_name', hint = 'The search_path of those who make tables may differ.';
  end if;
  perform gdq.check_rule_options(options);
  waiting := array(select w.relid from gdq.wanted_tables() w where w.queue_id = queue_of);
  insert into gdq.new_table_rule as r (queue_id, pattern, excepted, options)
    select distinct queue_of, p, coalesce(add_new_tables.excepted, '{}'), jsonb_strip_nulls(add_new_tables.options)
      from unnest(patterns) p
    on conflict on constraint new_table_rule_once do update set excepted = excluded.excepted, options = excluded.options
     where (r.excepted, r.options) is distinct from (excluded.excepted, excluded.options);
  get diagnostics changed = row_count;
  insert into gdq.passed_table (queue_id, relid)
    select queue_of, w.relid from gdq.wanted_tables() w where w.queue_id = queue_of and w.relid <> all (waiting)
    on conflict on constraint passed_table_pkey do nothing;
  if not gdq.event_triggers_on() then
    raise warning 'the event triggers of gdq are missing or off: a ticker captures new tables within seconds, and '
                  'consumers copy them'
      using hint = 'As a superuser: gdq create-event-triggers.';
  end if;
  return changed > 0;
end
$$;
comment on function gdq.add_new_tables(text, text[], text[], jsonb) is
  'Makes rules: a queue captures tables that match these patterns when they are made.';

-- check_rule_options(options): error when options of a rule are wrong whatever the table. Writes: nothing. Errors:
-- 22023.
create or replace function gdq.check_rule_options(options jsonb) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  format constant text := coalesce(options->>'format', case when gdq.event_triggers_on() then 'typed' else 'json' end);
begin
  -- the columns that options name are those of a table
  t := gdq.new_options(null::gdq.captured_table, jsonb_build_object('mode', null, 'operations', null,
                                                                    'granularity', null, 'always', null,
                                                                    'unchanged', null)
                                                 || options - '{key,include,columns,exclude,where}'::text[]);
  perform gdq.option_list(options, 'key');
  perform gdq.check_options(null, t.mode, gdq.option_list(options, 'include'), gdq.option_list(options, 'columns'),
                            gdq.option_list(options, 'exclude'), t.operations, t.granularity, t.always,
                            options->>'where', format, t.unchanged);
end
$$;
comment on function gdq.check_rule_options(jsonb) is 'Error when options of a rule are wrong whatever the table.';
