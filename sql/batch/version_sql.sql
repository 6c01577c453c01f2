-- The SELECTs of one version's change log as events, and the images of a log row as jsonb.

-- version_events_sql(version_id, s0, s1): SELECT of one version's rows in (s0, s1] as get_batch() gives them; NULL for
-- none. Writes: nothing. Errors: GDQ01.
create or replace function gdq.version_events_sql(version_id bigint, s0 pg_snapshot, s1 pg_snapshot) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.table_version;
  rows_sql text;
begin
  select string_agg(gdq.images_sql(s, s0, s1), ' union all ') into rows_sql from gdq.version_segments(version_id) s;
  if rows_sql is null then
    return null;
  end if;
  select * into strict v from gdq.table_version tv where tv.version_id = version_events_sql.version_id;
  return gdq.image_events_sql(v, gdq.name_sql(v.table_id, s1), rows_sql);
end
$$;
comment on function gdq.version_events_sql(bigint, pg_snapshot, pg_snapshot) is
  'SELECT of one version''s log rows between two snapshots, as events.';

-- whole_rows_sql(v, rows_sql): the SELECT rows_sql of a version's rows, as images_sql() gives them, with one row for
-- each change: the halves of split updates joined. Writes: nothing.
create or replace function gdq.whole_rows_sql(v gdq.table_version, rows_sql text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if v.split then
    rows_sql := gdq.joined_updates_sql(v.columns, rows_sql);
    if gdq.version_mode(v.columns) = 'pk' then
      rows_sql := gdq.key_changes_sql(v.columns, rows_sql);
    end if;
  end if;
  return rows_sql;
end
$$;
comment on function gdq.whole_rows_sql(gdq.table_version, text) is
  'A SELECT of a version''s log rows with one row for each change.';

-- image_events_sql(v, tbl, rows_sql): the SELECT rows_sql of a version's rows, as images_sql() gives them, as events
-- with the name tbl (SQL). Rows written after an ALTER that capture had not followed become resync events. The images
-- of an update have no values that it left as they were and did not log. Writes: nothing.
create or replace function gdq.image_events_sql(v gdq.table_version, tbl text, rows_sql text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  image record;
  events text;
begin
  rows_sql := gdq.whole_rows_sql(v, rows_sql);
  image := gdq.json_images(v.columns);
  if gdq.omits(v) then
    image.old_image := format($sql$(%s) - coalesce(ev_unchanged, '{}')$sql$, image.old_image);
    image.new_image := format($sql$(%s) - coalesce(ev_unchanged, '{}')$sql$, image.new_image);
  end if;
  events := format($sql$
    select ev_id, ev_txid, ev_time,
           case ev_op when 'I' then 'insert' when 'U' then 'update' else 'delete' end as op,
           %1$s as tbl,
           case when ev_op = 'D' then %2$s else %3$s end as key,
           case when ev_op <> 'I' then %4$s end as old,
           case when ev_op <> 'D' then %5$s end as new,
           ev_origin as origin
      from (%6$s) r $sql$,
    tbl, image.old_key, image.key, image.old_image, image.new_image, rows_sql);
  if v.shape is null then
    return events;
  end if;
  return format($sql$
    select ev_id, ev_txid, ev_time,
           'resync' as op,
           %1$s as tbl,
           null::jsonb as key,
           null::jsonb as old,
           jsonb_build_object('kind', 'gap', 'reason', 'written after an ALTER that capture had not followed') as new,
           ev_origin as origin
      from (%2$s) r
     where ev_op = '!'
     union all
    %3$s
     where ev_op <> '!' $sql$,
    tbl, rows_sql, events);
end
$$;
comment on function gdq.image_events_sql(gdq.table_version, text, text) is
  'A SELECT of a version''s log rows, as events.';

-- json_images(columns): SQL expressions for the images of a log row as jsonb objects: key, old_key, old_image and
-- new_image; the expression is a NULL where the version logs no such image. Writes: nothing.
create or replace function gdq.json_images(columns jsonb,
  out key text, out old_key text, out old_image text, out new_image text)
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  with logged as materialized (
    select c.*, gdq.json_value(c.log_type) as value
      from jsonb_to_recordset(columns) c(attnum int, name text, log_type text, key boolean, suffix text, log_old text)
  ), members as (
    select image.kind, c.attnum, format('%L::text, ', c.name) || format(c.value, image.prefix || c.suffix) as member,
           -- jsonb_build_object takes at most 100 arguments
           (row_number() over (partition by image.kind order by c.attnum) - 1) / 50 as chunk
      from logged c,
           (values ('key', 'new_'), ('old_key', 'old_'), ('old', 'old_'), ('new', 'new_')) image(kind, prefix)
     where case when image.kind in ('key', 'old_key') then c.key else c.log_old is not null end
  ), chunks as (
    select m.kind, m.chunk, format('jsonb_build_object(%s)', string_agg(m.member, ', ' order by m.attnum)) as object
      from members m group by m.kind, m.chunk
  ), images as (
    select c.kind, string_agg(c.object, ' || ' order by c.chunk) as object from chunks c group by c.kind
  )
  select coalesce(max(i.object) filter (where i.kind = 'key'), 'null::jsonb'),
         coalesce(max(i.object) filter (where i.kind = 'old_key'), 'null::jsonb'),
         coalesce(max(i.object) filter (where i.kind = 'old'), 'null::jsonb'),
         coalesce(max(i.object) filter (where i.kind = 'new'), 'null::jsonb')
    into json_images.key, old_key, old_image, new_image
    from images i;
end
$$;
comment on function gdq.json_images(jsonb) is 'SQL expressions for the images of a log row as jsonb.';

-- json_value(log_type): a template of the SQL expression that jsonb_build_object turns into JSON for a log column of a
-- type, with %1$I for the column's name; for numeric: textin(numeric_out(%1$I)). bool, smallint, integer, text and
-- finite floats become JSON's own types. All others become PostgreSQL's text, since JSON would lose something (numeric
-- scale, bigint beyond 2^53, NaN, -0, infinity). Output functions render the text, never casts, and not to_jsonb(): one
-- jsonb within the other costs a quarter more. Writes: nothing.
create or replace function gdq.json_value(log_type text) returns text
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if log_type in ('boolean', 'smallint', 'integer', 'text', 'character varying', 'name') then
    return '%1$I';
  elsif log_type in ('real', 'double precision') then
    return replace(
      $sql$case when %1$I in ('NaN', 'Infinity', '-Infinity') or textin(output(%1$I)) = '-0'
                then to_jsonb(textin(output(%1$I)))
                else to_jsonb(%1$I) end$sql$,
      'output', case log_type when 'real' then 'float4out' else 'float8out' end);
  end if;
  return (select case when p.proargtypes[0] = t.oid or p.proargtypes[0]::regtype::text like 'any%'
                      then 'textin(' || replace(p.oid::regproc::text, '%', '%%') || '(%1$I))'
                      -- refcursor borrows the output function of text
                      else $sql$case when %1$I is not null then format('%%s', %1$I) end$sql$ end
            from pg_type t join pg_proc p on p.oid = t.typoutput where t.oid = log_type::regtype);
end
$$;
comment on function gdq.json_value(text) is
  'Template of the SQL expression that renders a log column of a type for JSON.';
