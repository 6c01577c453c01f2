-- table_changes_sql(table_id, s0, s1, version): the typed SELECT of a captured table's rows in (s0, s1], with the columns
-- of its newest version; a column that an older version did not have is NULL there. After ev_op comes ev_origin where the
-- table is captured with its origin. Not sorted.
--   version: only the rows of this version, with its own columns.
-- Writes: nothing. Errors: 55000 when the interval holds rows of a version in which a column had another type or the table
-- another mode; 42704
-- for a version that is not one of the table's. Its rows may raise GDQ03, see row_is_whole().
create or replace function gdq.table_changes_sql(table_id integer, s0 pg_snapshot, s1 pg_snapshot, version bigint default null) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  target gdq.table_version;
  v record;
  segment regclass;
  names text;
  changed text;
  part text;
  parts text[] := '{}';
  origin text := case when (select ct.origin from gdq.captured_table ct where ct.table_id = table_changes_sql.table_id) then ', ev_origin' else '' end;
begin
  select * into target from gdq.table_version tv
   where tv.table_id = table_changes_sql.table_id and tv.version_id = coalesce(version, gdq.current_version(table_changes_sql.table_id));
  if target.version_id is null then
    raise exception 'table % has no version %', gdq.last_table_name(table_id), version using errcode = 'undefined_object',
      hint = 'Ask gdq.batch_versions() for those of a batch.';
  end if;
  for v in select tv.version_id, tv.columns, tv.shape from gdq.table_version tv
            where tv.table_id = table_changes_sql.table_id and (version is null or tv.version_id = version) order by tv.version_id loop
    select string_agg(format(', %s as %I', coalesce(source, 'null::' || n.log_type), log_column), '' order by place, n.attnum),
           string_agg(quote_ident(n.name), ', ') filter (where o.log_type <> n.log_type)
      into names, changed
      from jsonb_to_recordset(target.columns) n(attnum int, name text, log_type text, log_key text, log_old text, log_new text)
      left join jsonb_to_recordset(v.columns) o(attnum int, log_type text, suffix text) using (attnum),
           lateral (values (1, n.log_key, 'case when ev_op in (''D'', ''o'') then ' || quote_ident('old_' || o.suffix) || ' else ' || quote_ident('new_' || o.suffix) || ' end'),
                           (2, n.log_old, quote_ident('old_' || o.suffix)), (3, n.log_new, quote_ident('new_' || o.suffix))) image(place, log_column, source)
     where log_column is not null;
    for segment in select s from gdq.version_segments(v.version_id) s loop
      part := gdq.images_sql(segment, s0, s1);
      if part is not null and changed is not null then
        raise exception 'table % changed the type of % inside the interval', gdq.last_table_name(table_id), changed
          using errcode = 'object_not_in_prerequisite_state', hint = 'Read the batch version by version: gdq.batch_versions(), in Python batch.versions(table).';
      elsif part is not null and gdq.version_mode(v.columns) <> gdq.version_mode(target.columns) then
        raise exception 'table % is captured in another mode since a point inside the interval', gdq.last_table_name(table_id)
          using errcode = 'object_not_in_prerequisite_state', hint = 'Read the batch version by version: gdq.batch_versions(), in Python batch.versions(table).';
      elsif part is not null then
        parts := parts || format('select ev_id, ev_txid, ev_time, ev_op%s%s from (%s) r%s', origin, names, part,
          case when v.shape is not null then ' where gdq.row_is_whole(ev_op, ev_id)' end);
      end if;
    end loop;
  end loop;
  if parts = '{}' then
    select string_agg(format(', null::%s as %I', log_type, log_column), '' order by place, attnum) into names
      from jsonb_to_recordset(target.columns) n(attnum int, log_type text, log_key text, log_old text, log_new text),
           lateral (values (1, log_key), (2, log_old), (3, log_new)) image(place, log_column)
     where log_column is not null;
    return format('select null::bigint as ev_id, null::bigint as ev_txid, null::timestamptz as ev_time, null::text as ev_op%s%s where false',
                  replace(origin, 'ev_origin', 'null::text as ev_origin'), names);
  end if;
  return array_to_string(parts, ' union all ');
end
$$;
comment on function gdq.table_changes_sql(integer, pg_snapshot, pg_snapshot, bigint) is 'Typed SELECT of a captured table''s log rows between two snapshots.';

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
