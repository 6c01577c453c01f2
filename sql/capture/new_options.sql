-- new_options(t, options): a captured table with these options instead of its own. Writes: nothing. Errors: 22023, 42703.
create or replace function gdq.new_options(t gdq.captured_table, options jsonb) returns gdq.captured_table
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  defaults constant jsonb := jsonb_build_object('mode', 'full', 'operations', '["insert", "update", "delete", "truncate"]'::jsonb, 'granularity', 'row', 'always', false,
    'origin', false, 'pin_search_path', false, 'allow_rls', false, 'format', case when gdq.event_triggers_on() then 'typed' else 'json' end);
  own constant jsonb := jsonb_build_object('mode', t.mode, 'operations', t.operations, 'granularity', t.granularity, 'always', t.always,
    'origin', t.origin, 'pin_search_path', t.pin_search_path, 'allow_rls', t.allow_rls, 'format', t.format);
  o jsonb;
  unknown text;
  chosen text[];
begin
  if jsonb_typeof(options) is distinct from 'object' then
    raise exception 'options are not a JSON object' using errcode = 'invalid_parameter_value', hint = 'Write {"exclude": ["..."], "where": null}.';
  end if;
  select string_agg(k, ', ') into unknown from jsonb_object_keys(options) k
   where not own ? k and k <> all (array['key', 'include', 'columns', 'exclude', 'where']);
  if unknown is not null then
    raise exception 'unknown option %', unknown using errcode = 'invalid_parameter_value',
      hint = 'One of key, include, columns, exclude, where, ' || (select string_agg(k, ', ' order by k) from jsonb_object_keys(own) k) || '.';
  end if;
  o := own || jsonb_strip_nulls(options) || (select coalesce(jsonb_object_agg(d.key, d.value), '{}') from jsonb_each(defaults) d where options->d.key = 'null');
  t.mode := o->>'mode';
  t.granularity := o->>'granularity';
  t.always := (o->>'always')::boolean;
  t.origin := (o->>'origin')::boolean;
  t.pin_search_path := (o->>'pin_search_path')::boolean;
  t.allow_rls := (o->>'allow_rls')::boolean;
  t.format := o->>'format';
  chosen := gdq.option_list(o, 'operations');
  -- in the order that add_table() stores; what is unknown is refused with the rest
  t.operations := array(select u from unnest(chosen) u group by u order by array_position('{insert,update,delete,truncate}', u), u);
  if options ? 'key' then
    t.key_attnums := gdq.column_numbers(t.relid, gdq.option_list(options, 'key'), 'key');
  end if;
  if options ? 'include' then
    t.include_attnums := gdq.column_numbers(t.relid, gdq.option_list(options, 'include'), 'include');
  end if;
  if options ? 'columns' then
    t.column_attnums := gdq.column_numbers(t.relid, gdq.option_list(options, 'columns'), 'columns');
  end if;
  if options ? 'exclude' then
    t.exclude_attnums := gdq.column_numbers(t.relid, gdq.option_list(options, 'exclude'), 'exclude');
  end if;
  if options ? 'where' then
    t.row_filter := gdq.parse_filter(t.relid, options->>'where');
  end if;
  return t;
end
$$;
comment on function gdq.new_options(gdq.captured_table, jsonb) is 'A captured table with other options.';

-- option_list(options, name): a list among options, NULL for null. Writes: nothing. Errors: 22023.
create or replace function gdq.option_list(options jsonb, name text) returns text[]
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if jsonb_typeof(options->name) not in ('array', 'null') then
    raise exception '%: not a list', name using errcode = 'invalid_parameter_value', hint = format('Write {"%s": ["...", "..."]}.', name);
  end if;
  return case jsonb_typeof(options->name) when 'array' then array(select e from jsonb_array_elements_text(options->name) with ordinality u(e, n) order by n) end;
end
$$;
comment on function gdq.option_list(jsonb, text) is 'A list among options of capture.';

-- refuse_new_options(t, wanted): error when a captured table cannot have these options. Writes: nothing.
-- Errors: as check_options(); 0A000, 55000, 55006.
create or replace function gdq.refuse_new_options(t gdq.captured_table, wanted gdq.captured_table) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  name text := gdq.table_name(t.relid);
  used_by text;
begin
  if gdq.capture_state(t.queue_id, t.relid) <> 'armed' then
    raise exception 'capture of table % is off', coalesce(name, t.table_name) using errcode = 'object_not_in_prerequisite_state',
      hint = 'gdq.table_info() says why. gdq.maintain() or a ticker switches it on once that is mended.';
  elsif t.origin and not wanted.origin then
    raise exception 'origin cannot be switched off: rows that are unread have one' using errcode = 'feature_not_supported',
      hint = 'Remove the table and add it again.';
  elsif t.allow_rls and not wanted.allow_rls and (select c.relrowsecurity from pg_class c where c.oid = t.relid) then
    raise exception '% has row level security, which consumers of the queue would pass by', name using errcode = 'feature_not_supported',
      hint = 'Remove the table from the queue.';
  elsif wanted.format = 'typed' and t.format = 'json' and not gdq.event_triggers_on() then
    raise exception 'format typed needs the event triggers of gdq, which are missing or off' using errcode = 'object_not_in_prerequisite_state',
      hint = 'As a superuser: gdq create-event-triggers.';
  end if;
  perform gdq.check_options(t.relid, wanted.mode, wanted.include_attnums::text[], wanted.column_attnums::text[], wanted.exclude_attnums::text[], wanted.operations,
                            wanted.granularity, wanted.always, wanted.row_filter->>'text', wanted.format);
  -- what a view could not tell from its table; the rest it can do with or without
  if (wanted.mode, wanted.key_attnums, wanted.include_attnums, wanted.column_attnums, wanted.exclude_attnums, wanted.operations, wanted.granularity, wanted.row_filter)
     is distinct from (t.mode, t.key_attnums, t.include_attnums, t.column_attnums, t.exclude_attnums, t.operations, t.granularity, t.row_filter) then
    select v.view_name into used_by
      from gdq.view v join gdq.consumer c using (consumer_name) join gdq.subscription s on s.consumer_id = c.consumer_id and s.queue_id = v.queue_id
     where v.queue_id = t.queue_id and exists (select from gdq.subscribed_tables(s.subscription_id) st where st.table_id = t.table_id) limit 1;
    if used_by is not null then
      raise exception 'table % is read by the view "%", which was planned with its options', name, used_by
        using errcode = 'object_in_use', hint = 'Drop the view, and make it again afterwards.';
    end if;
  end if;
end
$$;
comment on function gdq.refuse_new_options(gdq.captured_table, gdq.captured_table) is
  'Error when a captured table cannot have these options.';
