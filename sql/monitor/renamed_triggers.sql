-- renamed_triggers(): capture triggers whose name is not the one that gdq gives them; own: the session may drop them.
-- Writes: nothing.
create or replace function gdq.renamed_triggers() returns table (relid oid, name name, own boolean)
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select g.tgrelid, g.tgname, pg_has_role(session_user, c.relowner, 'usage')
    from gdq.captured_table ct, unnest(array['i', 'u', 'd', 't']) op, pg_trigger g join pg_class c on c.oid = g.tgrelid
   where g.tgfoid = to_regprocedure(format('gdq_log.%I()', gdq.capture_name(ct.queue_id, ct.relid, op)))
     and g.tgparentid = 0
     and g.tgname !~ format('^!gdq_%s_%s_[iudtb]$', ct.relid::oid, ct.queue_id)
$$;
comment on function gdq.renamed_triggers() is 'Capture triggers whose name is not the one that gdq gives them.';
