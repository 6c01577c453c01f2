-- create_version(table_id, columns, slots): creates a new version of a captured table's log with its first segments.
--   columns: from describe_table(). slots: how many slots of its ring to make now: all 3, or one inside the DDL of an
--   application, which may hold hundreds of locks already; maintain() adds the others.
-- Result: the version's id. Writes: inserts into table_version, log_ring, log_segment; creates the segments. Errors:
-- 54000 when an image cannot fit a page or the log would have too many columns.
create or replace function gdq.create_version(table_id integer, columns jsonb, slots integer) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  -- bytes in a heap page of 8 kB, less tuple header, null bitmap and the four ev_ columns
  page constant integer := 8000;
  t gdq.captured_table;
  id bigint;
  n integer;
  pair integer;
  stamps integer;
  width integer;
  shape jsonb := gdq.table_shape(table_id);
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = create_version.table_id;
  stamps := 4 + t.origin::integer;
  select count(*), 2 * count(*) + count(c.same), 64 + count(*) / 8 + 24 * t.origin::integer + coalesce(sum(c.width), 0)
    into n, pair, width
    from jsonb_to_recordset(columns) c(width int, same text);
  if gdq.columns_to_read(columns) > 1664 then
    raise exception 'table % cannot be captured: readers need a SELECT of % columns, and one holds 1664',
      gdq.last_table_name(table_id), gdq.columns_to_read(columns)
      using errcode = 'program_limit_exceeded',
            hint = case when shape is null then 'Leave columns out with exclude, or capture in pk mode.'
                        else 'Capture it in mode pk.' end;
  elsif shape is null and (n + stamps > 1600 or width > page) then
    raise exception
      'table % cannot be captured: one row image may take % columns and % bytes in a page, which holds 1600 and %',
      t.table_name, n + stamps, width, page
      using errcode = 'program_limit_exceeded', hint = 'Leave columns out with exclude, or capture in pk mode.';
  end if;
  insert into gdq.table_version (table_id, columns, shape, split, filter_names)
    values (table_id, columns, shape,
            t.granularity = 'statement' or (shape is null and (pair + stamps > 1600 or 2 * width > page)),
            gdq.describe_filter(table_id))
    returning version_id into id;
  perform gdq.create_row_type(id);
  insert into gdq.log_ring (version_id) values (id);
  for slot in 0 .. slots - 1 loop
    perform gdq.create_segment(id, slot);
  end loop;
  return id;
end
$$;
comment on function gdq.create_version(integer, jsonb, integer) is
  'Creates a new version of a captured table''s log with its first segments.';

-- columns_to_read(columns): how many columns the widest SELECT of a version's readers has: five that begin with ev_, or
-- six, then both images of every column, or the typed columns as table_changes_sql() gives them. Writes: nothing.
create or replace function gdq.columns_to_read(columns jsonb) returns integer
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select 5 + coalesce(bool_or(c.omit), false)::integer
           + greatest(2 * count(*), count(c.log_key) + count(c.log_old) + count(c.log_new))::integer
    from jsonb_to_recordset(columns) c(log_key text, log_old text, log_new text, omit boolean)
$$;
comment on function gdq.columns_to_read(jsonb) is
  'How many columns the widest SELECT of a version''s readers has.';

-- version_fits(version_id, columns): whether the capture functions of a version fit a table with these columns, as from
-- describe_table(), and with the columns of its row filter as they are now.
-- Writes: nothing. Errors: as describe_filter().
create or replace function gdq.version_fits(version_id bigint, columns jsonb) returns boolean
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select v.columns = version_fits.columns
     and v.shape is not distinct from gdq.table_shape(v.table_id)
     and v.filter_names is not distinct from gdq.describe_filter(v.table_id)
    from gdq.table_version v where v.version_id = version_fits.version_id
$$;
comment on function gdq.version_fits(bigint, jsonb) is 'Whether the capture functions of a version fit these columns.';

-- create_row_type(version_id): creates the type that splits the row text of a version into columns, if the version is
-- of format json. Writes: a type in gdq_log.
create or replace function gdq.create_row_type(version_id bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if gdq.row_type(version_id) is not null then
    execute format('create type %s as (%s)', gdq.row_type(version_id),
      (select string_agg(format('c%s %s', attnum, type), ', ' order by attnum)
         from gdq.table_version v, jsonb_to_recordset(v.shape) s(attnum int, type text)
        where v.version_id = create_row_type.version_id));
  end if;
end
$$;
comment on function gdq.create_row_type(bigint) is
  'Creates the type that splits the row text of a version into columns.';

-- drop_version(version_id): drops what belongs to a version beside its segments: the type that create_row_type() made,
-- and the reader that create_readers() made. Writes: a type and a function in gdq_log.
create or replace function gdq.drop_version(version_id bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
begin
  if gdq.row_type(version_id) is not null then
    execute format('drop type if exists %s', gdq.row_type(version_id));
  end if;
  execute (select format('drop function if exists gdq_log.%I(pg_snapshot, pg_snapshot)', gdq.reader_name(v))
             from gdq.table_version v where v.version_id = drop_version.version_id);
end
$$;
comment on function gdq.drop_version(bigint) is 'Drops what belongs to a version beside its segments.';

-- reader_name(v): the name of the function in gdq_log that reads a version's log, where there is one: see
-- create_readers(). Writes: nothing.
create or replace function gdq.reader_name(v gdq.table_version) returns text
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return concat('t', v.table_id, '_v', v.version_id, '_read');
end
$$;
comment on function gdq.reader_name(gdq.table_version) is 'Name of the function that reads a version''s log.';
