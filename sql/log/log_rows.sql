-- SQL that reads the rows of a log as images of table rows, in both capture formats.

-- changes_sql(segment, columns, s0, s1): a SELECT of columns (text) for the rows of one segment in (s0, s1]: those of
-- transactions that count as finished in s1 and not in s0. NULL when the segment has no such row, since all of them are
-- there by now.
-- The conditions are plain bigint arithmetic, so that BRIN serves them: the window between the two xmax, and the list
-- of transactions that were open at s0 and have ended since. The cost follows the window, not the age of the oldest
-- transaction. (Slony and PgQ cut batches by snapshots likewise.)
-- A segment without rows is unlocked again by rolling a subtransaction back: else readers that never pause would keep
-- consumed segments from ever being truncated. Writes: a lock, see pin_segment(). Errors: GDQ01.
create or replace function gdq.changes_sql(segment regclass, columns text, s0 pg_snapshot, s1 pg_snapshot) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set enable_seqscan = off set quote_all_identifiers = off
as $$
declare
  finished text := format('ev_txid >= %s and ev_txid < %s', pg_snapshot_xmax(s0), pg_snapshot_xmax(s1))
    || coalesce((select format(' and ev_txid <> all (''{%s}''::bigint[])', string_agg(x::text, ',' order by x))
                   from pg_snapshot_xip(s1) x having count(*) > 0), '');
  ended text := (select format('ev_txid = any (''{%s}''::bigint[])', string_agg(x::text, ',' order by x))
                   from pg_snapshot_xip(s0) x where pg_visible_in_snapshot(x, s1) having count(*) > 0);
  same_file text;
  rows_there boolean;
begin
  same_file := format('gdq.segment_is(%L::pg_catalog.oid, %L::pg_catalog.oid)',
                      segment::oid, gdq.pin_segment(segment));
  execute format('select exists (select from %1$s where %2$s) or exists (select from %1$s where %3$s)',
                 segment::text, finished, coalesce(ended, 'false'))
    into rows_there;
  if not rows_there then
    raise exception using errcode = 'GDQ00';
  end if;
  return concat_ws(' union all ',
    format('select %s from %s where %s and %s', columns, segment::text, finished, same_file),
    case when ended is not null then
      format('select %s from %s where %s and %s', columns, segment::text, ended, same_file) end);
exception when sqlstate 'GDQ00' then
  return null;
end
$$;
comment on function gdq.changes_sql(regclass, text, pg_snapshot, pg_snapshot) is
  'SELECT of one log segment''s rows between two snapshots.';

-- images_sql(segment, s0, s1): SELECT of the rows of one change log segment in (s0, s1], in one shape for both tables
-- of a slot: ev_id, ev_txid, ev_time, ev_op, ev_origin, then old_<suffix> and new_<suffix> of every logged column, NULL
-- for an image that the row does not have. A value that is logged once is in both images. Of a version that omits()
-- also ev_unchanged: the names of columns whose values neither image has, as the UPDATE left them as they were; else
-- NULL. NULL when there are no rows.
-- In mode pk an UPDATE that changed the key becomes a D and an I. Writes: a lock, see pin_segment(). Errors: GDQ01.
create or replace function gdq.images_sql(segment regclass, s0 pg_snapshot, s1 pg_snapshot) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  rows_sql text := gdq.changes_sql(segment, gdq.segment_columns(segment), s0, s1);
begin
  return case when rows_sql is not null then gdq.segment_images_sql(segment, rows_sql) end;
end
$$;
comment on function gdq.images_sql(regclass, pg_snapshot, pg_snapshot) is
  'SELECT of one change log segment''s rows between two snapshots, in one shape for both tables of a slot.';

-- later_images_sql(segment): images_sql() for the rows after any snapshot: $1 bigint is its xmax, $2 bigint[] the
-- transactions that were open in it. Writes: nothing.
create or replace function gdq.later_images_sql(segment regclass) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
as $$
begin
  return gdq.segment_images_sql(segment, format($sql$
    select %1$s from %2$s where ev_txid >= $1
     union all
    select %1$s from %2$s where ev_txid = any ($2)$sql$,
    gdq.segment_columns(segment), gdq.table_name(segment)));
end
$$;
comment on function gdq.later_images_sql(regclass) is
  'SELECT of one change log segment''s rows after a snapshot that is given as parameters.';

