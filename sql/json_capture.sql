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

-- row_type(version_id): name of the type that takes the row text of a version in format json apart. Writes: nothing.
create or replace function gdq.row_type(version_id bigint) returns text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select format('gdq_log.t%s_v%s_row', v.table_id, v.version_id) from gdq.table_version v where v.version_id = row_type.version_id and v.shape is not null
$$;
comment on function gdq.row_type(bigint) is 'Name of the type that takes the row text of a version apart.';

-- create_row_type(version_id), drop_row_type(version_id): makes and drops that type, if the version is of format json.
-- Writes: a type in gdq_log.
create or replace function gdq.create_row_type(version_id bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if gdq.row_type(version_id) is not null then
    execute format('create type %s as (%s)', gdq.row_type(version_id),
      (select string_agg(format('c%s %s', attnum, type), ', ' order by attnum)
         from gdq.table_version v, jsonb_to_recordset(v.shape) s(attnum int, type text) where v.version_id = create_row_type.version_id));
  end if;
end
$$;
comment on function gdq.create_row_type(bigint) is 'Makes the type that takes the row text of a version apart.';

create or replace function gdq.drop_row_type(version_id bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
begin
  if gdq.row_type(version_id) is not null then
    execute format('drop type if exists %s', gdq.row_type(version_id));
  end if;
end
$$;
comment on function gdq.drop_row_type(bigint) is 'Drops the type that takes the row text of a version apart.';

-- log_columns(v), log_values(v, source): the log columns of one image of a version, without their prefix, and their values
-- in a capture function, source being OLD or NEW or a row of a transition table. Writes: nothing.
create or replace function gdq.log_columns(v gdq.table_version) returns jsonb
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return case when v.shape is null then v.columns else '[{"attnum": 1, "suffix": "text", "log_type": "text"}]' end;
end
$$;
comment on function gdq.log_columns(gdq.table_version) is 'The log columns of one image of a version.';

create or replace function gdq.log_values(v gdq.table_version, source text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select case when v.shape is null then gdq.image_values(v.columns, source) else format(', pg_catalog.textin(pg_catalog.record_out(%s))', source) end
$$;
comment on function gdq.log_values(gdq.table_version, text) is 'The values of one image in a capture function.';

-- row_fits(row_text, row_type): whether the text of a row can be taken apart as this type. It cannot when the table was
-- altered and capture has not followed yet. For PostgreSQL 15, which has no pg_input_is_valid(). Writes: nothing.
create or replace function gdq.row_fits(row_text text, row_type text) returns boolean
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  execute format('select %L::%s', row_text, row_type);
  return true;
exception when others then
  return false;
end
$$;
comment on function gdq.row_fits(text, text) is 'Whether the text of a row can be taken apart as this type.';

-- json_images_sql(version_id, changes): of a SELECT of ev_*, old_text and new_text from a segment in format json, what
-- images_sql() gives. A row that does not fit the version has no images and the operation !. Writes: nothing.
create or replace function gdq.json_images_sql(version_id bigint, changes text) returns text
language sql stable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
as $$
  -- OFFSET 0: else every column would parse the text again
  select format('select ev_id, ev_txid, ev_time, ev_op, ev_origin%1$s from (select ev_id, ev_txid, ev_time, case when old_fits and new_fits then ev_op else ''!'' end as ev_op, ev_origin, '
                'case when old_fits and new_fits then old_text::%2$s end as old_row, case when old_fits and new_fits then new_text::%2$s end as new_row '
                'from (select *, coalesce(%3$s(old_text, %2$L), true) as old_fits, coalesce(%3$s(new_text, %2$L), true) as new_fits '
                'from (%4$s) t offset 0) f offset 0) r',
                (select string_agg(format(', (%I).%I as %I', image || '_row', field, image || '_' || suffix), '' order by image desc, attnum)
                   from jsonb_to_recordset(v.columns) c(attnum int, field text, suffix text), unnest('{old,new}'::text[]) image),
                gdq.row_type(v.version_id),
                case when to_regprocedure('pg_input_is_valid(text, text)') is null then 'gdq.row_fits' else 'pg_catalog.pg_input_is_valid' end,
                changes)
    from gdq.table_version v where v.version_id = json_images_sql.version_id
$$;
comment on function gdq.json_images_sql(bigint, text) is 'Takes the rows of a segment in format json apart.';

-- row_is_whole(ev_op, ev_id): true, or error GDQ03 for a row that does not fit its version. Writes: nothing.
create or replace function gdq.row_is_whole(ev_op text, ev_id bigint) returns boolean
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if ev_op = '!' then
    raise exception 'event % was written after an ALTER that capture had not followed', ev_id using errcode = 'GDQ03',
      hint = 'Register the consumer again, then load the table afresh.';
  end if;
  return true;
end
$$;
comment on function gdq.row_is_whole(text, bigint) is 'True, or error GDQ03 for a row that does not fit its version.';

-- json_fault(table_id): why format json cannot capture a table as it is now: the columns of some partition come in another
-- order, which the text of its rows does not tell. NULL when it can. Writes: nothing.
create or replace function gdq.json_fault(table_id integer) returns text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  with orders as (
    select p.relid, string_agg(quote_ident(a.attname), ',' order by a.attnum) as names
      from gdq.captured_table ct, pg_partition_tree(ct.relid) p
      join pg_attribute a on a.attrelid = p.relid and a.attnum > 0 and not a.attisdropped
     where ct.table_id = json_fault.table_id and ct.format = 'json' group by p.relid)
  select format('partition %s has its columns in another order than %s, which format json cannot tell', gdq.table_name(leaf.relid), gdq.table_name(root.relid))
    from gdq.captured_table ct join orders root using (relid), orders leaf
   where ct.table_id = json_fault.table_id and leaf.names <> root.names limit 1
$$;
comment on function gdq.json_fault(integer) is 'Why format json cannot capture a table as it is now; NULL when it can.';
