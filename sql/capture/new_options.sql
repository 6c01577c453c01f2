-- new_options(t, options): a captured table with these options of alter_table_options() in place of its own. Writes:
-- nothing. Errors: 22023, 42703.
create or replace function gdq.new_options(t gdq.captured_table, options jsonb) returns gdq.captured_table
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  known constant text[] := '{key,include,columns,exclude,where,
                             allow_rls,always,format,granularity,mode,operations,origin,pin_search_path,unchanged}';
  -- the default of all other options is NULL
  defaults constant jsonb := jsonb_build_object(
    'mode', 'full',
    'operations', array['insert', 'update', 'delete', 'truncate'],
    'granularity', 'row',
    'always', false,
    'origin', false,
    'pin_search_path', false,
    'allow_rls', false,
    'unchanged', 'both',
    'format', case when gdq.event_triggers_on() then 'typed' else 'json' end);
  unknown text;
  given jsonb;
begin
  if jsonb_typeof(options) is distinct from 'object' then
    raise exception 'options are not a JSON object'
      using errcode = 'invalid_parameter_value', hint = 'Write {"exclude": ["..."], "where": null}.';
  end if;
  select string_agg(k, ', ') filter (where k <> all (known)) into unknown from jsonb_object_keys(options) k;
  if unknown is not null then
    raise exception 'unknown option %', unknown
      using errcode = 'invalid_parameter_value', hint = 'One of ' || array_to_string(known, ', ') || '.';
  end if;
  select coalesce(jsonb_object_agg(o.key, coalesce(nullif(o.value, 'null'), defaults->o.key, 'null')), '{}') into given
    from jsonb_each(options) o;
  -- options that are stored in captured_table as they are given
  t := jsonb_populate_record(t, given - '{key,include,columns,exclude,where,operations}'::text[]);
  -- in the order that add_table() stores; check_options() refuses unknown ones
  t.operations := array(select o from unnest(case when given ? 'operations' then gdq.option_list(given, 'operations')
                                                  else t.operations end) o
                         group by o order by array_position('{insert,update,delete,truncate}', o), o);
  t.key_attnums := gdq.option_columns(t.relid, given, 'key', t.key_attnums);
  t.include_attnums := gdq.option_columns(t.relid, given, 'include', t.include_attnums);
  t.column_attnums := gdq.option_columns(t.relid, given, 'columns', t.column_attnums);
  t.exclude_attnums := gdq.option_columns(t.relid, given, 'exclude', t.exclude_attnums);
  if given ? 'where' then
    t.row_filter := gdq.parse_filter(t.relid, given->>'where');
  end if;
  return t;
end
$$;
comment on function gdq.new_options(gdq.captured_table, jsonb) is 'A captured table with other options.';

-- option_columns(tbl, options, name, own): the attribute numbers of the columns that an option lists; own when the
-- option is not given. Writes: nothing. Errors: 22023, 42703.
create or replace function gdq.option_columns(tbl regclass, options jsonb, name text, own smallint[]) returns smallint[]
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return case when options ? name then gdq.column_numbers(tbl, gdq.option_list(options, name), name) else own end;
end
$$;
comment on function gdq.option_columns(regclass, jsonb, text, smallint[]) is
  'The attribute numbers of the columns that an option of capture lists.';

-- option_list(options, name): the value of an option that is a list; NULL for null. Writes: nothing. Errors: 22023.
create or replace function gdq.option_list(options jsonb, name text) returns text[]
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if jsonb_typeof(options->name) not in ('array', 'null') then
    raise exception '%: not a list', name
      using errcode = 'invalid_parameter_value', hint = format('Write {"%s": ["...", "..."]}.', name);
  end if;
  return case when jsonb_typeof(options->name) = 'array' then
    array(select e from jsonb_array_elements_text(options->name) with ordinality u(e, n) order by n) end;
end
$$;
comment on function gdq.option_list(jsonb, text) is 'The list that an option of capture has.';
