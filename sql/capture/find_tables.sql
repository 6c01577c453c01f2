-- find_tables(pattern, path): the tables that a pattern stands for, in the order of their names: ordinary tables and
-- roots of partition trees. It stands for no table of the system, of gdq, of an extension, and for no target of a view.
--   pattern: psql's: * is any text, ? any character; folded to lower case outside double quotes. NULL: every table.
--   path: schemas, as current_schemas(true) gives them, in which a pattern without a schema finds its tables.
-- Result: table_name: with its schema, quoted where SQL needs it. Writes: nothing. Errors: 42602 for the pattern.
create or replace function gdq.find_tables(pattern text default null, path name[] default '{}')
  returns table (relid oid, table_name text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  likes constant text[] := case when pattern is null then '{%,%}' else gdq.pattern_likes(pattern) end;
begin
  return query
  select t.relid, gdq.table_name(t.relid)
    from gdq.user_tables() t
   where t.name::text like likes[2]
     and case when likes[1] is not null then t.schema::text like likes[1]
         else t.schema = any (path)
              and not exists (select from pg_class c
                                join pg_namespace n on n.oid = c.relnamespace
                               where c.relname = t.name
                                 and array_position(path, n.nspname) < array_position(path, t.schema)) end
   order by t.schema, t.name;
end
$$;
comment on function gdq.find_tables(text, name[]) is 'The tables that a pattern stands for.';

-- pattern_likes(pattern): the two patterns of LIKE, for schema and name, that a pattern of tables stands for. The first
-- is NULL for a pattern without a schema.
-- Writes: nothing. Errors: 42602 for a pattern with an empty part, more than two parts, or an open quote.
create or replace function gdq.pattern_likes(pattern text) returns text[]
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  piece text;
  parts text[] := '{""}';
  n integer := 1;
begin
  -- a quoted part, in which a quote is written twice, or a single character
  for piece in select m[1] from regexp_matches(pattern, E'("(?:[^"]|"")*"|.)', 'g') m loop
    if piece = '.' then
      n := n + 1;
      parts[n] := '';
    elsif piece = '"' then
      raise exception 'pattern % has a quote that does not end', pattern using errcode = 'invalid_name';
    elsif piece in ('*', '?') then
      parts[n] := parts[n] || translate(piece, '*?', '%_');
    else
      piece := case when length(piece) > 1 then replace(substr(piece, 2, length(piece) - 2), '""', '"')
                    else lower(piece) end;
      parts[n] := parts[n] || regexp_replace(piece, E'([\\\\%_])', E'\\\\\\1', 'g');
    end if;
  end loop;
  if n > 2 or '' = any (parts) then
    raise exception 'pattern % is not of the form SCHEMA.TABLE', coalesce(pattern, 'null')
      using errcode = 'invalid_name', hint = 'Write it with * and ? as needed: ''public.*''.';
  end if;
  return case n when 1 then array[null, parts[1]] else parts end;
end
$$;
comment on function gdq.pattern_likes(text) is 'The patterns of LIKE that a pattern of tables stands for.';

-- user_tables(relations): the tables that patterns may stand for, see find_tables(); of these relations alone, or, with
-- NULL, of the database. Writes: nothing.
create or replace function gdq.user_tables(relations oid[] default null)
  returns table (relid oid, schema name, name name)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return query
  select c.oid, n.nspname, c.relname
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
   where (relations is null or c.oid = any (relations))
     and c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence <> 't'
     and n.nspname !~ '^(pg_.*|information_schema|gdq|gdq_log|gdq_target)$'
     and c.relname !~ '^gdq_state_[0-9a-f]{12}$'
     and not exists (select from pg_depend d
                      where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.objsubid = 0
                        and d.deptype = 'e')
     and not starts_with(coalesce(obj_description(c.oid, 'pg_class'), ''), 'gdq: target of view ')
     and not exists (select from gdq.view v
                      where v.target = format('"%s"."%s"', replace(n.nspname, '"', '""'), replace(c.relname, '"', '""'))
                        and not v.options ? 'target_dsn');
end
$$;
comment on function gdq.user_tables(oid[]) is 'The tables that patterns may stand for.';