-- segment_columns(segment): what segment_images_sql() needs to be selected from a change log segment. Writes: nothing.
create or replace function gdq.segment_columns(segment regclass) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
as $$
declare
  s record;
  names text;
  omitted text;
begin
  select ls.pair, gdq.log_columns(v) as columns, gdq.omits(v) as omits,
         case when exists (select from pg_attribute a where a.attrelid = ls.segment and a.attname = 'ev_origin')
              then 'ev_origin' else 'null::text as ev_origin' end as origin
    into strict s
    from gdq.log_segment ls join gdq.table_version v using (version_id)
   where ls.segment = segment_columns.segment;
  if s.pair then
    select string_agg(case when same is null or omit then format(', %I', 'old_' || suffix)
                           else format(', case when %I then %I else %I end as %3$I',
                                       same, 'new_' || suffix, 'old_' || suffix) end, '' order by attnum)
             || gdq.image_columns(s.columns, 'new_'),
           format('case when %s then array_remove(array[%s], null) end',
                  string_agg(quote_ident(same), ' or ' order by attnum) filter (where omit),
                  string_agg(format('case when %I then %L::text end', same, name), ', ' order by attnum)
                    filter (where omit))
      into names, omitted
      from jsonb_to_recordset(s.columns) c(attnum int, name text, suffix text, same text, omit boolean);
  else
    select string_agg(format(', case when ev_op in (%s) then %I end as %I', ops, 'row_' || suffix, prefix || suffix), ''
                      order by prefix desc, attnum)
      into names
      from jsonb_to_recordset(s.columns) c(attnum int, suffix text),
           (values ('old_', $sql$'D', 'o'$sql$), ('new_', $sql$'I', 'n'$sql$)) image(prefix, ops);
  end if;
  return concat('ev_id, ev_txid, ev_time, ev_op::text as ev_op, ', s.origin, names,
                case when s.omits then format(', %s as ev_unchanged', coalesce(omitted, 'null::text[]')) end);
end
$$;
comment on function gdq.segment_columns(regclass) is 'What has to be selected from a change log segment.';

