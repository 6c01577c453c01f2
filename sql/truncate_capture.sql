-- truncate_body(queue_id, relid, origin): body of the TRUNCATE trigger function of a captured table and its partitions.
-- origin: whether the event says where the change comes from, see capture_body().
-- One event per statement and captured root: TRUNCATE of a root also fires the triggers of its partitions. All BEFORE
-- triggers of a statement run before all its AFTER triggers, so the relations met since the last AFTER are this
-- statement's; they are kept in a transaction-local setting, which savepoints roll back too. A partition that was
-- detached still has the triggers: it is no event of the root any more. Writes: nothing.
create or replace function gdq.truncate_body(queue_id integer, relid oid, origin boolean) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format($f$declare
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
  if TG_RELID operator(pg_catalog.<>) %2$s::pg_catalog.oid
     and not exists (select from pg_catalog.pg_partition_ancestors(TG_RELID) a where a.relid::pg_catalog.oid operator(pg_catalog.=) %2$s::pg_catalog.oid) then
    return null;
  elsif exists (select from pg_catalog.pg_partition_ancestors(TG_RELID) a
              where a.relid operator(pg_catalog.<>) TG_RELID
                and pg_catalog.strpos(met, pg_catalog.concat(',', a.relid::pg_catalog.oid, ',')) operator(pg_catalog.>) 0) then
    return null;
  end if;
  perform gdq_log.q%1$s_event('truncate', %2$s::pg_catalog.oid, %3$s);
  return null;
end$f$, queue_id, relid,
    case when origin then format($f$pg_catalog.jsonb_strip_nulls(pg_catalog.jsonb_build_object('origin', %2$s, 'partition',
    case when TG_RELID operator(pg_catalog.<>) %1$s::pg_catalog.oid then pg_catalog.format('%%I.%%I', TG_TABLE_SCHEMA, TG_TABLE_NAME) end))$f$, relid, gdq.origin_sql())
    else format($f$case when TG_RELID operator(pg_catalog.<>) %1$s::pg_catalog.oid
    then pg_catalog.jsonb_build_object('partition', pg_catalog.format('%%I.%%I', TG_TABLE_SCHEMA, TG_TABLE_NAME)) end$f$, relid) end)
$$;
comment on function gdq.truncate_body(integer, oid, boolean) is 'Body of the TRUNCATE trigger function of a captured table.';

-- create_truncate_triggers(queue_id, root, rel, always): TRUNCATE triggers of one captured root on rel and the partitions
-- under it. PostgreSQL clones row triggers to partitions, but not these. Writes: triggers. Errors: 42501, 55P03.
create or replace function gdq.create_truncate_triggers(queue_id integer, root oid, rel oid, always boolean) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
begin
  -- from the top: the DDL guard looks on, and finds the partitions below by itself
  for r in select rel as relid, exists (select from pg_class c where c.oid = root and c.relkind = 'p') as partitioned, 0 as level
           union all select p.relid, true, p.level from pg_partition_tree(rel) p where p.level > 0 order by level loop
    perform gdq.create_trigger(format('!gdq_%s_%s_t', root, queue_id), 'after truncate', r.relid, 'for each statement', gdq.capture_name(queue_id, root, 't'), always);
    if r.partitioned then
      perform gdq.create_trigger(format('!gdq_%s_%s_b', root, queue_id), 'before truncate', r.relid, 'for each statement', gdq.capture_name(queue_id, root, 't'), always);
    end if;
  end loop;
end
$$;
comment on function gdq.create_truncate_triggers(integer, oid, oid, boolean) is 'Puts the TRUNCATE triggers of a captured root on a table and its partitions.';
