-- invoker(): the role that the session acts as: that of SET ROLE, else the login's. Not current_user, which inside the
-- functions of gdq is its owner. Code that somebody calls acts as that role too, as code always does in PostgreSQL; but
-- a VACUUM, ANALYZE, REINDEX or REFRESH runs code of a table's owner in the session of somebody else, whom that code must
-- not be taken for. PostgreSQL refuses some commands there, which is how it is told. Writes: nothing. Errors: 42501.
create or replace function gdq.invoker() returns name
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  begin
    deallocate "gdq: no statement has this name";
  exception
    when invalid_sql_statement_name then
      null;
    when insufficient_privilege then
      raise exception 'gdq cannot tell for whom this runs: maintenance of a table runs code of its owner'
        using errcode = 'insufficient_privilege', hint = 'Call gdq from a session of its own, not from an index or a materialized view.';
  end;
  return coalesce(nullif(current_setting('role'), 'none'), session_user);
end
$$;
comment on function gdq.invoker() is 'The role that the session acts as.';

-- is_administrator(role): whether a role has the rights of gdq_admin or of the owner of gdq. Writes: nothing.
create or replace function gdq.is_administrator(role name) returns boolean
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select coalesce(bool_or(pg_has_role(r.oid, a.oid, 'usage')), false)
      from pg_roles r, pg_roles a
     where r.rolname = role
       and (a.rolname = 'gdq_admin' or a.oid = (select n.nspowner from pg_namespace n where n.nspname = 'gdq')));
end
$$;
comment on function gdq.is_administrator(name) is 'Whether a role has the rights of gdq_admin or of the owner of gdq.';

-- may_use_consumer(role, subscription_id): whether a role owns the subscription, is a member of the role that does, or an
-- administrator. Writes: nothing.
create or replace function gdq.may_use_consumer(role name, subscription_id integer) returns boolean
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select s.owner_role = role or gdq.is_administrator(role)
        or exists (select from pg_roles r where r.rolname = s.owner_role and pg_has_role(role, r.oid, 'usage'))
      from gdq.subscription s where s.subscription_id = may_use_consumer.subscription_id);
end
$$;
comment on function gdq.may_use_consumer(name, integer) is 'Whether a role may use a subscription.';

