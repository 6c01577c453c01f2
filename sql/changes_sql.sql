-- segment_is(segment, filenode): true, or error GDQ01 when the segment has been truncated since a batch was cut from it.
-- pg_relation_filenode() is fresh in any snapshot, and as a one-time filter this runs after the reader has its lock: an
-- emptied segment can never read as one without rows. Writes: nothing.
create or replace function gdq.segment_is(segment regclass, filenode oid) returns boolean
language plpgsql stable parallel unsafe security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if pg_relation_filenode(segment) is distinct from filenode then
    raise exception 'log segment % was truncated since the batch was cut', segment using errcode = 'GDQ01',
      hint = 'The batch was finished elsewhere. Ask for the next batch.';
  end if;
  return true;
end
$$;
comment on function gdq.segment_is(regclass, oid) is 'True, or error GDQ01 when a segment was truncated since a batch was cut from it.';

-- holds_rows(segment): whether a reader must look at a segment: it holds rows, or did in the transaction's snapshot,
-- which pin_segment() then reports. Writes: nothing.
create or replace function gdq.holds_rows(segment regclass) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if coalesce(pg_relation_size(segment), 0) > 0 then
    return true;
  elsif current_setting('transaction_isolation') = 'read committed' then
    return false;  -- a look into pg_class costs more with every truncation while somebody holds a snapshot
  end if;
  return (select c.relfilenode from pg_class c where c.oid = segment) is distinct from pg_relation_filenode(segment);
end
$$;
comment on function gdq.holds_rows(regclass) is 'Whether a segment holds rows, or did in the transaction''s snapshot.';

-- pin_segment(segment): keeps a segment from truncation until the transaction ends. Truncation never waits, so this
-- waits at most for one under way. In REPEATABLE READ the position that let it be truncated may be invisible; but
-- then pg_class shows another file than the segment has. Result: its filenode. Writes: a lock. Errors: GDQ01.
create or replace function gdq.pin_segment(segment regclass) returns oid
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  filenode oid := pg_relation_filenode(segment);
begin
  if filenode is not null then
    begin
      execute format('lock table only %s in access share mode', segment);
      filenode := pg_relation_filenode(segment);
    exception when undefined_table or syntax_error then
      filenode := null;  -- dropped with its version, empty
    end;
  end if;
  if filenode is null or current_setting('transaction_isolation') <> 'read committed'
                         and filenode <> (select c.relfilenode from pg_class c where c.oid = segment) then
    raise exception 'log segment % was truncated after the snapshot of this transaction', segment using errcode = 'GDQ01',
      hint = 'The batch was finished elsewhere. Roll back, and ask for the next batch.';
  end if;
  return filenode;
end
$$;
comment on function gdq.pin_segment(regclass) is 'Keeps a log segment from truncation until the transaction ends; its filenode.';

-- changes_sql(segment, columns, s0, s1): a SELECT of columns (text) for the rows of one segment in (s0, s1]: written by
-- transactions that count as finished in s1 and did not in s0. Plain bigint arithmetic, so that BRIN serves it: the
-- window between the two xmax, and the list of those that were open at s0 and have ended since. Its cost follows the
-- window, not the age of the oldest transaction. (Slony and PgQ cut batches by snapshots likewise.)
-- NULL when the segment has no such row: all of them are there by now. Such a segment is let go again, by rolling a
-- subtransaction back; readers that never pause would else keep consumed segments from ever being truncated.
-- Writes: a lock, see pin_segment(). Errors: GDQ01.
create or replace function gdq.changes_sql(segment regclass, columns text, s0 pg_snapshot, s1 pg_snapshot) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set quote_all_identifiers = off
as $$
declare
  finished text := format('ev_txid >= %s and ev_txid < %s', pg_snapshot_xmax(s0), pg_snapshot_xmax(s1))
    || coalesce((select format(' and ev_txid <> all (''{%s}''::bigint[])', string_agg(x::text, ',' order by x)) from pg_snapshot_xip(s1) x having count(*) > 0), '');
  ended text := (select format('ev_txid = any (''{%s}''::bigint[])', string_agg(x::text, ',' order by x))
                   from pg_snapshot_xip(s0) x where pg_visible_in_snapshot(x, s1) having count(*) > 0);
  same_file text;
  rows_there boolean;
begin
  same_file := format('gdq.segment_is(%s, %s)', quote_literal(segment::oid) || '::pg_catalog.oid', quote_literal(gdq.pin_segment(segment)) || '::pg_catalog.oid');
  execute format('select exists (select from %1$s where %2$s) or exists (select from %1$s where %3$s)', segment::text, finished, coalesce(ended, 'false'))
    into rows_there;
  if not rows_there then
    raise exception using errcode = 'GDQ00';
  end if;
  return format('select %s from %s where %s and %s', columns, segment::text, finished, same_file)
      || case when ended is not null then format(' union all select %s from %s where %s and %s', columns, segment::text, ended, same_file) else '' end;
