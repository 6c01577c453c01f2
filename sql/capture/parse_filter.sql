-- A row filter is a condition on one row. It runs inside the application's writes and must not raise an error there, so
-- it may only compare columns with constants of the column's own type. It is not a WHEN clause, which would block DROP
-- COLUMN and ALTER TYPE. The text is split into tokens and put together again from pieces that are written here; only
-- names and constants are the user's own, and both are quoted.
--
--   condition  = operand { ( "and" | "or" ) operand }
--   operand    = [ "not" ] ( "(" condition ")" | term )
--   term       = column comparison constant | constant comparison column
--              | column [ "not" ] "in" "(" constant { "," constant } ")"
--              | column "is" [ "not" ] ( "null" | "true" | "false" )
--              | column                                                  of type boolean
--   comparison = "=" | "<>" | "!=" | "<" | "<=" | ">" | ">="
--   constant   = string | [ "+" | "-" ] number | "true" | "false"

-- parse_filter(tbl, condition): parses a row filter into the form that captured_table stores; NULL for NULL.
-- Result: an object of text; parts: SQL, with columns by attribute number, which a rename does not change; columns:
-- their names and types. Writes: nothing. Errors: 22023 for text that the grammar above does not allow, 42703, 54000.
create or replace function gdq.parse_filter(tbl regclass, condition text) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  kinds text[];
  value_of text[];
  n integer := 1;
  depth integer := 0;
  -- true: an operand must come next; false: the token after an operand
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
    from gdq.filter_tokens(condition) with ordinality t(kind, value, o);
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
      raise exception 'row filter: more than 30 parentheses inside each other'
        using errcode = 'program_limit_exceeded';
    end if;
    n := n + 1;
  end loop;
  if operand or depth > 0 then
    perform gdq.refuse_filter(value_of, n);
  end if;
  parsed := jsonb_build_object('text', condition, 'parts', parts, 'columns', columns);
  -- run once here, so that an unforeseen error comes now and not in a write
  execute (select format('select %s from (select %s) r',
                         gdq.filter_sql(parsed, jsonb_object_agg(c.key, c.value->>'name'), 'r'),
                         string_agg(format('null::%s as %I', format_type((c.value->>'type')::oid, null),
                                           c.value->>'name'), ', '))
             from jsonb_each(columns) c);
  return parsed;
end
$$;
comment on function gdq.parse_filter(regclass, text) is
  'Parses a row filter; error 22023 for text that its grammar does not allow.';

-- filter_tokens(condition): the tokens of a row filter in order. kind: name, string, number, or the token itself; words
-- without quotes are folded to lower case. Writes: nothing. Errors: 22023 for a character that begins no token, 54000.
create or replace function gdq.filter_tokens(condition text) returns table (kind text, value text)
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  rest text := condition;
  form text;
  part text;
begin
  if octet_length(condition) > 4000 then
    raise exception 'a row filter has at most 4000 bytes'
      using errcode = 'program_limit_exceeded', hint = 'Capture all rows and let the consumer choose.';
  end if;
  loop
    rest := regexp_replace(rest, E'^[ \\t\\n\\r\\f\\v]+', '');
    exit when rest = '';
    -- a word begins with a letter, _ or anything beyond ASCII; digits and $ may follow
    select f.form, substring(rest from f.pattern) into form, part
      from (values ('quoted name', '^"(?:[^"]|"")+"'),
                   ('string', $re$^'(?:[^']|'')*'$re$),
                   ('number', E'^(?:[0-9]+(?:\\.[0-9]*)?|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?'),
                   ('word', E'^[^\\x01-\\x40\\x5b-\\x5e\\x60\\x7b-\\x7f]'
                            '[^\\x01-\\x23\\x25-\\x2f\\x3a-\\x40\\x5b-\\x5e\\x60\\x7b-\\x7f]*'),
                   ('sign', '^(?:<=|>=|<>|!=|[=<>(),+-])')) f(form, pattern)
     where rest ~ f.pattern;
    case form
      when 'quoted name' then
        kind := 'name';
        value := replace(substr(part, 2, length(part) - 2), '""', '"');
      when 'string' then
        kind := 'string';
        value := replace(substr(part, 2, length(part) - 2), '''''', '''');
      when 'number' then
        kind := 'number';
        value := part;
      when 'word' then
        -- only A to Z are folded, as SQL does
        value := lower(part collate "C");
        kind := case when value in ('and', 'or', 'not', 'in', 'is', 'null', 'true', 'false') then value else 'name' end;
      when 'sign' then
        kind := part;
        value := part;
      else
        raise exception 'row filter: "%" is not understood', left(rest, 20)
          using errcode = 'invalid_parameter_value', hint = gdq.filter_hint();
    end case;
    return next;
    rest := substr(rest, length(part) + 1);
  end loop;
end
$$;
comment on function gdq.filter_tokens(text) is 'The tokens of a row filter.';

-- filter_hint(): the hint of a row filter's errors, which says what it may contain. Writes: nothing.
create or replace function gdq.filter_hint() returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select 'A row filter compares columns with constants: = <> < <= > >=, IN (...), IS [NOT] NULL, AND, OR, NOT, '
         'boolean columns.'::text
$$;
comment on function gdq.filter_hint() is 'The hint of a row filter''s errors.';

-- refuse_filter(value_of, n): error at token n of a row filter. Writes: nothing. Errors: 22023.
create or replace function gdq.refuse_filter(value_of text[], n integer) returns void
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if value_of[n] is null then
    raise exception 'row filter: it ends too early'
      using errcode = 'invalid_parameter_value', hint = gdq.filter_hint();
  end if;
  raise exception 'row filter: "%" is not expected%', value_of[n], coalesce(format(' after "%s"', value_of[n - 1]), '')
    using errcode = 'invalid_parameter_value', hint = gdq.filter_hint();
end
$$;
comment on function gdq.refuse_filter(text[], integer) is 'Error at one token of a row filter.';
