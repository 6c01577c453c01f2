-- table_changes_sql(table_id, s0, s1, version, may_lack, segments): the typed SELECT of a captured table's rows in (s0,
-- s1], with the columns of its newest version; a column that an older version does not have is NULL in its rows.
-- ev_origin follows ev_op where the table is captured with its origin. Then, where table_columns() has a column that
-- updates may omit, ev_unchanged: NULL, or the names of the columns that the log lacks in this row, since the update
-- left them as they were; they are NULL in both images. Not sorted.
--   version: only the rows of this version, with its own columns.
--   may_lack: the columns that a row may lack so; NULL: any of them.
--   segments: instead of two snapshots: the rows after a snapshot in these segments, whatever slot is written now, with
--   two parameters: $1 bigint, its xmax, and $2 bigint[], the transactions that were open in it. Such a SELECT serves
--   any snapshot; it is run in a transaction of REPEATABLE READ that had locked the segments before it began to read.
-- Writes: a lock, see pin_segment(). Errors: 55000 when the interval holds rows of a version in which a column had
-- another type or the table another mode; 42704 for a version that is not one of the table's; GDQ01. Running the SELECT
-- may raise GDQ03, see row_is_whole(), and 0A000, see row_has_all().
create or replace function gdq.table_changes_sql(table_id integer, s0 pg_snapshot, s1 pg_snapshot,
  version bigint default null, may_lack text[] default null, segments regclass[] default null) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  target gdq.table_version;
  v gdq.table_version;
  segment regclass;
  names text;
  retyped text;
  part text;
  parts text[] := '{}';
  origin boolean := (select ct.origin from gdq.captured_table ct where ct.table_id = table_changes_sql.table_id);
  omitted integer[] := gdq.omitted_columns(table_id, version);
  omits boolean;
begin
  select * into target
    from gdq.table_version tv
   where tv.table_id = table_changes_sql.table_id
     and tv.version_id = coalesce(version, gdq.current_version(table_changes_sql.table_id));
  if target.version_id is null then
    raise exception 'table % has no version %', gdq.last_table_name(table_id), version
      using errcode = 'undefined_object', hint = 'Ask gdq.batch_versions() for those of a batch.';
  end if;
  omits := exists (select from jsonb_to_recordset(target.columns) c(attnum int) where c.attnum = any (omitted));
  for v in select * from gdq.table_version tv
            where tv.table_id = table_changes_sql.table_id and (version is null or tv.version_id = version)
            order by tv.version_id loop
    select string_agg(format(', %s as %I', a.value, a.log_column), '' order by a.place),
           string_agg(distinct quote_ident(a.name), ', ') filter (where a.retyped)
      into names, retyped
      from gdq.aligned_columns(v.columns, target.columns) a;
    for segment in select s from gdq.version_segments(v.version_id) s where segments is null
                   union all
                   select s.segment from gdq.log_segment s
                    where s.version_id = v.version_id and s.segment = any (segments) loop
      part := case when segments is null then gdq.images_sql(segment, s0, s1) else gdq.later_images_sql(segment) end;
      continue when part is null;
      if retyped is not null or gdq.version_mode(v.columns) <> gdq.version_mode(target.columns) then
        raise exception 'table % %', gdq.last_table_name(table_id),
          case when retyped is not null then format('changed the type of %s inside the interval', retyped)
               else 'changed to another mode of capture inside the interval' end
          using errcode = 'object_not_in_prerequisite_state',
                hint = 'Read the batch version by version: gdq.batch_versions(), in Python batch.versions(table).';
      end if;
      parts := parts || format('select ev_id, ev_txid, ev_time, ev_op%s%s%s from (%s) r%s',
        case when origin then ', ev_origin' end,
        case when omits then format(', %s as ev_unchanged', gdq.unchanged_sql(v, target)) end,
        names,
        part,
        case when v.shape is not null then ' where gdq.row_is_whole(ev_op, ev_id)'
             when gdq.omits(v) and may_lack is not null then
               format(' where gdq.row_has_all(%s, %L, ev_id)', gdq.unchanged_sql(v, target), may_lack) end);
    end loop;
  end loop;
  if parts = '{}' then
    select string_agg(format(', %s as %I', a.value, a.log_column), '' order by a.place) into names
      from gdq.aligned_columns('[]', target.columns) a;
    parts := array[format($sql$
      select null::bigint as ev_id,
             null::bigint as ev_txid,
             null::timestamptz as ev_time,
             null::text as ev_op
             %s
             %s
             %s
       where false$sql$,
      case when origin then ', null::text as ev_origin' end,
      case when omits then ', null::text[] as ev_unchanged' end,
      names)];
  end if;
  return array_to_string(parts, ' union all ');
