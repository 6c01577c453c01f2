-- check_owners(part): gives the capture functions of tables that have another owner than the event triggers know of to
-- the capture role of that owner, and takes the rights of earlier roles once no writer can be running the functions as
-- such a role. So it goes on where an install left off. part: checks one in 60 of the tables, by number; with 0 it also
-- drops roles that no table needs any more.
-- Result: whether it changed anything. Writes: as own_functions(), revoke_logs() and drop_capture_roles().
create or replace function gdq.check_owners(part integer) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  t record;
  changed boolean := false;
  may_create constant boolean := (select r.rolcreaterole or r.rolsuper from pg_roles r where r.rolname = current_user);
begin
  if gdq.capture_owner() <> 'gdq_capture' or not pg_try_advisory_xact_lock(gdq.lock_key('capture', 0)) then
    return false;
  end if;
  for t in select ct.table_id, ct.queue_id, ct.relid, pg_get_userbyid(p.proowner) as owner,
                  'gdq_capture_' || c.relowner as wanted
             from gdq.captured_table ct
             join pg_class c on c.oid = ct.relid
            cross join lateral (select gdq.capture_function(ct.queue_id, ct.relid, 'i') as number offset 0) f
             join pg_proc p on p.oid = f.number
            where ct.table_id % 60 = part loop
    if t.owner <> t.wanted and (may_create or t.owner <> gdq.capture_role(t.relid)) then
      changed := gdq.own_functions(t.queue_id, t.relid) or changed;
    elsif exists (select from gdq.earlier_roles(t.table_id)) and not gdq.writes_unannounced(t.table_id) then
      changed := gdq.revoke_logs(t.table_id) or changed;
    end if;
  end loop;
  if part = 0 then
    perform gdq.drop_capture_roles();
  end if;
  return changed;
exception when lock_not_available or deadlock_detected or internal_error then
  return false;
end
$$;
comment on function gdq.check_owners(integer) is
  'Gives capture functions to the roles of their tables'' owners where no event trigger has.';

-- follow_owner(queue_id, relid): gives the capture functions of a table whose owner has changed to the capture role of
-- the new owner. No other session may be writing to the table. Writes: as own_functions() and revoke_logs(). Errors:
-- when another transaction that captures a table is open.
create or replace function gdq.follow_owner(queue_id integer, relid oid) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (select from (select gdq.capture_function(queue_id, relid, 'i') as number offset 0) f
                         join pg_proc p on p.oid = f.number
              where pg_get_userbyid(p.proowner) <> gdq.capture_role(relid)) then
    if not gdq.take_short_turn() then
      raise exception 'another transaction that captures a table is open';
    end if;
    perform gdq.own_functions(queue_id, relid);
    perform gdq.revoke_logs(ct.table_id)
       from gdq.captured_table ct where ct.queue_id = follow_owner.queue_id and ct.relid = follow_owner.relid;
  end if;
end
$$;
comment on function gdq.follow_owner(integer, oid) is
  'Gives the capture functions of a table to the capture role of its new owner.';
