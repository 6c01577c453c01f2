-- The SELECTs behind get_batch() and get_events(), from the whole to its parts: all events that a subscription takes,
-- those of the event log, those of one version's change log, and the images of a log row as jsonb.

-- subscription_events_sql(subscription_id, s0, s1): SELECT of all events that a subscription takes in (s0, s1],
-- unsorted; a SELECT without rows when there are none. Changes of an origin that the subscription skips are left out.
-- Writes: nothing. Errors: GDQ01.
create or replace function gdq.subscription_events_sql(subscription_id integer, s0 pg_snapshot, s1 pg_snapshot)
  returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  -- PL/pgSQL keeps the plan, which before PostgreSQL 18 takes longer to make than the query runs
  return (
    select gdq.skip_origin_sql(subscription_id, 'origin', coalesce(string_agg(part, ' union all '), $sql$
             select null::bigint as ev_id,
                    null::bigint as ev_txid,
                    null::timestamptz as ev_time,
                    null::text as op,
                    null::text as tbl,
                    null::jsonb as key,
                    null::jsonb as old,
                    null::jsonb as new,
                    null::text as origin
              where false $sql$))
      from (select gdq.version_events_sql(v.version_id, gdq.snapshot_max(s0, c.snapshot), s1) as part
              from gdq.changed_tables(subscription_id, s0, s1) t
              join gdq.table_version v using (table_id)
              left join gdq.copied_tables(subscription_id) c on c.relid = t.relid
             union all
            select gdq.control_events_sql(subscription_id, s0, s1)) parts);
end
$$;
comment on function gdq.subscription_events_sql(integer, pg_snapshot, pg_snapshot) is
  'SELECT of all events that a subscription takes between two snapshots.';

-- skip_origin_sql(subscription_id, origin, rows_sql): the SELECT rows_sql without the rows whose column origin has a
-- value that the subscription skips. Writes: nothing.
create or replace function gdq.skip_origin_sql(subscription_id integer, origin text, rows_sql text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select case when s.skip_origin is null then rows_sql
                else format('select * from (%s) every where (%I = any (%L::text[])) is not true',
                            rows_sql, origin, s.skip_origin) end
      from gdq.subscription s
     where s.subscription_id = skip_origin_sql.subscription_id);
end
$$;
comment on function gdq.skip_origin_sql(integer, text, text) is
  'A SELECT of changes without those of the origins that a subscription skips.';

-- control_events_sql(subscription_id, s0, s1): queue_events_sql() of all tables that a subscription takes, or took
-- until they were removed, without events that the subscription's copies hold already; NULL for none. Writes: nothing.
-- Errors: GDQ01.
create or replace function gdq.control_events_sql(subscription_id integer, s0 pg_snapshot, s1 pg_snapshot) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  if not exists (select from gdq.subscription s, gdq.event_segments(s.queue_id) segment
                  where s.subscription_id = control_events_sql.subscription_id and gdq.holds_rows(segment))
     and not exists (select from gdq.log_loss) then
    return null;  -- the usual case: the tables need not be listed
  end if;
  return (
    select gdq.queue_events_sql(s.queue_id,
             array(select t.relid::oid from gdq.subscribed_tables(s.subscription_id) t
                    union
                   select r.relid::oid from gdq.subscription_resync r
                    where r.subscription_id = s.subscription_id and r.kind = 'removed'),
             s0, s1, gdq.takes_messages(s.subscription_id), s.subscription_id)
      from gdq.subscription s
     where s.subscription_id = control_events_sql.subscription_id);
end
$$;
comment on function gdq.control_events_sql(integer, pg_snapshot, pg_snapshot) is
  'SELECT of the truncate, ddl, resync and message events that a subscription takes.';

-- queue_events_sql(queue_id, relids, s0, s1, messages, copies_of): SELECT of the truncate, ddl and resync rows of the
-- event log in (s0, s1] that concern these tables, as events; NULL for none. The loss of unlogged logs is among them,
-- even when it was found after s1.
--   messages: true: also the messages of the queue. copies_of: a subscription, or NULL; events that its copies hold
--   already are left out.
-- Writes: nothing. Errors: GDQ01.
create or replace function gdq.queue_events_sql(queue_id integer, relids oid[], s0 pg_snapshot, s1 pg_snapshot,
  messages boolean, copies_of integer default null) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select string_agg(part, ' union all ')
      from (select format($sql$
                     select ev_id, ev_txid, ev_time,
                            ev_kind as op,
                            case when ev_kind <> 'message' then
                              coalesce(%1$s, gdq.table_name(ev_table), ev_data->>'table') end as tbl,
                            null::jsonb as key,
                            null::jsonb as old,
                            case ev_kind
                              when 'truncate' then nullif(ev_data - 'origin', '{}')
                              when 'message' then
                                jsonb_build_object('type', ev_type, 'data', ev_data)
                                || jsonb_strip_nulls(jsonb_build_object('extra1', ev_extra1, 'extra2', ev_extra2,
                                                                        'extra3', ev_extra3, 'extra4', ev_extra4))
                              when 'resync' then
                                ev_data || case when gdq.table_name(ev_table) <> %1$s then
                                             jsonb_build_object('now', gdq.table_name(ev_table)) else '{}' end
                              else ev_data end as new,
                            case ev_kind when 'truncate' then ev_data->>'origin' end as origin
                       from (%2$s) e
                      -- a row without a number is an announcement, whatever a capture role wrote as its kind
                      where ev_id is not null
                        and case ev_kind
                              when 'message' then %3$L
                              else ev_table is null or ev_table = any (%4$L::oid[]) end
                            %5$s $sql$,
                     gdq.event_name_sql(queue_id, s1), string_agg(rows_sql, ' union all '), messages, relids,
                     gdq.not_copied_sql(copies_of, s0)) as part
              from gdq.event_segments(queue_id) s, gdq.changes_sql(s, '*', s0, s1) rows_sql
             where gdq.holds_rows(s)
            having count(rows_sql) > 0
             union all
            select gdq.loss_events_sql(queue_id, relids, s1, copies_of)) parts);
end
$$;
comment on function gdq.queue_events_sql(integer, oid[], pg_snapshot, pg_snapshot, boolean, integer) is
  'SELECT of a queue''s event log between two snapshots, as events.';

-- version_events_sql(version_id, s0, s1): SELECT of one version's rows in (s0, s1] as get_batch() gives them; NULL for
-- none. Rows written after an ALTER that capture had not followed become resync events. Writes: nothing. Errors: GDQ01.
create or replace function gdq.version_events_sql(version_id bigint, s0 pg_snapshot, s1 pg_snapshot) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.table_version;
  tbl text;
  rows_sql text;
  image record;
  events text;
begin
  select string_agg(gdq.images_sql(s, s0, s1), ' union all ') into rows_sql from gdq.version_segments(version_id) s;
  if rows_sql is null then
    return null;
  end if;
  select * into strict v from gdq.table_version tv where tv.version_id = version_events_sql.version_id;
  tbl := gdq.name_sql(v.table_id, s1);
  if v.split then
    rows_sql := gdq.joined_updates_sql(v.columns, rows_sql);
    if gdq.version_mode(v.columns) = 'pk' then
      rows_sql := gdq.key_changes_sql(v.columns, rows_sql);
    end if;
  end if;
  image := gdq.json_images(v.columns);
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
comment on function gdq.version_events_sql(bigint, pg_snapshot, pg_snapshot) is
  'SELECT of one version''s log rows between two snapshots, as events.';

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