-- segment_images_sql(segment, rows_sql): the SELECT rows_sql of segment_columns(), in the shape of images_sql().
-- Writes: nothing.
create or replace function gdq.segment_images_sql(segment regclass, rows_sql text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  s record;
begin
  select ls.pair, v.columns, v.shape, v.version_id, gdq.version_mode(v.columns) as mode
    into strict s
    from gdq.log_segment ls join gdq.table_version v using (version_id)
   where ls.segment = segment_images_sql.segment;
  if s.shape is not null then
    rows_sql := gdq.json_images_sql(s.version_id, rows_sql);
  end if;
  if s.pair and s.mode = 'pk' then
    rows_sql := gdq.key_changes_sql(s.columns, rows_sql);
  end if;
  return rows_sql;
end
$$;
comment on function gdq.segment_images_sql(regclass, text) is
  'A SELECT from a change log segment, in one shape for both tables of a slot.';

-- json_images_sql(version_id, changes): SELECT of the rows of a segment in format json as images_sql() gives them.
-- changes: a SELECT of ev_*, old_text and new_text. A row that does not fit the version has no images and ev_op !.
-- Writes: nothing.
create or replace function gdq.json_images_sql(version_id bigint, changes text) returns text
language sql stable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
as $$
  -- OFFSET 0: else every column would parse the text again
  select format($sql$
    select ev_id, ev_txid, ev_time, ev_op, ev_origin%1$s
      from (select ev_id, ev_txid, ev_time, case when old_fits and new_fits then ev_op else '!' end as ev_op, ev_origin,
                   case when old_fits and new_fits then old_text::%2$s end as old_row,
                   case when old_fits and new_fits then new_text::%2$s end as new_row
              from (select *, coalesce(%3$s(old_text, %2$L), true) as old_fits,
                              coalesce(%3$s(new_text, %2$L), true) as new_fits
                      from (%4$s) t offset 0) f offset 0) r$sql$,
    (select string_agg(format(', (%I).%I as %I', image || '_row', field, image || '_' || suffix), ''
                       order by image desc, attnum)
       from jsonb_to_recordset(v.columns) c(attnum int, field text, suffix text), unnest('{old,new}'::text[]) image),
    gdq.row_type(v.version_id),
    case when to_regprocedure('pg_input_is_valid(text, text)') is null then 'gdq.row_fits'
         else 'pg_catalog.pg_input_is_valid' end,
    changes)
    from gdq.table_version v where v.version_id = json_images_sql.version_id
$$;
comment on function gdq.json_images_sql(bigint, text) is
  'SELECT of the rows of a segment in format json, split into columns.';

-- joined_updates_sql(columns, rows_sql): the SELECT rows_sql of log rows, with the two halves of a split UPDATE (o with
-- the old image, n with the new one) joined to one row U. Writes: nothing.
create or replace function gdq.joined_updates_sql(columns jsonb, rows_sql text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format($sql$
           with r as (%1$s)
           select * from r where ev_op not in ('o', 'n')
            union all
           select n.ev_id, n.ev_txid, n.ev_time, 'U', n.ev_origin
                  %2$s
             from r o join r n using (ev_id)
            where o.ev_op = 'o' and n.ev_op = 'n' $sql$,
           rows_sql,
           string_agg(format(', %s.%I', half, prefix || suffix), '' order by prefix desc, attnum))
    from jsonb_to_recordset(columns) c(attnum int, suffix text),
         (values ('o', 'old_'), ('n', 'new_')) image(half, prefix)
$$;
comment on function gdq.joined_updates_sql(jsonb, text) is
  'A SELECT of log rows with the halves of split UPDATEs joined.';

-- key_changes_sql(columns, pairs): the SELECT pairs of pairs of images, with each UPDATE that changed the key replaced
-- by a D and an I, both under its number. Keys are compared as images, which distinguishes 1.0 from 1.00 and runs no
-- operator of the application's. Writes: nothing.
create or replace function gdq.key_changes_sql(columns jsonb, pairs text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
as $$
  select format($sql$
    select ev_id, ev_txid, ev_time, op as ev_op, ev_origin%s%s
      from (%s) r,
           lateral unnest(case
             when r.ev_op = 'U' and pg_catalog.record_image_ne(row(%s), row(%s)) then array['D', 'I']
             else array[r.ev_op::text] end) op$sql$,
    string_agg(format($sql$, case when op <> 'I' then %I end as %1$I$sql$, 'old_' || suffix), '' order by attnum),
    string_agg(format($sql$, case when op <> 'D' then %I end as %1$I$sql$, 'new_' || suffix), '' order by attnum),
    pairs,
    string_agg(quote_ident('old_' || suffix), ', ' order by attnum) filter (where key),
    string_agg(quote_ident('new_' || suffix), ', ' order by attnum) filter (where key))
    from jsonb_to_recordset(columns) c(attnum int, suffix text, key boolean)
$$;
comment on function gdq.key_changes_sql(jsonb, text) is 'Replaces every UPDATE that changed the key by a D and an I.';

-- image_columns(columns, prefix): the names of the log columns of one image, as text that begins with a comma. Every
-- name is quoted: a column may have the name of a word that PL/pgSQL reserves and SQL does not (begin, if). Writes:
-- nothing.
create or replace function gdq.image_columns(columns jsonb, prefix text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = on
as $$
  select coalesce(string_agg(format(', %I', prefix || suffix), '' order by attnum), '')
    from jsonb_to_recordset(columns) c(attnum int, suffix text)
$$;
comment on function gdq.image_columns(jsonb, text) is 'The names of the log columns of one image.';

-- log_columns(v): the log columns of one image of a version, without their prefix; in format json the one column of the
-- row's text. Writes: nothing.
create or replace function gdq.log_columns(v gdq.table_version) returns jsonb
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return case when v.shape is null then v.columns else '[{"attnum": 1, "suffix": "text", "log_type": "text"}]' end;
end
$$;
comment on function gdq.log_columns(gdq.table_version) is 'The log columns of one image of a version.';

-- row_type(version_id): the name of the type that splits the row text of a version in format json into columns; NULL in
-- format typed. Writes: nothing.
create or replace function gdq.row_type(version_id bigint) returns text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select format('gdq_log.t%s_v%s_row', v.table_id, v.version_id)
    from gdq.table_version v
   where v.version_id = row_type.version_id and v.shape is not null
$$;
comment on function gdq.row_type(bigint) is 'Name of the type that splits the row text of a version into columns.';

-- version_mode(columns): the mode that a version of a table was captured in. Writes: nothing.
create or replace function gdq.version_mode(columns jsonb) returns text
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return case when columns @? '$[*] ? (@.log_key != null)' then 'pk' else 'full' end;
end
$$;
comment on function gdq.version_mode(jsonb) is 'The mode that a version of a table was captured in.';
