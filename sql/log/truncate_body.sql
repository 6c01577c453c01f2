-- truncate_body(queue_id, relid, origin): the body of the TRUNCATE trigger function of a captured table and its
-- partitions, see create_truncate(). It is short because PL/pgSQL compiles it anew for each partition. origin: whether
-- the event contains the origin of the change, see origin_sql(). Writes: nothing.
create or replace function gdq.truncate_body(queue_id integer, relid oid, origin boolean) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format($sql$begin
  perform gdq_log.q%1$s_truncate(%2$s::pg_catalog.oid, TG_WHEN, TG_RELID, TG_TABLE_SCHEMA, TG_TABLE_NAME, %3$s);
  return null;
end$sql$,
    queue_id, relid, case when origin then gdq.origin_sql() else 'null' end)
$$;
comment on function gdq.truncate_body(integer, oid, boolean) is
  'Body of the TRUNCATE trigger function of a captured table.';

-- create_truncate(queue_id): makes the function that TRUNCATE triggers call, gdq_log.q<queue>_truncate(root, moment,
-- rel, schema, name, origin). It writes one event for each TRUNCATE statement and captured root; in its data are the
-- partition when the statement named one, and the origin.
--   TRUNCATE of a partitioned table also fires the triggers of its partitions, and all BEFORE triggers of a statement
--   run before all its AFTER triggers. So BEFORE TRUNCATE of a partitioned table notes that the partitions below it are
--   covered (1). AFTER TRUNCATE of a partition takes its note (0), or writes an event where it has none (below 0).
--   Every note is taken within its statement. A detached partition keeps the triggers and makes no event.
--   The notes are rows of gdq_log.q<queue>_truncation, which only the function's owner can write, and savepoints roll
--   back. Only ON CONFLICT reads them, as a SELECT could make SERIALIZABLE transactions fail.
-- Writes: the function, the table, their ACLs.
create or replace function gdq.create_truncate(queue_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  signature text := format('gdq_log.q%s_truncate(oid, text, oid, name, name, text)', queue_id);
begin
  if to_regclass(format('gdq_log.q%s_truncation', queue_id)) is null then
    execute format($sql$
      create unlogged table gdq_log.q%s_truncation (txid bigint, relid oid, covered integer, primary key (txid, relid))
      $sql$, queue_id);
    if gdq.capture_owner() <> current_user then
      execute format('grant select, insert, update on gdq_log.q%s_truncation to gdq_capture', queue_id);
    end if;
  end if;
  execute format($sql$
      create or replace function
        gdq_log.q%1$s_truncate(root oid, moment text, rel oid, schema name, name name, origin text) returns void
      language plpgsql security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
      as %2$L $sql$,
    queue_id,
    format($body$declare
  covered_by_parent integer;
begin
  if rel <> root and not exists (select from pg_partition_ancestors(rel) a where a.relid = root) then
    return;
  elsif moment = 'BEFORE' then
    insert into gdq_log.q%1$s_truncation (txid, relid, covered)
    select txid_current(), p.relid, 1 from pg_partition_tree(rel) p where p.level > 0
        on conflict (txid, relid) do update set covered = 1;
    return;
  end if;
  insert into gdq_log.q%1$s_truncation as note (txid, relid, covered)
  values (txid_current(), rel, -1)
      on conflict (txid, relid) do update set covered = note.covered - 1
    returning note.covered into covered_by_parent;
  if covered_by_parent <> 0 then
    perform gdq_log.q%1$s_event('truncate', root, nullif(jsonb_strip_nulls(jsonb_build_object(
      'origin', origin, 'partition', case when rel <> root then format('%%I.%%I', schema, name) end)), '{}'));
  end if;
end$body$, queue_id));
  if not exists (select from pg_proc p
                  where p.oid = signature::regprocedure and pg_get_userbyid(p.proowner) = gdq.capture_owner()
                    and p.proacl is not null) then
    perform gdq.own_capture(signature::regprocedure, gdq.capture_owner());
  end if;
end
$$;
comment on function gdq.create_truncate(integer) is
  'Makes the function of a queue that writes one event for each TRUNCATE statement and partitioned root.';