-- check_consumer_role(subscription_id): error unless the session's role may use the subscription. Writes: nothing.
-- Errors: 42501.
create or replace function gdq.check_consumer_role(subscription_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  who name := gdq.invoker();
  s record;
begin
  if not gdq.may_use_consumer(who, subscription_id) then
    select ss.owner_role, c.consumer_name, q.queue_name into s
      from gdq.subscription ss join gdq.consumer c using (consumer_id) join gdq.queue q using (queue_id)
     where ss.subscription_id = check_consumer_role.subscription_id;
    raise exception 'consumer "%" of queue "%" belongs to role %', s.consumer_name, s.queue_name, s.owner_role
      using errcode = 'insufficient_privilege',
            hint = format('This session acts as %I. Have an administrator call gdq.set_consumer_role(), or act as a member of %I.', who, s.owner_role);
  end if;
end
$$;
comment on function gdq.check_consumer_role(integer) is 'Error 42501 unless the session may use a subscription.';

-- check_consumer_tables(subscription_id): error when the role that owns a subscription may not read all that it takes:
-- SELECT on the table or on all its logged columns, USAGE on its schema, and no row level security that hides rows from
-- the role. Asked for every batch: rights are revoked, and tables are added to a queue, while a consumer goes on.
-- Administrators read whatever is captured; of a dropped table nobody is asked. Writes: nothing. Errors: 42501.
create or replace function gdq.check_consumer_tables(subscription_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  reader name := (select s.owner_role from gdq.subscription s where s.subscription_id = check_consumer_tables.subscription_id);
  reader_id oid := (select r.oid from pg_roles r where r.rolname = reader);
  hidden record;
begin
  if gdq.is_administrator(reader) then
    return;
  elsif reader_id is null then
    raise exception 'role % does not exist any more', reader using errcode = 'insufficient_privilege',
      hint = 'Have an administrator give its consumer to another role: gdq.set_consumer_role().';
  end if;
  -- offset 0: the rights on these tables are asked for, not those on all that pg_class lists
  select t.table_name, c.relrowsecurity as secured into hidden
    from (select st.table_id, st.table_name, st.relid from gdq.subscribed_tables(subscription_id) st offset 0) t,
         lateral (select k.oid, k.relnamespace, k.relowner, k.relrowsecurity, k.relforcerowsecurity
                    from pg_class k where k.oid = t.relid offset 0) c
   where not has_schema_privilege(reader_id, c.relnamespace, 'usage')
      or (not has_table_privilege(reader_id, c.oid, 'select')
          and exists (select from gdq.table_version v, jsonb_to_recordset(v.columns) l(attnum smallint)
                       where v.version_id = gdq.current_version(t.table_id)
                         and has_column_privilege(reader_id, c.oid, l.attnum, 'select') is not true))
      or (c.relrowsecurity and not (select r.rolsuper or r.rolbypassrls or (r.oid = c.relowner and not c.relforcerowsecurity) from pg_roles r where r.oid = reader_id))
   limit 1;
  if hidden.table_name is not null then
    raise exception 'role % may not read table %, which its consumer takes%', reader, hidden.table_name,
      case when hidden.secured then ' and which has row level security' else '' end
      using errcode = 'insufficient_privilege',
            hint = format('Grant SELECT on it to %I, register the consumer for other tables, or have an administrator read it.', reader);
  end if;
end
$$;
comment on function gdq.check_consumer_tables(integer) is 'Error 42501 when the role that owns a subscription may not read all that it takes.';

-- own_subscription(queue, consumer): the id of a subscription that the session's role may use and whose tables its owner
-- may read. Writes: nothing. Errors: 42704, 42501.
create or replace function gdq.own_subscription(queue text, consumer text) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.find_subscription(queue, consumer);
begin
  perform gdq.check_consumer_role(id);
  perform gdq.check_consumer_tables(id);
  return id;
end
$$;
comment on function gdq.own_subscription(text, text) is 'Id of a subscription that the session may use; error 42501 for another.';

-- set_consumer_role(queue, consumer, role): gives a consumer to another role. For administrators.
-- Writes: subscription. Errors: 42704 for queue, consumer or role; 42501 when the role may not read its tables.
create or replace function gdq.set_consumer_role(queue text, consumer text, role name) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.find_subscription(queue, consumer);
begin
  if not gdq.is_administrator(gdq.invoker()) then
    raise exception 'only administrators give a consumer to another role' using errcode = 'insufficient_privilege',
      hint = 'GRANT gdq_admin TO them.';
  elsif not exists (select from pg_roles r where r.rolname = role) then
    raise exception 'role "%" does not exist', role using errcode = 'undefined_object';
  end if;
  update gdq.subscription s set owner_role = role where s.subscription_id = id;
  perform gdq.check_consumer_tables(id);
end
$$;
comment on function gdq.set_consumer_role(text, text, name) is 'Gives a consumer to another role.';

-- granted(role): the functions of gdq that a role may execute; all others are for its owner alone. An administrator has
-- no more than the public ones: with the private ones that write capture functions it could become the owner.
-- Writes: nothing.
create or replace function gdq.granted(role name) returns setof regprocedure
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select p.oid
    from pg_proc p,
         (values
           -- what there is, and no data
           ('{gdq_reader,gdq_consumer,gdq_admin}'::name[], '{queue_info,table_info,sequence_info,consumer_info,member_info,view_info,view_history,view_status,group_info,queue_status,table_status,'
              'consumer_status,doctor,event_triggers_on}'::text[]),
           -- each consumer is its role's own, see check_consumer_role()
           ('{gdq_consumer,gdq_admin}', '{register_consumer,unregister_consumer,register_member,unregister_member,next_batch,touch_batch,'
              'get_batch,get_events,batch_tables,batch_versions,batch_rows,batch_gaps,table_columns,batch_sequences,finish_batch,take_messages,retry_event,put_aside,get_retries,retry_info,next_retry,set_retry_limit,'
              'dead_letter,dead_letters,replay_dead_letters,purge_dead_letters,position,tick_position,tick_nonce,check_position,force_tick,tick_pause,ticker,check_tables,maintain,check_logs}'),
           ('{gdq_consumer,gdq_admin}', '{seek,resynced,set_tables,pause,resume}'),
           -- the whole of a queue, typed reads of its logs, refreshes
           ('{gdq_admin}', '{create_queue,set_queue,drop_queue,add_table,alter_table_options,remove_table,add_sequence,remove_sequence,insert_event,insert_events,set_consumer_role,rebase,'
              'suspend_table,off_reason,rearm,summarise_logs,stray_triggers,renamed_triggers,'
              'apply_ddl,begin_ddl,end_ddl,batch_sql,row_fits,row_is_whole,delta_sql,delta_events,log_segments,segment_is,table_name,create_view,drop_view,check_group,create_group,alter_group,drop_group,'
              'lock_view,view_changed,stream_end,begin_refresh,add_tick,set_position,start_view_run,finish_view_run}')) g(roles, names)
   where p.pronamespace = 'gdq'::regnamespace and role = any (g.roles) and p.proname = any (g.names)
$$;
comment on function gdq.granted(name) is 'The functions of gdq that one of its roles may execute.';

-- grant_roles(): makes the roles gdq_admin, gdq_consumer and gdq_reader, where the caller may, and gives them their
-- rights in this database. Install calls it; call it again when the roles were made later. The logs are readable for
-- gdq_admin, which typed reads and refreshes take. Runs with the caller's rights.
-- Writes: roles of the cluster, ACLs. Errors: 42501 unless the caller owns gdq.
create or replace function gdq.grant_roles() returns void
language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp
as $$
declare
  role name;
  f regprocedure;
  log regclass;
begin
  foreach role in array '{gdq_admin,gdq_consumer,gdq_reader}'::name[] loop
    begin
      if not exists (select from pg_roles r where r.rolname = role) then
        execute format('create role %I nologin', role);
      end if;
    exception
      when insufficient_privilege then
        raise notice 'role % was not made: % may not create roles', role, current_user
          using hint = 'Have somebody make it, then: select gdq.grant_roles(). Or grant EXECUTE on functions to roles of your own.';
        continue;
      when duplicate_object or unique_violation then
        null;  -- another database of this cluster installs at the same moment
    end;
    execute format('revoke execute on all functions in schema gdq from %I', role);
    for f in select gdq.granted(role) loop
      execute format('grant execute on function %s to %I', f, role);
    end loop;
    execute format('grant usage on schema gdq to %I', role);
    if role = 'gdq_admin' then
      -- what changes the schema's ACL takes this lock, and truncation changes the row of a log that nobody reads
      perform pg_advisory_xact_lock(gdq.lock_key('capture', 0));
      grant usage on schema gdq_log to gdq_admin;
      alter default privileges in schema gdq_log grant select on tables to gdq_admin;
      for log in select c.oid from pg_class c
                  where c.relnamespace = 'gdq_log'::regnamespace and c.relkind = 'r' and not has_table_privilege('gdq_admin', c.oid, 'select') loop
        execute format('lock table only %s in access share mode', log);
        execute format('grant select on %s to gdq_admin', log);
      end loop;
    end if;
  end loop;
end
$$;
comment on function gdq.grant_roles() is 'Makes the roles of gdq and gives them their rights in this database.';
