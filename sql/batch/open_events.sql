-- open_events(batch_id, token, cursors, images, columns): opens cursors over all events of an open batch, for gdq's
-- Python: of few rows as JSON, of many with the columns of the logs in their own types. A role that may not read the
-- logs may read these cursors.
-- The reader merges the parts `rows` and `events` by ev_id and ev_op; part `retries` comes before them.
--   cursors: what the cursors' names begin with; they are cursors_0, cursors_1 ... The first one always exists, so that
--   its first rows can be fetched in the same round trip.
--   images: both; or new: without old images; or none: without rows of tables, for who reads these by batch_sql().
--   columns: only these columns of the images; NULL: all. A key is whole.
-- Result: one row for each cursor, with its part. Part rows: ev_id, ev_txid, ev_time, ev_op (I, U, D; ! for a row
-- written after an ALTER that capture had not followed), tbl, ev_origin, the old columns, then the new ones, in the
-- order of layout: name, type, key, logged, old and new of each column, and unchanged for those that an update may
-- lack; if there is one, ev_unchanged comes last, see images_sql(). Parts events and retries, with layout NULL: ev_id,
-- ev_txid, ev_time, op, tbl, key, old, new (all as get_events() has them), message (new of a message, as text), origin,
-- retries, types (by column). All in the order of ev_id and op.
-- Writes: cursors of the transaction. Errors: as get_events(); 22023 for other images.
create or replace function gdq.open_events(batch_id bigint, token uuid, cursors text, images text default 'both',
                                           columns text[] default null)
  returns table (cursor_name text, part text, layout jsonb)
language plpgsql volatile rows 10 security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set max_parallel_workers_per_gather = 0
as $$
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
  opened refcursor;
  number integer := 0;
  p record;
begin
  if images is null or images not in ('both', 'new', 'none') then
    raise exception 'images must be both, new or none, not %', coalesce(images, 'NULL')
      using errcode = 'invalid_parameter_value';
  end if;
  perform gdq.require_read_committed('open_events');
  for p in select * from gdq.event_parts(b, token, images, columns) loop
    opened := cursors || '_' || number;
    open opened no scroll for execute p.query;
    number := number + 1;
    cursor_name := opened;
    part := p.part;
    layout := p.layout;
    return next;
  end loop;
  -- as in get_batch()
  perform gdq.require_held(b, token);
end
$$;
comment on function gdq.open_events(bigint, uuid, text, text, text[]) is
  'Opens cursors over all events of an open batch, with columns in their own types.';

-- event_parts(b, token, images, columns): the SELECTs of open_events(); one without rows if there is no other. Writes:
-- nothing. Errors: GDQ01.
create or replace function gdq.event_parts(b gdq.batch, token uuid, images text, columns text[])
  returns table (part text, layout jsonb, query text)
language plpgsql volatile rows 10 security definer set search_path = pg_catalog, pg_temp
as $$
declare
  subscription integer := b.subscription_id;
  v record;
  control text;
  any_rows boolean := false;
  -- up to this number of events readers give the rows
  read_max constant bigint := 1000;
begin
  if exists (select from gdq.retry_delivery d where d.batch_id = b.batch_id) then
    return query select 'retries', null::jsonb, gdq.retries_sql(b.batch_id, token);
  end if;
  -- readers give whole images; where there are many rows, a SELECT that is planned for them is worth its time
  if images = 'both' and columns is null and gdq.events_by_number(b) <= read_max then
    return query select 'events', null::jsonb,
      format('select * from gdq.few_events(gdq.open_batch(%L, %2$L), %2$L)', b.batch_id, token);
    return;
  end if;
  for v in select tv.version_id, gdq.snapshot_max(b.snapshot_from, c.snapshot) as start
             from gdq.changed_tables(subscription, b.snapshot_from, b.snapshot_to) t
             join gdq.table_version tv using (table_id)
             left join gdq.copied_tables(subscription) c on c.relid = t.relid
            where images <> 'none' loop
    part := null;
    select * from gdq.version_part(subscription, v.version_id, v.start, b.snapshot_to, images, columns)
      into part, layout, query;
    if part is not null then
      any_rows := true;
      return next;
    end if;
  end loop;
  control := gdq.control_events_sql(subscription, b.snapshot_from, b.snapshot_to);
  if control is not null or not any_rows then
    return query select 'events', null::jsonb,
      gdq.listed_events_sql(gdq.with_types(null, gdq.skip_origin_sql(subscription, 'origin',
                                                                     coalesce(control, gdq.no_events_sql()))));
  end if;
end
$$;
comment on function gdq.event_parts(gdq.batch, uuid, text, text[]) is
  'The SELECTs of a batch''s events, with columns in their own types.';

