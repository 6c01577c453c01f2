-- The SELECTs behind get_batch() and get_events(): all events that a subscription takes, and those of the event log.
-- Those of change logs are in version_sql.sql and readers.sql.

-- subscription_events_sql(subscription_id, s0, s1, read, typed): SELECT of all events that a subscription takes in
-- (s0, s1], unsorted; a SELECT without rows when there are none. Changes of an origin that the subscription skips are
-- left out.
--   read: whether readers give the rows of the versions that have one: see reader_sql().
--   typed: true: with the column types, as with_types() adds it.
-- Writes: nothing. Errors: GDQ01.
create or replace function gdq.subscription_events_sql(subscription_id integer, s0 pg_snapshot, s1 pg_snapshot,
  read boolean default false, typed boolean default false) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  -- PL/pgSQL keeps the plan, which before PostgreSQL 18 takes longer to make than the query runs
  return (
    select gdq.skip_origin_sql(subscription_id, 'origin', coalesce(
             string_agg(case when typed then gdq.with_types(version, part) else part end, ' union all '),
             case when typed then gdq.with_types(null, gdq.no_events_sql()) else gdq.no_events_sql() end))
      from (select v as version,
                   case when read and gdq.has_reader(v)
                          then gdq.reader_sql(v, gdq.snapshot_max(s0, c.snapshot), s1)
                        else gdq.version_events_sql(v.version_id, gdq.snapshot_max(s0, c.snapshot), s1) end as part
              from gdq.changed_tables(subscription_id, s0, s1) t
              join gdq.table_version v using (table_id)
              left join gdq.copied_tables(subscription_id) c on c.relid = t.relid
             union all
            select null, gdq.control_events_sql(subscription_id, s0, s1)) parts);
end
$$;
comment on function gdq.subscription_events_sql(integer, pg_snapshot, pg_snapshot, boolean, boolean) is
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

-- no_events_sql(): a SELECT with the columns of get_batch() and without rows. Writes: nothing.
create or replace function gdq.no_events_sql() returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select $sql$
    select null::bigint as ev_id,
           null::bigint as ev_txid,
           null::timestamptz as ev_time,
           null::text as op,
           null::text as tbl,
           null::jsonb as key,
           null::jsonb as old,
           null::jsonb as new,
           null::text as origin
     where false $sql$::text
$$;
comment on function gdq.no_events_sql() is 'A SELECT with the columns of get_batch() and without rows.';