end
$$;
comment on function gdq.table_changes_sql(integer, pg_snapshot, pg_snapshot, bigint, text[], regclass[]) is
  'Typed SELECT of a captured table''s log rows between two snapshots.';

-- unchanged_sql(v, target): the SQL of ev_unchanged in rows of a version, as images_sql() gives them, with the names
-- that the columns have in the version target; NULL for none. Writes: nothing.
create or replace function gdq.unchanged_sql(v gdq.table_version, target gdq.table_version) returns text
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return case when not gdq.omits(v) then 'null::text[]'
              when v.version_id = target.version_id then 'ev_unchanged'
              else (select format($sql$nullif(array(select n.now from (values %s) n(was, now)
                                                     where n.was = any (r.ev_unchanged)), '{}')$sql$,
                                  coalesce(string_agg(format('(%L::text, %L::text)', o.name, t.name), ', '
                                                      order by o.attnum), '(null::text, null::text)'))
                      from jsonb_to_recordset(v.columns) o(attnum int, name text, omit boolean)
                      join jsonb_to_recordset(target.columns) t(attnum int, name text) using (attnum)
                     where o.omit) end;
end
$$;
comment on function gdq.unchanged_sql(gdq.table_version, gdq.table_version) is
  'The SQL of ev_unchanged in rows of a version, with the columns'' names in another.';

-- aligned_columns(old, new): for each log column of one version of a table (new), the SQL that reads it from images of
-- another version (old), as images_sql() gives them. old, new: columns of a table_version.
-- Result: place: from 1, in the order of the SELECT; name: of the table's column; log_column: such as old_name; value:
-- SQL, a NULL of the type for a column that the old version does not have; retyped: whether the old version has it with
-- another type. Writes: nothing.
create or replace function gdq.aligned_columns(old jsonb, new jsonb)
  returns table (place bigint, name text, log_column text, value text, retyped boolean)
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
  select row_number() over (order by image.place, n.attnum),
         n.name,
         image.log_column,
         coalesce(image.value, 'null::' || n.log_type),
         coalesce(o.log_type <> n.log_type, false)
    from jsonb_to_recordset(new) n(attnum int, name text, log_type text, log_key text, log_old text, log_new text)
    left join jsonb_to_recordset(old) o(attnum int, log_type text, suffix text) using (attnum),
         lateral (select quote_ident('old_' || o.suffix), quote_ident('new_' || o.suffix)) images(old_image, new_image),
         lateral (values
           (1, n.log_key, 'case when ev_op in (''D'', ''o'') then ' || old_image || ' else ' || new_image || ' end'),
           (2, n.log_old, old_image),
           (3, n.log_new, new_image)) image(place, log_column, value)
   where image.log_column is not null;
end
$$;
comment on function gdq.aligned_columns(jsonb, jsonb) is
  'How the log columns of one version of a table are read from the rows of another.';

-- row_is_whole(ev_op, ev_id): true, or error GDQ03 for a row that does not fit its version. Writes: nothing. Errors:
-- GDQ03.
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

-- row_has_all(unchanged, may_lack, ev_id): true, or error 0A000 for a row without the value of a column that is not in
-- may_lack. unchanged: ev_unchanged of the row. Writes: nothing. Errors: 0A000.
create or replace function gdq.row_has_all(unchanged text[], may_lack text[], ev_id bigint) returns boolean
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if not unchanged <@ may_lack then
    raise exception 'event %, an update, does not log %, which it left as it was', ev_id,
      (select string_agg(quote_ident(c), ', ') from unnest(unchanged) c where c <> all (may_lack))
      using errcode = 'feature_not_supported',
            hint = 'Whole rows are wanted here: capture the table with unchanged both or once.';
  end if;
  return true;
end
$$;
comment on function gdq.row_has_all(text[], text[], bigint) is
  'True, or error 0A000 for a row without the value of a column that is wanted.';

-- row_fits(row_text, row_type): whether the text of a row can be read as this type. It cannot when the table was
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
comment on function gdq.row_fits(text, text) is 'Whether the text of a row can be read as this type.';