-- version_part(subscription_id, version_id, s0, s1, images, columns): the part of open_events() that has the rows of
-- one version; part NULL for none. A SELECT has at most 1,664 columns: beyond them the rows come as events. Writes:
-- nothing. Errors: GDQ01.
create or replace function gdq.version_part(subscription_id integer, version_id bigint, s0 pg_snapshot, s1 pg_snapshot,
  images text, columns text[], out part text, out layout jsonb, out query text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.table_version;
  rows_sql text;
  listed text;
  places bigint;
begin
  select string_agg(gdq.images_sql(s, s0, s1), ' union all ') into rows_sql from gdq.version_segments(version_id) s;
  if rows_sql is null then
    return;
  end if;
  select * into strict v from gdq.table_version tv where tv.version_id = version_part.version_id;
  rows_sql := gdq.whole_rows_sql(v, rows_sql);
  with chosen as (
    select row_number() over (order by octet_length(c.name), c.name collate "C") as place,  -- the order of jsonb
           c.name, c.log_type as type, c.suffix, coalesce(c.key, false) as key,
           c.log_old is not null and coalesce(c.name = any (version_part.columns), true) as logged,
           gdq.omits(v) and coalesce(c.omit, false) as unchanged
      from jsonb_to_recordset(v.columns) c(name text, log_type text, suffix text, key boolean, log_old text,
                                           omit boolean)
  ), sided as (
    select *, key or (logged and images = 'both') as old, key or logged as new from chosen where key or logged
  ), halves as (
    select format(', ' || gdq.typed_value(type), half || '_' || suffix) as value, half, place
      from sided, unnest('{old,new}'::text[]) half where case half when 'old' then old else new end
  )
  select (select jsonb_agg(to_jsonb(s) - 'place' - 'suffix' - case when s.unchanged then '' else 'unchanged' end
                           order by place) from sided s),
         concat(string_agg(value, '' order by half desc, place),
                (select ', ev_unchanged' from sided s where s.unchanged limit 1)),
         count(*)
    into layout, listed, places from halves;
  if places > 1600 then
    part := 'events';
    query := format('select * from gdq.rendered_events(%L)', gdq.listed_events_sql(gdq.with_types(v,
      gdq.skip_origin_sql(subscription_id, 'origin', gdq.version_events_sql(version_id, s0, s1)))));
    layout := null;
    return;
  end if;
  part := 'rows';
  layout := coalesce(layout, '[]');
  query := format('select ev_id, ev_txid, ev_time, ev_op, %s as tbl, ev_origin%s from (%s) r order by ev_id, ev_op',
    gdq.name_sql(v.table_id, s1), listed, gdq.skip_origin_sql(subscription_id, 'ev_origin', rows_sql));
end
$$;
comment on function gdq.version_part(integer, bigint, pg_snapshot, pg_snapshot, text, text[]) is
  'The SELECT of one version''s log rows in a batch, with columns in their own types.';

-- typed_value(log_type): a template of the SQL expression that reads a log column for open_events(); %1$I stands for
-- the column. Types that psycopg reads exactly stay as they are, all others become the text that get_events() gives.
-- Writes: nothing.
create or replace function gdq.typed_value(log_type text) returns text
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return case
    when log_type in ('boolean', 'smallint', 'integer', 'bigint', 'oid', 'real', 'double precision', 'numeric', 'text',
                      'character varying', 'character', 'bpchar', 'name', 'bytea', 'uuid', 'date',
                      'timestamp without time zone', 'timestamp with time zone', 'time without time zone',
                      'time with time zone') then '%1$I'
    when replace(log_type, '[]', '') in
           ('boolean', 'smallint', 'integer', 'bigint', 'oid', 'numeric', 'text', 'character varying', 'character',
            'bpchar', 'name', '"char"', 'uuid', 'json', 'jsonb', 'inet', 'cidr', 'macaddr', 'xml', 'bit', 'bit varying',
            'int4range', 'int8range', 'numrange', 'tsvector', 'tsquery', 'pg_lsn') then gdq.json_value(log_type)
    else 'gdq.pinned_text(%1$I)' end;  -- the text follows settings, and a cursor is read under those of its reader
end
$$;
comment on function gdq.typed_value(text) is
  'Template of the SQL expression that reads a log column of a type for a cursor.';

-- pinned_text(value): the text of a value as get_events() renders it, whatever the settings of the session. Writes:
-- nothing.
create or replace function gdq.pinned_text(value anyelement) returns text
language plpgsql stable strict security definer
  set search_path = pg_catalog, pg_temp
  set datestyle = 'ISO, YMD' set intervalstyle = postgres set timezone = 'UTC' set extra_float_digits = 1
  set bytea_output = hex set lc_monetary = 'C' set quote_all_identifiers = off
as $$
begin
  return format('%s', value);
end
$$;
comment on function gdq.pinned_text(anyelement) is
  'The text of a value, whatever the settings of the session.';
