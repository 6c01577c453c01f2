-- filter_term(tbl, kinds, value_of, n): parses the term of a row filter that begins at token n; see parse_filter().
-- Result: parts and columns, as parse_filter(); next: the token after the term. Writes: nothing. Errors: as
-- parse_filter().
create or replace function gdq.filter_term(tbl regclass, kinds text[], value_of text[], n integer, out parts jsonb,
                                           out columns jsonb, out next integer)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  comparisons constant text[] := '{=,<>,!=,<,<=,>,>=}';
  a pg_attribute;
  c record;
  negative boolean;
  list text[] := '{}';
begin
  if kinds[n] <> 'name' then
    -- constant comparison column
    c := gdq.filter_constant(kinds, value_of, n);
    if kinds[c.next] <> all (comparisons) or kinds[c.next + 1] is distinct from 'name' then
      perform gdq.refuse_filter(value_of, c.next + (kinds[c.next] = any (comparisons))::integer);
    end if;
    a := gdq.filter_column(tbl, value_of[c.next + 1]);
    parts := jsonb_build_array(format('(%s operator(pg_catalog.%s) ', gdq.filter_constant_sql(c.kind, c.value, a),
                                      replace(kinds[c.next], '!=', '<>')))
             || gdq.filter_operand_sql(a) || '[")"]'::jsonb;
    next := c.next + 2;
  else
    a := gdq.filter_column(tbl, value_of[n]);
    next := n + 1;
    negative := kinds[next] = 'not';
    if kinds[next] = any (comparisons) then
      -- column comparison constant
      c := gdq.filter_constant(kinds, value_of, next + 1);
      parts := '["("]'::jsonb || gdq.filter_operand_sql(a)
               || jsonb_build_array(format(' operator(pg_catalog.%s) %s)', replace(kinds[next], '!=', '<>'),
                                           gdq.filter_constant_sql(c.kind, c.value, a)));
      next := c.next;
    elsif kinds[next] = 'is'
          and kinds[next + (kinds[next + 1] = 'not')::integer + 1] in ('null', 'true', 'false') then
      -- column is [not] null
      negative := kinds[next + 1] = 'not';
      next := next + negative::integer + 1;
      if kinds[next] <> 'null' and a.atttypid <> 'boolean'::regtype then
        perform gdq.refuse_filter(value_of, next);
      end if;
      parts := jsonb_build_array('(', a.attnum,
                                 format(' is %s%s)', case when negative then 'not ' else '' end, kinds[next]));
      next := next + 1;
    elsif kinds[next + negative::integer] = 'in' and kinds[next + negative::integer + 1] = '(' then
      -- column [not] in (constant, ...)
      next := next + negative::integer + 1;
      loop
        c := gdq.filter_constant(kinds, value_of, next + 1);
        list := list || gdq.filter_constant_sql(c.kind, c.value, a);
        next := c.next;
        exit when kinds[next] is distinct from ',';
      end loop;
      if kinds[next] is distinct from ')' then
        perform gdq.refuse_filter(value_of, next);
      end if;
      parts := jsonb_build_array(case when negative then '(not ' else '(' end)
               || gdq.filter_operand_sql(a)
               || jsonb_build_array(format(' operator(pg_catalog.=) any (array[%s]))', array_to_string(list, ', ')));
      next := next + 1;
    elsif a.atttypid = 'boolean'::regtype then
      parts := jsonb_build_array(a.attnum);
    else
      perform gdq.refuse_filter(value_of, next);
    end if;
  end if;
  columns := jsonb_build_object(a.attnum, jsonb_build_object('name', a.attname, 'type', a.atttypid::bigint));
end
$$;
comment on function gdq.filter_term(regclass, text[], text[], integer) is 'Parses one term of a row filter.';

-- filter_column(tbl, name): the column that a row filter names. Writes: nothing. Errors: 42703; 22023 for a column that
-- triggers cannot see, or of a type that is not built in.
create or replace function gdq.filter_column(tbl regclass, name text) returns pg_attribute
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  a pg_attribute;
begin
  perform gdq.column_numbers(tbl, array[name], 'row filter');
  select * into strict a
    from pg_attribute aa
   where aa.attrelid = tbl and aa.attname = name and aa.attnum > 0 and not aa.attisdropped;
  if a.atttypid >= 16384 or not exists (select from pg_type t where t.oid = a.atttypid and t.typtype = 'b') then
    raise exception 'row filter: column "%" is of type %, which is not built in', name, format_type(a.atttypid, null)
      using errcode = 'invalid_parameter_value', hint = 'Filter by another column, or let the consumer choose.';
  end if;
  return a;
