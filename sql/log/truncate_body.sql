-- truncate_body(queue_id, relid, origin): the body of the TRUNCATE trigger function of a captured table and of its
-- partitions: one event per statement and captured root.
--   TRUNCATE of a root also fires the triggers of its partitions. All BEFORE triggers of a statement run before all its
--   AFTER triggers, so the relations met since the last AFTER are those of this statement; they are kept in a setting
--   of the transaction, which savepoints roll back too. A partition that was detached keeps the triggers and makes no
--   event.
--   origin: whether the event says where the change comes from, see origin_sql().
-- Writes: nothing.
create or replace function gdq.truncate_body(queue_id integer, relid oid, origin boolean) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format($sql$declare
  met pg_catalog.text := coalesce(pg_catalog.current_setting('gdq.truncate_%2$s_%1$s', true), '');
begin
  if TG_WHEN operator(pg_catalog.=) 'BEFORE' then
    if pg_catalog.left(met, 1) operator(pg_catalog.<>) 'b' then
      met := 'b,';
    end if;
    perform pg_catalog.set_config('gdq.truncate_%2$s_%1$s', pg_catalog.concat(met, TG_RELID, ','), true);
    return null;
  end if;
  perform pg_catalog.set_config('gdq.truncate_%2$s_%1$s', pg_catalog.concat('a', pg_catalog.substr(met, 2)), true);
  if %3$s then
    return null;
  elsif exists (select from pg_catalog.pg_partition_ancestors(TG_RELID) a
              where a.relid operator(pg_catalog.<>) TG_RELID
                and %4$s) then
    return null;
  end if;
  perform gdq_log.q%1$s_event('truncate', %2$s::pg_catalog.oid, %5$s);
  return null;
end$sql$,
    queue_id,
    relid,
    gdq.detached_sql(relid),
    $sql$pg_catalog.strpos(met, pg_catalog.concat(',', a.relid::pg_catalog.oid, ',')) operator(pg_catalog.>) 0$sql$,
    gdq.truncate_data_sql(relid, origin))
$$;
comment on function gdq.truncate_body(integer, oid, boolean) is
  'Body of the TRUNCATE trigger function of a captured table.';

-- truncate_data_sql(relid, origin): SQL expression of the data of a truncate event: the partition when the statement
-- named one, and with origin where the change comes from. Writes: nothing.
create or replace function gdq.truncate_data_sql(relid oid, origin boolean) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select case when origin then
    format($sql$pg_catalog.jsonb_strip_nulls(pg_catalog.jsonb_build_object('origin', %1$s, 'partition',
    case when TG_RELID operator(pg_catalog.<>) %2$s::pg_catalog.oid then %3$s end))$sql$,
      gdq.origin_sql(),
      relid,
      partition)
  else
    format($sql$case when TG_RELID operator(pg_catalog.<>) %1$s::pg_catalog.oid
    then pg_catalog.jsonb_build_object('partition', %2$s) end$sql$,
      relid,
      partition)
  end
    from (values ($sql$pg_catalog.format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME)$sql$)) named(partition)
$$;
comment on function gdq.truncate_data_sql(oid, boolean) is 'SQL expression of the data of a truncate event.';