exception when sqlstate 'GDQ00' then
  return null;
end
$$;
comment on function gdq.changes_sql(regclass, text, pg_snapshot, pg_snapshot) is 'SELECT of one log segment''s rows between two snapshots.';

-- version_segments(version_id): the segments that a batch reads of one version: all that hold rows, whatever was
-- current when. A writer with an old snapshot or an old function may have written to any of them. Writes: nothing.
create or replace function gdq.version_segments(version_id bigint) returns setof regclass
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select s.segment from gdq.log_segment s
     where s.version_id = version_segments.version_id and gdq.holds_rows(s.segment) order by s.slot;
end
$$;
comment on function gdq.version_segments(bigint) is 'The segments of a version that hold rows.';

-- key_changes_sql(columns, pairs): of a SELECT of pairs of images, the same rows, but an UPDATE that changed the key as a
-- D and an I, both under its number. Keys are compared as images, which tells 1.0 from 1.00 and runs no operator of the
-- application's. Writes: nothing.
create or replace function gdq.key_changes_sql(columns jsonb, pairs text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
as $$
  select format('select ev_id, ev_txid, ev_time, op as ev_op, ev_origin%s%s from (%s) r, lateral unnest(case when r.ev_op = ''U'' and '
           'pg_catalog.record_image_ne(row(%s), row(%s)) then array[''D'', ''I''] else array[r.ev_op::text] end) op',
           string_agg(format(', case when op <> ''I'' then %I end as %1$I', 'old_' || suffix), '' order by attnum),
           string_agg(format(', case when op <> ''D'' then %I end as %1$I', 'new_' || suffix), '' order by attnum), pairs,
           string_agg(quote_ident('old_' || suffix), ', ' order by attnum) filter (where key),
           string_agg(quote_ident('new_' || suffix), ', ' order by attnum) filter (where key))
    from jsonb_to_recordset(columns) c(attnum int, suffix text, key boolean)
$$;
comment on function gdq.key_changes_sql(jsonb, text) is 'Makes a D and an I of every UPDATE that changed the key.';

-- version_mode(columns): the mode that a version of a table was captured in. Writes: nothing.
create or replace function gdq.version_mode(columns jsonb) returns text
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return case when columns @? '$[*] ? (@.log_key != null)' then 'pk' else 'full' end;
end
$$;
comment on function gdq.version_mode(jsonb) is 'The mode that a version of a table was captured in.';

-- images_sql(segment, s0, s1): the rows of one change log segment in (s0, s1], whichever table of its slot it is: ev_id,
-- ev_txid, ev_time, ev_op, ev_origin, then old_<suffix> and new_<suffix> of every logged column, NULL for an image that the row
-- does not have; NULL when there is no such row. In mode pk an UPDATE that changed the key becomes a D and an I.
-- Writes: a lock, see pin_segment(). Errors: GDQ01.
create or replace function gdq.images_sql(segment regclass, s0 pg_snapshot, s1 pg_snapshot) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  s record;
  header text;
  names text;
  rows_sql text;
begin
  select ls.pair, gdq.log_columns(v) as columns, v.columns as table_columns, v.shape, v.version_id, gdq.version_mode(v.columns) as mode,
         exists (select from pg_attribute a where a.attrelid = ls.segment and a.attname = 'ev_origin') as origin into strict s
    from gdq.log_segment ls join gdq.table_version v using (version_id)
   where ls.segment = images_sql.segment;
  header := 'ev_id, ev_txid, ev_time, ev_op::text as ev_op, ' || case when s.origin then 'ev_origin' else 'null::text as ev_origin' end;
  if not s.pair then
    select string_agg(format(', case when ev_op in (%s) then %I end as %I', ops, 'row_' || suffix, prefix || suffix), '' order by prefix desc, attnum)
      into names
      from jsonb_to_recordset(s.columns) c(attnum int, suffix text), (values ('old_', '''D'', ''o'''), ('new_', '''I'', ''n''')) image(prefix, ops);
    rows_sql := gdq.changes_sql(segment, header || names, s0, s1);
    return case when s.shape is null or rows_sql is null then rows_sql else gdq.json_images_sql(s.version_id, rows_sql) end;
  end if;
  names := gdq.image_columns(s.columns, 'old_') || gdq.image_columns(s.columns, 'new_');
  rows_sql := gdq.changes_sql(segment, header || names, s0, s1);
  if s.shape is not null and rows_sql is not null then
    rows_sql := gdq.json_images_sql(s.version_id, rows_sql);
  end if;
  return case when s.mode = 'pk' and rows_sql is not null then gdq.key_changes_sql(s.table_columns, rows_sql) else rows_sql end;
end
$$;
comment on function gdq.images_sql(regclass, pg_snapshot, pg_snapshot) is 'SELECT of one change log segment''s rows between two snapshots, in one shape for both tables of a slot.';

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
