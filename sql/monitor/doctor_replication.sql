-- doctor_replication(queue_id, patience): the findings of doctor() about logical replication, from one function for
-- each code. Writes: nothing.
create or replace function gdq.doctor_replication(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return query select * from gdq.find_replica_role();
  return query select * from gdq.find_subscription_target(doctor_replication.queue_id);
  return query select * from gdq.find_publication_ships_logs();
  return query select * from gdq.find_slot_unread(doctor_replication.queue_id);
end
$$;
comment on function gdq.doctor_replication(integer, interval) is 'Findings of doctor() about logical replication.';

-- find_replica_role(): the findings replica_role of doctor(): roles and databases whose sessions run as a replica, so
-- that ordinary triggers do not fire. Writes: nothing.
create or replace function gdq.find_replica_role()
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select 'warning', 'replica_role', whose,
         format('%s runs with session_replication_role = replica: its changes are not captured', whose),
         'Take the setting away: ALTER ROLE or ALTER DATABASE ... RESET session_replication_role.', false
    from pg_db_role_setting s
    left join pg_database d on d.oid = s.setdatabase
    left join pg_roles r on r.oid = s.setrole
   cross join lateral concat_ws(' in ', 'role ' || r.rolname, 'database ' || d.datname) whose
   where 'session_replication_role=replica' = any (s.setconfig)
     and (s.setdatabase = 0 or d.datname = current_database())
$$;
comment on function gdq.find_replica_role() is 'Findings of doctor(): sessions that run as a replica.';

-- find_subscription_target(queue_id): the findings subscription_target of doctor(): captured tables that a logical
-- subscription fills, so that their capture triggers do not fire. Writes: nothing.
create or replace function gdq.find_subscription_target(queue_id integer)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select 'error', 'subscription_target', gdq.table_name(sr.srrelid),
         format('%s is filled by a logical subscription, for which its capture triggers do not fire',
                gdq.table_name(sr.srrelid)),
         'Capture the table at its publisher, or have its triggers fire ALWAYS.', false
    from pg_subscription_rel sr
   where exists (select from pg_trigger tg join pg_proc p on p.oid = tg.tgfoid
                  where tg.tgrelid = sr.srrelid
                    and p.pronamespace = 'gdq_log'::regnamespace
                    and tg.tgenabled <> 'A'
                    and (find_subscription_target.queue_id is null
                         or tg.tgname ~ format(E'^!gdq_\\d+_%s_', find_subscription_target.queue_id)))
$$;
comment on function gdq.find_subscription_target(integer) is
  'Findings of doctor(): captured tables that a subscription fills.';

-- find_publication_ships_logs(): the findings publication_ships_logs of doctor(): publications that send tables of gdq
-- to their subscribers. Writes: nothing.
create or replace function gdq.find_publication_ships_logs()
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select 'warning', 'publication_ships_logs', p.pubname::text,
         format('publication %I %s: every change goes through replication twice', p.pubname,
                case when p.puballtables then 'is FOR ALL TABLES and ships the logs of gdq'
                     else 'lists tables of gdq' end),
         'Publish the tables or schemas that are wanted, without gdq and gdq_log.', false
    from pg_publication p
   where p.puballtables
      or exists (select from pg_publication_namespace n
                  where n.pnpubid = p.oid and n.pnnspid in ('gdq'::regnamespace, 'gdq_log'::regnamespace))
      or exists (select from pg_publication_rel r join pg_class c on c.oid = r.prrelid
                  where r.prpubid = p.oid and c.relnamespace in ('gdq'::regnamespace, 'gdq_log'::regnamespace))
$$;
comment on function gdq.find_publication_ships_logs() is 'Findings of doctor(): publications that ship logs of gdq.';

-- find_slot_unread(queue_id): the findings slot_unread of doctor(): replication slots of gdq that no view or consumer
-- reads. They are notes, not warnings, where the owner of gdq may not read the positions of slots. Writes: nothing.
create or replace function gdq.find_slot_unread(queue_id integer)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  positions record;
  sure boolean;
  wal_end pg_lsn := case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end;
  readers text[] := '{}';
begin
  -- anybody could have made the schema: only a plain table is read, which runs no code
  select c.oid,
         has_schema_privilege(n.oid, 'usage') and has_table_privilege(c.oid, 'select')
           and c.relkind = 'r' and not c.relrowsecurity
           and exists (select from pg_attribute a where a.attrelid = c.oid and a.attname = 'slot_name'
                          and a.atttypid = 'text'::regtype and a.attgenerated = '') as readable
    into positions
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
   where n.nspname = 'gdq_target' and c.relname = 'slot_position';
  sure := positions.oid is null or positions.readable;
  if positions.readable then
    execute 'select array(select slot_name from gdq_target.slot_position)' into readers;
  end if;
  return query
  select case when sure then 'warning' else 'note' end, 'slot_unread', s.slot_name::text,
         format('%s reads slot %s, which keeps %s of the write-ahead log',
                case when sure then 'no view or consumer'
                     else format('no view, and maybe no consumer (%I may not read gdq_target.slot_position),',
                                 current_user) end,
                s.slot_name, coalesce(pg_size_pretty(pg_wal_lsn_diff(wal_end, s.restart_lsn)), 'none')),
         case when q.queue_id is null then format('select pg_drop_replication_slot(%L)', s.slot_name)
              else format('gdq drop-slot %s %s', q.queue_name, substr(s.slot_name, length(q.queue_name) + 6)) end,
         false
    from pg_replication_slots s
    left join lateral (select q.* from gdq.queue q
                        where starts_with(s.slot_name, format('gdq_%s_', q.queue_name))
                        order by length(q.queue_name) desc limit 1) q on true
   where s.plugin = 'pgoutput'
     and s.database = current_database()
     and not s.active
     and starts_with(s.slot_name, 'gdq_')
     and s.slot_name::text <> all (readers)
     and not exists (select from gdq.view v join gdq.queue vq using (queue_id)
                      where s.slot_name = format('gdq_%s_%s', vq.queue_name, v.view_name))
     and (find_slot_unread.queue_id is null or q.queue_id = find_slot_unread.queue_id);
end
$$;
comment on function gdq.find_slot_unread(integer) is 'Findings of doctor(): slots of gdq that nobody reads.';
