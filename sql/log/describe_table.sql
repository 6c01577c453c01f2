-- describe_table(table_id): describe_columns() of a captured table, with the table's options and in its format, and
-- with unchanged "once" or "omit" also
--   same: for a column whose values the server may store out of line: the column of the log that is true where an
--   UPDATE left a large value as it was, so that only the new image has it.
--   omit: with "omit", if the table has a key: true, as then no image has it.
-- Writes: nothing.
create or replace function gdq.describe_table(table_id integer) returns jsonb
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select case when ct.format = 'json' then gdq.json_columns(columns)
              when ct.unchanged <> 'both' then gdq.same_columns(ct.relid, columns, ct.unchanged = 'omit')
              else columns end
    from gdq.captured_table ct,
         gdq.describe_columns(ct.relid, ct.mode, ct.key_attnums, ct.include_attnums,
                              ct.column_attnums, ct.exclude_attnums) columns
   where ct.table_id = describe_table.table_id
$$;
comment on function gdq.describe_table(integer) is 'describe_columns() of a captured table, with the table''s options.';

-- same_columns(relid, columns, omit): the result of describe_columns() with the columns of the log that tell which
-- large values an UPDATE left as they were. Whether values can be large is a property of their type: the storage that
-- ALTER TABLE sets may differ between partitions. omit: whether neither image has these values. Without a key nothing
-- would tell readers whose they are: then the new image has them. Writes: nothing.
create or replace function gdq.same_columns(relid oid, columns jsonb, omit boolean) returns jsonb
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select jsonb_agg(case when t.typstorage in ('x', 'e') and not (c->>'key')::boolean and c->>'log_old' is not null
                        then c || jsonb_build_object('same', concat('same_', a.attnum))
                               || case when omit and columns @? '$[*] ? (@.key == true)' then '{"omit": true}'::jsonb
                                       else '{}' end
                        else c end order by a.attnum)
    from jsonb_array_elements(columns) c
    join pg_attribute a on a.attrelid = relid and a.attnum = (c->>'attnum')::smallint
    join pg_type t on t.oid = a.atttypid
$$;
comment on function gdq.same_columns(oid, jsonb, boolean) is
  'The logged columns of a table, with those that tell which large values an UPDATE left as they were.';

-- omits(v): whether updates of a version may leave out large values that they leave as they were: those of the columns
-- with omit, if an UPDATE is one row of the log. Writes: nothing.
create or replace function gdq.omits(v gdq.table_version) returns boolean
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return not v.split and v.columns @? '$[*] ? (@.omit == true)';
end
$$;
comment on function gdq.omits(gdq.table_version) is
  'Whether updates of a version may leave out large values that they leave as they were.';

-- omitted_columns(table_id, version): the attribute numbers of the columns that updates of a version (NULL: of any that
-- there is) may leave out. Writes: nothing.
create or replace function gdq.omitted_columns(table_id integer, version bigint) returns integer[]
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return array(select distinct c.attnum
                 from gdq.table_version v, jsonb_to_recordset(v.columns) c(attnum int, omit boolean)
                where v.table_id = omitted_columns.table_id
                  and (version is null or v.version_id = version)
                  and gdq.omits(v) and c.omit);
end
$$;
comment on function gdq.omitted_columns(integer, bigint) is 'The columns that updates of a table may leave out.';

-- describe_columns(relid, mode, key, include, columns, exclude): the logged columns of a table, from the catalogs as
-- they are now. Arguments after mode are attribute numbers or NULL (key NULL: the primary key; columns NULL: all).
-- Result: a jsonb array in column order of objects
--   attnum, name, type (with typmod), log_type, as_text, output (text output function when it is one of pg_catalog and
--   the column is no domain: another schema may not be open to the capture role), key, suffix (of its columns in the
--   log: row_, old_ and new_), log_key, log_old, log_new (its columns as readers get them; NULL for none), width (bytes
--   that one image takes in the page in the worst case).
-- Two equal results mean that the same capture function fits; DDL is noticed by a different result.
--   A pg_catalog type is logged as itself without typmod, since a typmod would fail writes once the source is widened.
--   A domain is logged as its base type. Any other type is logged as the text of its output function: a dependency on
--   the type would block the application's DROP, and a cast could run its owner's code. So is a type that is never
--   stored out of line (tsquery), as two images of it might not fit. Any other value of variable length takes at most
--   24 bytes of the page, as longer ones are moved out. Virtual generated columns are never computed for triggers and
--   are left out.
--   The settings by which names and types are printed are pinned.
-- Writes: nothing.
create or replace function gdq.describe_columns(relid oid, mode text, key smallint[], include smallint[],
                                                columns smallint[], exclude smallint[]) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
