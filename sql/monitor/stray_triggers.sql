-- stray_triggers(queue_id): triggers that run a capture function of gdq on a table that this function does not capture;
-- own: the session may drop them. Writes: nothing.
create or replace function gdq.stray_triggers(queue_id integer) returns table (relid oid, name name, own boolean)
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  with triggers as (
    select g.tgrelid, g.tgname,
           (regexp_match(p.proname, E'^t(\\d+)_q\\d+_[iudt]$'))[1]::oid as root,
           (regexp_match(p.proname, E'^t\\d+_q(\\d+)_[iudt]$'))[1]::integer as queue_of
      from pg_trigger g join pg_proc p on p.oid = g.tgfoid
     where p.pronamespace = 'gdq_log'::regnamespace and not g.tgisinternal and g.tgparentid = 0
  ),
  -- once for each table, not for each trigger: a table may have thousands of partitions
  captured as materialized (
    select ct.queue_id, ct.relid as root, member
      from gdq.captured_table ct, unnest(gdq.partition_oids(ct.relid)) member
  )
  select g.tgrelid, g.tgname, pg_has_role(session_user, c.relowner, 'usage')
    from triggers g join pg_class c on c.oid = g.tgrelid
   where (stray_triggers.queue_id is null or g.queue_of = stray_triggers.queue_id)
     and not exists (select from captured k
                      where k.queue_id = g.queue_of and k.root = g.root and k.member = g.tgrelid)
$$;
comment on function gdq.stray_triggers(integer) is 'Triggers of gdq on tables that are not captured.';