end
$$;
comment on function gdq.filter_column(regclass, text) is 'The column that a row filter names.';

-- filter_constant_sql(kind, value, a): a constant of a row filter as a literal of its column's type. It is cast once
-- here, which checks it, and written so that it reads the same under all settings. Writes: nothing. Errors: 22023.
create or replace function gdq.filter_constant_sql(kind text, value text, a pg_attribute) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set datestyle = 'ISO, YMD' set timezone = 'UTC' set extra_float_digits = 1 set bytea_output = hex
as $$
declare
  t pg_type;
  canonical text;
begin
  select * into strict t from pg_type where oid = a.atttypid;
  if kind <> 'string' and t.typcategory <> (case kind when 'number' then 'N' else 'B' end) then
    raise exception 'row filter: column "%" is of type %, and % is no constant of that type',
      a.attname, format_type(a.atttypid, null), value
      using errcode = 'invalid_parameter_value', hint = gdq.filter_hint();
  elsif t.typcategory = 'D' and value ~* 'now|today|tomorrow|yesterday' then
    raise exception 'row filter: % is no constant', quote_literal(value)
      using errcode = 'invalid_parameter_value', hint = 'Write the time itself.';
  end if;
  begin
    execute format('select textin(%s(%L::pg_catalog.%I))', t.typoutput, value, t.typname) into canonical;
  exception when others then
    raise exception 'row filter: column "%": %', a.attname, sqlerrm using errcode = 'invalid_parameter_value';
  end;
  return format('%L::pg_catalog.%I', canonical, t.typname);
end
$$;
comment on function gdq.filter_constant_sql(text, text, pg_attribute) is
  'A constant of a row filter as a literal of its column''s type.';

-- filter_constant(kinds, value_of, n): the constant that begins at token n, with its sign; next: the token after the
-- constant. Writes: nothing. Errors: 22023.
create or replace function gdq.filter_constant(kinds text[], value_of text[], n integer, out kind text,
                                              out value text, out next integer)
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if kinds[n] in ('+', '-') and kinds[n + 1] = 'number' then
    kind := 'number';
    value := kinds[n] || value_of[n + 1];
    next := n + 2;
  elsif kinds[n] in ('string', 'number', 'true', 'false') then
    kind := kinds[n];
    value := value_of[n];
    next := n + 1;
  elsif kinds[n] = 'null' then
    raise exception 'row filter: nothing is equal to NULL'
      using errcode = 'invalid_parameter_value', hint = 'Write IS NULL or IS NOT NULL.';
  else
    perform gdq.refuse_filter(value_of, n);
  end if;
end
$$;
comment on function gdq.filter_constant(text[], text[], integer) is 'One constant of a row filter.';

-- filter_operand_sql(a): a column of a row filter in SQL, as an operand of a comparison. Text is compared by its bytes:
-- a collation of the application's could raise an error, or be changed. Writes: nothing. Errors: 22023 for a type that
-- cannot be compared here.
create or replace function gdq.filter_operand_sql(a pg_attribute) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if a.atttypid <> all ('{boolean,smallint,integer,bigint,real,double precision,numeric,oid,text,varchar,bpchar,
                          date,time,timestamp,timestamptz,uuid,bytea}'::regtype[]) then
    raise exception 'row filter: columns of type % such as "%" are not compared',
      format_type(a.atttypid, null), a.attname
      using errcode = 'invalid_parameter_value', hint = 'Only IS NULL and IS NOT NULL go with it.';
  elsif a.attcollation <> 0 then
    return jsonb_build_array('(', a.attnum, ' collate pg_catalog."C")');
  end if;
  return jsonb_build_array(a.attnum);
end
$$;
comment on function gdq.filter_operand_sql(pg_attribute) is
  'A column of a row filter in SQL, as an operand of a comparison.';
