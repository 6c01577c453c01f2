-- Format json: the log holds every row as one value, PostgreSQL's text of the whole row, as in (7,"a b",). The capture
-- functions name no column, so that no DDL of the table, followed or not, can make a write fail. Row text runs only the
-- output functions of the types: row_to_json() would run the casts that users define, and lose the bounds of arrays and
-- the texts of composites. Readers split the text by the columns of the version that the log belongs to.

-- json_columns(columns): the result of describe_columns() as format json logs the columns. A type stays if its text can
-- be read back under any setting, whatever objects were dropped since; any other becomes text. field: the column in the
-- version's row type. Writes: nothing.
create or replace function gdq.json_columns(columns jsonb) returns jsonb
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce(jsonb_agg(c || jsonb_build_object('field', 'c' || (c->>'attnum'), 'output', null, 'width', 0)
           || case when c->>'log_type' = any (E'{boolean,smallint,integer,bigint,real,double precision,numeric,oid,
                                                text,character varying,character,bpchar,name,"\\"char\\"",bytea,uuid,
                                                date,timestamp without time zone,timestamp with time zone,
                                                time without time zone,time with time zone,json,jsonb,inet,cidr}')
                   then '{}'::jsonb
                   else '{"log_type": "text", "as_text": true}' end order by (c->>'attnum')::int), '[]')
    from jsonb_array_elements(columns) c
$$;
comment on function gdq.json_columns(jsonb) is 'The columns of a table as format json logs them.';

-- table_shape(table_id): the columns in the text of a row in format json, in order, logged or not: attnum and type.
-- NULL in format typed. Writes: nothing.
create or replace function gdq.table_shape(table_id integer) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (select coalesce(jsonb_agg(jsonb_build_object('attnum', a.attnum, 'type', coalesce(d.log_type, 'text'))
                                    order by a.attnum), '[]')
            from gdq.captured_table ct
            left join pg_attribute a on a.attrelid = ct.relid and a.attnum > 0 and not a.attisdropped
            left join jsonb_to_recordset(gdq.json_columns(
                        gdq.describe_columns(ct.relid, 'full', null, null, null, null))) d(attnum int, log_type text)
                   on d.attnum = a.attnum
           where ct.table_id = table_shape.table_id and ct.format = 'json' having count(*) > 0);
end
$$;
comment on function gdq.table_shape(integer) is 'The columns in the text of a row in format json.';
