-- A row filter is a condition on one row that runs inside the application's writes, so it is made only of what cannot
-- raise there: comparisons of a column with a constant of the column's own type, IN, IS NULL, AND, OR, NOT, and
-- boolean columns. It is not a WHEN clause, which would block DROP COLUMN and ALTER TYPE. Text is taken apart into
-- tokens and put together again from pieces that are written here; none of the user's own reaches the function but
-- names and constants, and both are quoted.

-- filter_tokens(condition): the tokens of a row filter in order; kind is name, string, number or the token itself, in
-- lower case for a word without quotes. Writes: nothing. Errors: 22023 for a character that begins no token, 54000.
create or replace function gdq.filter_tokens(condition text) returns table (kind text, value text, quoted boolean)
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  rest text := condition;
  part text;
begin
  if octet_length(condition) > 4000 then
    raise exception 'a row filter has at most 4000 bytes' using errcode = 'program_limit_exceeded', hint = 'Capture all rows and let the consumer choose.';
  end if;
  loop
    rest := regexp_replace(rest, '^[ \t\n\r\f\v]+', '');
    exit when rest = '';
    part := substring(rest from '^"(?:[^"]|"")+"');
    if part is not null then
      return query select 'name', replace(substr(part, 2, length(part) - 2), '""', '"'), true;
    elsif rest ~ '^''(?:[^'']|'''')*''' then
      part := substring(rest from '^''(?:[^'']|'''')*''');
      return query select 'string', replace(substr(part, 2, length(part) - 2), '''''', ''''), true;
    elsif rest ~ '^[0-9]|^\.[0-9]' then
      part := substring(rest from '^(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?');
      return query select 'number', part, false;
    elsif rest ~ '^[^\x01-\x40\x5b-\x5e\x60\x7b-\x7f]' then
      -- letters, _ and everything beyond ASCII; then digits and $ too. Only A to Z are folded, as SQL does.
      part := substring(rest from '^[^\x01-\x40\x5b-\x5e\x60\x7b-\x7f][^\x01-\x23\x25-\x2f\x3a-\x40\x5b-\x5e\x60\x7b-\x7f]*');
      return query select case when w in ('and', 'or', 'not', 'in', 'is', 'null', 'true', 'false') then w else 'name' end, w, false
        from lower(part collate "C") w;
    else
      part := substring(rest from '^(?:<=|>=|<>|!=|[=<>(),+-])');
      if part is null then
        raise exception 'row filter: "%" is not understood', left(rest, 20) using errcode = 'invalid_parameter_value', hint = gdq.filter_hint();
      end if;
      return query select part, part, false;
    end if;
    rest := substr(rest, length(part) + 1);
  end loop;
end
$$;
comment on function gdq.filter_tokens(text) is 'The tokens of a row filter.';

-- filter_hint(): what a row filter may be. Writes: nothing.
create or replace function gdq.filter_hint() returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select 'A row filter compares columns with constants: = <> < <= > >=, IN (...), IS [NOT] NULL, AND, OR, NOT, boolean columns.'::text
$$;
comment on function gdq.filter_hint() is 'What a row filter may be.';

-- filter_constant(kind, value, typid, name): a constant of a row filter as a literal of its column's type, checked by
-- casting it here once, and in the form that reads the same under all settings. Writes: nothing. Errors: 22023.
create or replace function gdq.filter_constant(kind text, value text, typid oid, name text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set datestyle = 'ISO, YMD' set timezone = 'UTC' set extra_float_digits = 1 set bytea_output = hex
as $$
declare
  t pg_type;
  canonical text;
begin
  select * into strict t from pg_type where oid = typid;
  if kind <> 'string' and t.typcategory <> (case kind when 'number' then 'N' else 'B' end) then
    raise exception 'row filter: column "%" is of type %, which % is no constant of', name, format_type(typid, null), value
      using errcode = 'invalid_parameter_value', hint = gdq.filter_hint();
  elsif t.typcategory = 'D' and value ~* 'now|today|tomorrow|yesterday' then
    raise exception 'row filter: % is no constant', quote_literal(value) using errcode = 'invalid_parameter_value', hint = 'Write the time itself.';
  end if;
  begin
    execute format('select textin(%s(%L::pg_catalog.%I))', t.typoutput, value, t.typname) into canonical;
  exception when others then
    raise exception 'row filter: column "%": %', name, sqlerrm using errcode = 'invalid_parameter_value';
  end;
  return format('%L::pg_catalog.%I', canonical, t.typname);
end
$$;
comment on function gdq.filter_constant(text, text, oid, text) is 'A constant of a row filter as a literal of its column''s type.';

-- filter_column(tbl, name): the column of that name. Writes: nothing.
-- Errors: 42703; 22023 for a column that no trigger sees or whose type is not one of pg_catalog's.
create or replace function gdq.filter_column(tbl regclass, name text) returns pg_attribute
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  a pg_attribute;
begin
  perform gdq.column_numbers(tbl, array[name], 'row filter');
  select * into strict a from pg_attribute aa where aa.attrelid = tbl and aa.attname = name and aa.attnum > 0 and not aa.attisdropped;
  if a.atttypid >= 16384 or not exists (select from pg_type t where t.oid = a.atttypid and t.typtype = 'b') then
    raise exception 'row filter: column "%" is of type %, which is not built in', name, format_type(a.atttypid, null)
      using errcode = 'invalid_parameter_value', hint = 'Filter by another column, or let the consumer choose.';
  end if;
  return a;
end
$$;
comment on function gdq.filter_column(regclass, text) is 'A column that a row filter may use.';

-- filter_operand(column): the column in SQL, from which comparisons follow. Text compares by its bytes: a collation of
-- the application's could raise, or be changed. Writes: nothing. Errors: 22023 for a type that is not compared.
create or replace function gdq.filter_operand(a pg_attribute) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if a.atttypid <> all (array['boolean', 'smallint', 'integer', 'bigint', 'real', 'double precision', 'numeric', 'text', 'varchar', 'bpchar', 'date', 'time',
                              'timestamp', 'timestamptz', 'uuid', 'bytea', 'oid']::regtype[]) then
    raise exception 'row filter: columns of type % such as "%" are not compared', format_type(a.atttypid, null), a.attname
      using errcode = 'invalid_parameter_value', hint = 'Only IS NULL and IS NOT NULL go with it.';
  elsif a.attcollation <> 0 then
    return jsonb_build_array('(', a.attnum, ' collate pg_catalog."C")');
  end if;
  return jsonb_build_array(a.attnum);
end
$$;
comment on function gdq.filter_operand(pg_attribute) is 'A column of a row filter in SQL, to be compared.';

-- parse_filter(tbl, condition): a row filter as captured_table keeps it; NULL for NULL. Writes: nothing.
-- Result: text; parts, SQL with columns by attribute number, which a rename leaves alone; columns, their names and types.
-- Errors: 22023 for what is not on the whitelist, 42703, 54000.
create or replace function gdq.parse_filter(tbl regclass, condition text) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  kinds text[];
  value_of text[];
  n integer := 1;
  depth integer := 0;
  -- what may come next: an operand, or what follows one
  operand boolean := true;
  parts jsonb := '[]';
  columns jsonb := '{}';
  term record;
  parsed jsonb;
begin
  if condition is null then
    return null;
  end if;
  select array_agg(t.kind order by o), array_agg(t.value order by o) into kinds, value_of
    from gdq.filter_tokens(condition) with ordinality t(kind, value, quoted, o);
  while n <= cardinality(kinds) loop
    if operand and kinds[n] = '(' then
      depth := depth + 1;
      parts := parts || '["("]'::jsonb;
    elsif operand and kinds[n] = 'not' and kinds[n + 1] is distinct from 'not' then
      parts := parts || '["not "]'::jsonb;
    elsif operand then
      select * into term from gdq.filter_term(tbl, kinds, value_of, n);
      parts := parts || term.parts;
      columns := columns || term.columns;
      n := term.next - 1;
      operand := false;
    elsif kinds[n] = ')' and depth > 0 then
      depth := depth - 1;
      parts := parts || '[")"]'::jsonb;
    elsif kinds[n] in ('and', 'or') then
      parts := parts || jsonb_build_array(format(' %s ', kinds[n]));
      operand := true;
    else
      perform gdq.refuse_filter(value_of, n);
    end if;
    if depth > 30 then
      raise exception 'row filter: more than 30 parentheses inside each other' using errcode = 'program_limit_exceeded';
    end if;
    n := n + 1;
  end loop;
  if operand or depth > 0 then
    perform gdq.refuse_filter(value_of, n);
  end if;
  parsed := jsonb_build_object('text', condition, 'parts', parts, 'columns', columns);
  -- once here, so that whatever was not thought of fails now and not in a write
  execute (select format('select %s from (select %s) r', gdq.filter_sql(parsed, jsonb_object_agg(c.key, c.value->>'name'), 'r'),
                         string_agg(format('null::%s as %I', format_type((c.value->>'type')::oid, null), c.value->>'name'), ', '))
             from jsonb_each(columns) c);
  return parsed;
end
$$;
comment on function gdq.parse_filter(regclass, text) is 'A row filter as captured_table keeps it; error 22023 for what is not on the whitelist.';

-- refuse_filter(values, n): error at one token of a row filter. Writes: nothing. Errors: 22023.
create or replace function gdq.refuse_filter(value_of text[], n integer) returns void
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if value_of[n] is null then
    raise exception 'row filter: it ends too early' using errcode = 'invalid_parameter_value', hint = gdq.filter_hint();
  end if;
  raise exception 'row filter: "%" is not expected%', value_of[n], coalesce(format(' after "%s"', value_of[n - 1]), '')
    using errcode = 'invalid_parameter_value', hint = gdq.filter_hint();
end
$$;
comment on function gdq.refuse_filter(text[], integer) is 'Error at one token of a row filter.';

-- filter_term(tbl, kinds, values, n): one comparison of a row filter that begins at token n; next is the token after it.
-- Writes: nothing. Errors: as parse_filter().
create or replace function gdq.filter_term(tbl regclass, kinds text[], value_of text[], n integer, out parts jsonb, out columns jsonb, out next integer)
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
    -- the constant first
    c := gdq.filter_literal(kinds, value_of, n);
    if kinds[c.next] <> all (comparisons) or kinds[c.next + 1] is distinct from 'name' then
      perform gdq.refuse_filter(value_of, c.next + (kinds[c.next] = any (comparisons))::integer);
    end if;
    a := gdq.filter_column(tbl, value_of[c.next + 1]);
    parts := jsonb_build_array(format('(%s operator(pg_catalog.%s) ', gdq.filter_constant(c.kind, c.value, a.atttypid, a.attname), replace(kinds[c.next], '!=', '<>')))
             || gdq.filter_operand(a) || '[")"]'::jsonb;
    next := c.next + 2;
  else
    a := gdq.filter_column(tbl, value_of[n]);
    next := n + 1;
    negative := kinds[next] = 'not';
    if kinds[next] = any (comparisons) then
      c := gdq.filter_literal(kinds, value_of, next + 1);
      parts := '["("]'::jsonb || gdq.filter_operand(a)
               || jsonb_build_array(format(' operator(pg_catalog.%s) %s)', replace(kinds[next], '!=', '<>'), gdq.filter_constant(c.kind, c.value, a.atttypid, a.attname)));
      next := c.next;
    elsif kinds[next] = 'is' and kinds[next + (kinds[next + 1] = 'not')::integer + 1] in ('null', 'true', 'false') then
      negative := kinds[next + 1] = 'not';
      next := next + negative::integer + 1;
      if kinds[next] <> 'null' and a.atttypid <> 'boolean'::regtype then
        perform gdq.refuse_filter(value_of, next);
      end if;
      parts := jsonb_build_array('(', a.attnum, format(' is %s%s)', case when negative then 'not ' else '' end, kinds[next]));
      next := next + 1;
    elsif kinds[next + negative::integer] = 'in' and kinds[next + negative::integer + 1] = '(' then
      next := next + negative::integer + 1;
      loop
        c := gdq.filter_literal(kinds, value_of, next + 1);
        list := list || gdq.filter_constant(c.kind, c.value, a.atttypid, a.attname);
        next := c.next;
        exit when kinds[next] is distinct from ',';
      end loop;
      if kinds[next] is distinct from ')' then
        perform gdq.refuse_filter(value_of, next);
      end if;
      parts := jsonb_build_array(case when negative then '(not ' else '(' end) || gdq.filter_operand(a)
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
comment on function gdq.filter_term(regclass, text[], text[], integer) is 'One comparison of a row filter.';

-- filter_literal(kinds, values, n): the constant that begins at token n, with its sign; next is the token after it.
-- Writes: nothing. Errors: 22023.
create or replace function gdq.filter_literal(kinds text[], value_of text[], n integer, out kind text, out value text, out next integer)
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
    raise exception 'row filter: nothing is equal to NULL' using errcode = 'invalid_parameter_value', hint = 'Write IS NULL or IS NOT NULL.';
  else
    perform gdq.refuse_filter(value_of, n);
  end if;
end
$$;
comment on function gdq.filter_literal(text[], text[], integer) is 'One constant of a row filter.';

-- filter_sql(row_filter, names, source): a row filter as a SQL expression on OLD, NEW or the alias of a transition table;
-- names from describe_filter(). NULL for no filter. Writes: nothing.
create or replace function gdq.filter_sql(row_filter jsonb, names jsonb, source text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = on
as $$
  select string_agg(case jsonb_typeof(part) when 'number' then format('%s.%I', source, names->>(part#>>'{}')) else part#>>'{}' end, '' order by n)
    from jsonb_array_elements(row_filter->'parts') with ordinality p(part, n)
$$;
comment on function gdq.filter_sql(jsonb, jsonb, text) is 'A row filter as a SQL expression.';

-- describe_filter(table_id): the names that the columns of a captured table's row filter have now, by attribute number;
-- NULL for no filter. Writes: nothing. Errors: 42P10 when one was dropped or has another type: the filter fits no more.
create or replace function gdq.describe_filter(table_id integer) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  c record;
  names jsonb;
begin
  for c in select f.key, f.value->>'name' as name, (f.value->>'type')::oid as typid, a.attname, a.attisdropped, a.atttypid
             from gdq.captured_table ct cross join jsonb_each(ct.row_filter->'columns') f
             left join pg_attribute a on a.attrelid = ct.relid and a.attnum = f.key::smallint
            where ct.table_id = describe_filter.table_id loop
    if c.attisdropped is not false or c.atttypid <> c.typid then
      raise exception 'column "%" of the row filter %', c.name,
        case when c.attisdropped is false then format('is of type %s now', format_type(c.atttypid, null)) else 'was dropped' end
        using errcode = 'invalid_column_reference';
    end if;
    names := coalesce(names, '{}') || jsonb_build_object(c.key, c.attname);
  end loop;
  return names;
end
$$;
comment on function gdq.describe_filter(integer) is 'Names of the columns of a row filter as they are now.';

-- rebase_filter(table_id): gives the row filter of a restored table the attribute numbers of this database, by the names
-- that its newest version has; a column that is gone gets a number that no column has. Writes: captured_table.
create or replace function gdq.rebase_filter(table_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  now_at jsonb;
begin
  select jsonb_object_agg(n.key, coalesce(a.attnum, 10000 + n.key::integer)) into now_at
    from gdq.table_version v cross join jsonb_each_text(v.filter_names) n
    join gdq.captured_table ct using (table_id)
    left join pg_attribute a on a.attrelid = ct.relid and a.attname = n.value and a.attnum > 0 and not a.attisdropped
   where v.version_id = gdq.current_version(rebase_filter.table_id);
  update gdq.captured_table ct
     set row_filter = ct.row_filter || jsonb_build_object(
           'parts', (select jsonb_agg(case jsonb_typeof(part) when 'number' then now_at->(part#>>'{}') else part end order by n)
                       from jsonb_array_elements(ct.row_filter->'parts') with ordinality p(part, n)),
           'columns', (select jsonb_object_agg(now_at->>c.key, c.value) from jsonb_each(ct.row_filter->'columns') c))
   where ct.table_id = rebase_filter.table_id and ct.row_filter is not null;
end
$$;
comment on function gdq.rebase_filter(integer) is 'Brings the attribute numbers of a row filter in line with this database.';
