-- The names that a captured table has had. An event bears the name that its table had when it was written.

-- note_rename(table_id): records the name of a captured table if it has changed. Result: {"old_table": the name
-- before}; {} when it has not changed. Writes: table_rename.
create or replace function gdq.note_rename(table_id integer) returns jsonb
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  before text := gdq.last_table_name(table_id);
  after text := (select gdq.table_name(ct.relid) from gdq.captured_table ct where ct.table_id = note_rename.table_id);
begin
  if before is not distinct from after or after is null then
    return '{}';
  end if;
  insert into gdq.table_rename (table_id, table_name, ev_id, txid)
    select ct.table_id, after, nextval(format('gdq_log.q%s_ev', ct.queue_id)::regclass), txid_current()
      from gdq.captured_table ct where ct.table_id = note_rename.table_id;
  return jsonb_build_object('old_table', before);
end
$$;
comment on function gdq.note_rename(integer) is 'Records the name of a captured table if it has changed.';

-- name_sql(table_id, s1): SQL expression of the name that a captured table had when an event was written, from the
-- event's ev_id. A new name counts once the transaction that gave it is visible in s1, so that a batch that is read
-- again gives the same names. Writes: nothing.
create or replace function gdq.name_sql(table_id integer, s1 pg_snapshot) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (
    select coalesce('case ' || string_agg(format('when ev_id > %s then %L::text', r.ev_id, r.table_name), ' '
                                          order by r.rename_id desc)
                                filter (where r.rename_id is not null)
                    || format(' else %L::text end', ct.table_name), format('%L::text', ct.table_name))
      from gdq.captured_table ct
      left join gdq.table_rename r
             on r.table_id = ct.table_id and pg_visible_in_snapshot(r.txid::text::xid8, s1)
     where ct.table_id = name_sql.table_id
     group by ct.table_name);
end
$$;
comment on function gdq.name_sql(integer, pg_snapshot) is
  'SQL of the name that a captured table had when an event was written.';

-- event_name_sql(queue_id, s1): SQL expression of the name of the table that an event of the event log is about, as it
-- was when the event was written, from ev_table and ev_id; NULL for tables that are not captured any more. Writes:
-- nothing.
create or replace function gdq.event_name_sql(queue_id integer, s1 pg_snapshot) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return format($sql$coalesce(%s, (select ct.table_name from gdq.captured_table ct
                                    where ct.queue_id = %s and ct.relid = ev_table))$sql$,
    coalesce((select 'case ev_table ' || string_agg(
                       format('when %s then %s', ct.relid::oid, gdq.name_sql(ct.table_id, s1)), ' ') || ' end'
                from gdq.captured_table ct
               where ct.queue_id = event_name_sql.queue_id
                 and exists (select from gdq.table_rename r where r.table_id = ct.table_id)), 'null::text'),
    queue_id);
end
$$;
comment on function gdq.event_name_sql(integer, pg_snapshot) is
  'SQL of the name of the table that an event of the event log is about.';
