-- describe_table(table_id): describe_columns() of a captured table with its own options and in its format.
-- Writes: nothing.
create or replace function gdq.describe_table(table_id integer) returns jsonb
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select case ct.format when 'json' then gdq.json_columns(columns) else columns end
    from gdq.captured_table ct, gdq.describe_columns(ct.relid, ct.mode, ct.key_attnums, ct.include_attnums, ct.column_attnums, ct.exclude_attnums) columns
   where ct.table_id = describe_table.table_id
$$;
comment on function gdq.describe_table(integer) is 'describe_columns() of a captured table with its own options.';

-- describe_columns(relid, mode, key, include, columns, exclude): what the log of a table holds, from the catalog of
-- the moment. Arguments after mode are attribute numbers or NULL (key NULL: the primary key; columns NULL: all).
-- Result: a jsonb array in column order of objects
--   attnum, name, type (with typmod), log_type, as_text, output (text output function when it is one of pg_catalog and
--   the column is no domain: another schema may not be open to the capture role), key, suffix (of its columns in the
--   log: row_, old_ and new_), log_key, log_old, log_new (its columns in what readers are given; NULL where it has
--   none), width (bytes of one image in the worst case, in the page).
-- Two equal results mean that the same capture function fits: this is the fingerprint that DDL is compared by.
--   A pg_catalog type is logged as itself without typmod (a typmod would fail writes once the source is widened), a
--   domain as its base type, any other type as the text of its output function (a dependency on the type would block
--   the application's DROP, a cast could run its owner's code), and so a type that is never stored out of line (tsquery):
--   two images of it might not fit. Any other value of variable length takes 24 bytes of the page at most: what is
--   longer is moved out. Virtual generated columns are never computed for triggers and are left out.
--   The settings that names and types are printed by are pinned. Writes: nothing.
create or replace function gdq.describe_columns(relid oid, mode text, key smallint[], include smallint[],
                                                columns smallint[], exclude smallint[]) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
as $$
begin
  -- PL/pgSQL keeps the plan: the DDL guard calls this often
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
                     else (columns is null or a.attnum = any (columns)) and (exclude is null or a.attnum <> all (exclude))
           end as imaged,
           case when octet_length(a.attname) > 59 or a.attname ~ '^[0-9]+$' then a.attnum::text else a.attname end as suffix
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
comment on function gdq.describe_columns(oid, text, smallint[], smallint[], smallint[], smallint[]) is 'The logged columns of a table as the catalog has them now; also the fingerprint that tells whether DDL changed them.';

-- Format json: the log holds every row as one value, the text that PostgreSQL gives of the whole row. Its capture
-- functions name no column, so that no DDL of the table, followed or not, can make a write fail. Row text, because it
-- runs only the output functions of the types: row_to_json() would run the casts that users define, lose the bounds of
-- arrays and the texts of composites. Readers take it apart with the columns of the version that the log belongs to.

-- json_columns(columns): the columns that describe_columns() gave, as format json logs them: those whose text can be read
-- back under any setting and whatever has been dropped since have their own type, the others that text.
-- field: the column in the version's row type. Writes: nothing.
create or replace function gdq.json_columns(columns jsonb) returns jsonb
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce(jsonb_agg(c || jsonb_build_object('field', 'c' || (c->>'attnum'), 'output', null, 'width', 0)
           || case when c->>'log_type' = any ('{boolean,smallint,integer,bigint,real,double precision,numeric,text,character varying,character,bpchar,name,'
                                              'bytea,uuid,date,timestamp without time zone,timestamp with time zone,time without time zone,'
                                              'time with time zone,json,jsonb,inet,cidr,oid,"\"char\""}')
                   then '{}'::jsonb else '{"log_type": "text", "as_text": true}' end order by (c->>'attnum')::int), '[]')
    from jsonb_array_elements(columns) c
$$;
comment on function gdq.json_columns(jsonb) is 'The columns of a table as format json logs them.';

-- table_shape(table_id): in format json, the columns that the text of a row has, in order, logged or not: attnum and type.
-- NULL in format typed. Writes: nothing.
create or replace function gdq.table_shape(table_id integer) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (select coalesce(jsonb_agg(jsonb_build_object('attnum', a.attnum, 'type', coalesce(d.log_type, 'text')) order by a.attnum), '[]')
            from gdq.captured_table ct
            left join pg_attribute a on a.attrelid = ct.relid and a.attnum > 0 and not a.attisdropped
            left join jsonb_to_recordset(gdq.json_columns(gdq.describe_columns(ct.relid, 'full', null, null, null, null))) d(attnum int, log_type text)
                   on d.attnum = a.attnum
           where ct.table_id = table_shape.table_id and ct.format = 'json' having count(*) > 0);
end
$$;
comment on function gdq.table_shape(integer) is 'In format json, the columns that the text of a row has.';

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

-- check_key(table_id, described): error when the key of a captured table cannot identify its rows.
-- Writes: nothing. Errors: 0A000 pk mode without a key; 22023 a key without a unique index, nullable or not logged.
create or replace function gdq.check_key(table_id integer, described jsonb) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  bad text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = check_key.table_id;
  if t.mode = 'pk' and not exists (select from jsonb_array_elements(described) c where (c->>'key')::boolean) then
    raise exception 'table % has no primary key, which mode pk logs', t.table_name using errcode = 'feature_not_supported',
      hint = 'Use mode full, or name the columns of a unique index with key.';
  end if;
  select string_agg(quote_ident(a.attname), ', ' order by a.attnum) into bad
    from pg_attribute a where a.attrelid = t.relid and a.attnum = any (t.key_attnums) and not a.attnotnull;
  if bad is not null then
    raise exception 'key column % of % may be null', bad, t.table_name
      using errcode = 'invalid_parameter_value', hint = 'ALTER COLUMN ... SET NOT NULL first, or leave key out.';
  end if;
  if t.key_attnums is not null and not exists (
       select from pg_index i
        where i.indrelid = t.relid and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null
          and (select array_agg(k order by k) from unnest(i.indkey::smallint[]) with ordinality u(k, n) where n <= i.indnkeyatts)
              = (select array_agg(k order by k) from unnest(t.key_attnums) k)) then
    raise exception 'no unique index of % has exactly the key columns', t.table_name using errcode = 'invalid_parameter_value',
      hint = 'Create one (not partial, not deferrable), or leave key out.';
  end if;
  select string_agg(quote_ident(a.attname), ', ') into bad
    from pg_attribute a
   where a.attrelid = t.relid
     and a.attnum = any (coalesce(t.key_attnums, (select i.indkey::smallint[] from pg_index i where i.indrelid = t.relid and i.indisprimary)))
     and not exists (select from jsonb_array_elements(described) c where (c->>'attnum')::int = a.attnum);
  if bad is not null then
    raise exception 'key column % of % must be logged', bad, t.table_name using errcode = 'invalid_parameter_value',
      hint = 'Leave key columns out of exclude, and name them in columns.';
  end if;
end
$$;
comment on function gdq.check_key(integer, jsonb) is 'Error when the key of a captured table cannot identify its rows.';
