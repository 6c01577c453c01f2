-- Events as JSON with the types of their columns: the parts `events` and `retries` of open_events(). A cursor is read
-- under the settings of its reader, and a value's text follows settings: so functions that pin these render it.

-- few_events(b, token): the events of an open batch of few rows, by readers, as listed_events_sql() has them. Writes:
-- nothing. Errors: as get_events().
create or replace function gdq.few_events(b gdq.batch, token uuid)
  returns table (ev_id bigint, ev_txid bigint, ev_time timestamptz, op text, tbl text, key jsonb, old jsonb, new jsonb,
                 message text, origin text, retries integer, types jsonb)
  language plpgsql volatile rows 1000 security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set max_parallel_workers_per_gather = 0
  set datestyle = 'ISO, YMD' set intervalstyle = postgres set timezone = 'UTC' set extra_float_digits = 1
  set bytea_output = hex set lc_monetary = 'C' set quote_all_identifiers = off set xmlbinary = base64
as $$
#variable_conflict use_column
declare
  events text;
begin
  begin
    events := gdq.usual_events_sql(b, true);
    if events is null then
      events := gdq.subscription_events_sql(b.subscription_id, b.snapshot_from, b.snapshot_to, true, true);
    end if;
    return query execute gdq.listed_events_sql(events);
    -- after the readers have locked their segments: while the batch is open these cannot have been truncated
    perform gdq.require_held(b, token);
    return;
  exception when undefined_function or undefined_table then
    null;  -- a reader was dropped meanwhile, with an empty log or by an install
  end;
  events := gdq.subscription_events_sql(b.subscription_id, b.snapshot_from, b.snapshot_to, false, true);
  -- as in get_batch()
  perform gdq.require_held(b, token);
  return query execute gdq.listed_events_sql(events);
end
$$;
comment on function gdq.few_events(gdq.batch, uuid) is 'The events of a batch of few rows, by readers.';

-- rendered_events(query): what a SELECT of listed_events_sql() gives. Writes: nothing.
create or replace function gdq.rendered_events(query text)
  returns table (ev_id bigint, ev_txid bigint, ev_time timestamptz, op text, tbl text, key jsonb, old jsonb, new jsonb,
                 message text, origin text, retries integer, types jsonb)
  language plpgsql volatile rows 1000 security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set max_parallel_workers_per_gather = 0
  set datestyle = 'ISO, YMD' set intervalstyle = postgres set timezone = 'UTC' set extra_float_digits = 1
  set bytea_output = hex set lc_monetary = 'C' set quote_all_identifiers = off set xmlbinary = base64
as $$
begin
  return query execute query;
end
$$;
comment on function gdq.rendered_events(text) is 'The rows of a SELECT of events, rendered whatever the settings.';

-- listed_events_sql(events): a SELECT of events with their types, in order, with the columns of the parts events and
-- retries of open_events(). Writes: nothing.
create or replace function gdq.listed_events_sql(events text) returns text
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return format($sql$
    select ev_id, ev_txid, ev_time, op, tbl, key, old, case when op <> 'message' then new end as new,
           case when op = 'message' then new::text end as message, origin, 0 as retries, types
      from (%s) e
     order by ev_id, op $sql$, events);
end
$$;
comment on function gdq.listed_events_sql(text) is 'SELECT of events in order, for a cursor.';

-- with_types(v, events): the SELECT events of a version with its column_types(); of no version: with NULL. NULL for no
-- SELECT. Writes: nothing.
create or replace function gdq.with_types(v gdq.table_version, events text) returns text
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (select format('select *, %L::jsonb as types from (%s) e',
                        jsonb_object_agg(c->>'name', c->>'log_type'), events)
            from jsonb_array_elements(v.columns) c
          having events is not null);
end
$$;
comment on function gdq.with_types(gdq.table_version, text) is
  'A SELECT of a version''s events with the columns'' types.';

-- retries_sql(batch_id, token): as listed_events_sql(), of get_retries(). A column has the type that its table has
-- now. Writes: nothing.
create or replace function gdq.retries_sql(batch_id bigint, token uuid) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format($sql$
    select ev_id, ev_txid, ev_time, op, tbl, key, old, case when op <> 'message' then new end as new,
           case when op = 'message' then new::text end as message, origin, retries,
           case when op in ('insert', 'update', 'delete') then gdq.column_types(tbl) end as types
      from gdq.get_retries(%L, %L) $sql$, batch_id, token)
$$;
comment on function gdq.retries_sql(bigint, uuid) is 'SELECT of the events that a batch brings again, for a cursor.';

-- column_types(tbl): the types in the log of the columns of a captured table, by name; NULL for a table that is not
-- captured any more. Writes: nothing.
create or replace function gdq.column_types(tbl text) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (select jsonb_object_agg(c->>'name', c->>'log_type')
            from gdq.captured_table ct
            join gdq.table_version v using (table_id), jsonb_array_elements(v.columns) c
           where ct.table_name = tbl and v.version_id = gdq.current_version(ct.table_id));
end
$$;
comment on function gdq.column_types(text) is 'The types of the columns of a captured table, by name.';