as $$
begin
  -- in PL/pgSQL, which keeps the plan: the DDL guard calls this often
  return (
  with recursive key_of as (
    select coalesce(key, (select array_agg(k order by n)
                            from pg_index i, unnest(i.indkey::smallint[]) with ordinality u(k, n)
                           where i.indrelid = relid and i.indisprimary and n <= i.indnkeyatts)) as k
  ), base(attnum, typid) as (
    select a.attnum, a.atttypid
      from pg_attribute a
     where a.attrelid = relid and a.attnum > 0 and not a.attisdropped and a.attgenerated <> 'v'
    union all
    select b.attnum, t.typbasetype from base b join pg_type t on t.oid = b.typid where t.typtype = 'd'
  ), described as (
    select a.attnum, a.attname, a.atttypid, a.atttypmod, t.oid as base, t.typlen,
           case when p.pronamespace = 'pg_catalog'::regnamespace then format('pg_catalog.%I', p.proname) end as output,
           t.oid >= 16384 or t.typtype = 'c' or (t.typlen < 0 and t.typstorage = 'p') as as_text,
           a.attnum = any (key_of.k) as is_key,
           case mode when 'pk' then a.attnum = any (include)
                     else (columns is null or a.attnum = any (columns))
                      and (exclude is null or a.attnum <> all (exclude))
           end as imaged,
           case when octet_length(a.attname) > 59 or a.attname ~ '^[0-9]+$' then a.attnum::text
                else a.attname end as suffix
      from base b
      join pg_type t on t.oid = b.typid and t.typtype <> 'd'
      join pg_attribute a on a.attrelid = relid and a.attnum = b.attnum
      join pg_proc p on p.oid = t.typoutput
      cross join key_of
  )
  select coalesce(jsonb_agg(jsonb_build_object(
           'attnum', attnum, 'name', attname, 'type', format_type(atttypid, atttypmod),
           'log_type', case when as_text then 'text' else format_type(base, -1) end,
           'as_text', as_text,
           'output', case when base = atttypid then output end,
           'key', coalesce(is_key, false),
           'suffix', suffix,
           'log_key', case when mode = 'pk' and is_key then 'key_' || suffix end,
           'log_old', case when imaged then 'old_' || suffix end,
           'log_new', case when imaged then 'new_' || suffix end,
           'width', case when as_text or typlen < 0 then 24 else (typlen + 7) / 8 * 8 end) order by attnum), '[]')
    from described
   where imaged or (mode = 'pk' and is_key)
  );
end
$$;
comment on function gdq.describe_columns(oid, text, smallint[], smallint[], smallint[], smallint[]) is
  'The logged columns of a table as the catalogs are now; equal results mean that DDL changed none of them.';

-- describe_filter(table_id): the current names of the columns of a captured table's row filter, by attribute number;
-- NULL for no filter. Writes: nothing. Errors: 42P10 when a column was dropped or has another type, so that the filter
-- no longer fits.
create or replace function gdq.describe_filter(table_id integer) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  c record;
  names jsonb;
begin
  for c in select f.key, f.value->>'name' as name, (f.value->>'type')::oid as typid,
                  a.attname, a.attisdropped, a.atttypid
             from gdq.captured_table ct cross join jsonb_each(ct.row_filter->'columns') f
             left join pg_attribute a on a.attrelid = ct.relid and a.attnum = f.key::smallint
            where ct.table_id = describe_filter.table_id loop
    if c.attisdropped is not false or c.atttypid <> c.typid then
      raise exception 'column "%" of the row filter %', c.name,
        case when c.attisdropped is false then format('is of type %s now', format_type(c.atttypid, null))
             else 'was dropped' end
        using errcode = 'invalid_column_reference';
    end if;
    names := coalesce(names, '{}') || jsonb_build_object(c.key, c.attname);
  end loop;
  return names;
end
$$;
comment on function gdq.describe_filter(integer) is 'The current names of the columns of a row filter.';
