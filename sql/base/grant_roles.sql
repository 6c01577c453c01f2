-- grant_roles(): makes the roles gdq_admin, gdq_consumer and gdq_reader, if the caller may, and gives them their rights
-- in this database. An install calls it; call it again when the roles were made later. gdq_admin may read the logs,
-- since typed reads and refreshes do. Runs with the caller's rights. Writes: roles of the cluster, ACLs. Errors: 42501
-- unless the caller owns gdq.
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
          using hint = 'Have it made by a role with CREATEROLE, then: select gdq.grant_roles(). '
                       'Or grant EXECUTE on functions to roles of your own.';
        continue;
      when duplicate_object or unique_violation then
        null;  -- another database of this cluster installs at the same moment
    end;
    execute format('revoke execute on all routines in schema gdq from %I', role);
    for f in select gdq.granted(role) loop
      execute format('grant execute on routine %s to %I', f, role);
    end loop;
    execute format('grant usage on schema gdq to %I', role);
    if role = 'gdq_admin' then
      -- every change of the schema's ACL takes this lock; the lock on each log keeps truncation, which changes the
      -- log's row in pg_class, from colliding with GRANT
      perform pg_advisory_xact_lock(gdq.lock_key('capture', 0));
      grant usage on schema gdq_log to gdq_admin;
      grant select on gdq.pin to gdq_admin;  -- a refresh locks it with the logs
      alter default privileges in schema gdq_log grant select on tables to gdq_admin;
      for log in select c.oid from pg_class c
                  where c.relnamespace = 'gdq_log'::regnamespace and c.relkind = 'r'
                    and not has_table_privilege('gdq_admin', c.oid, 'select') loop
        execute format('lock table only %s in access share mode', log);
        execute format('grant select on %s to gdq_admin', log);
      end loop;
    end if;
  end loop;
end
$$;
comment on function gdq.grant_roles() is 'Makes the roles of gdq and gives them their rights in this database.';

-- granted(role): the functions of gdq that a role may execute; all others are for the owner of gdq alone. An
-- administrator may execute only public functions: with the private ones that write capture functions it could become
-- the owner. Writes: nothing.
create or replace function gdq.granted(role name) returns setof regprocedure
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select p.oid
    from pg_proc p,
         (values
           -- information about queues, without their data
           ('{gdq_reader,gdq_consumer,gdq_admin}'::name[],
            '{queue_info,table_info,new_table_info,sequence_info,consumer_info,member_info,
              view_info,view_history,group_info,
              doctor,event_triggers_on}'::text[]),
           -- consumers: check_consumer_role() allows a role its own
           ('{gdq_consumer,gdq_admin}',
            '{register_consumer,unregister_consumer,consumer_tables,register_member,unregister_member,
              next_batch,next_events,touch_batch,get_batch,get_events,open_events,finish_batch,take_messages,
              batch_tables,batch_versions,batch_rows,batch_gaps,batch_sequences,table_columns,user_definitions,
              retry_event,put_aside,get_retries,retry_info,next_retry,waiting_events,set_retry_limit,
              dead_letter,dead_letters,replay_dead_letters,purge_dead_letters,
              position,tick_position,tick_nonce,check_position,
              force_tick,tick_step,ticker,check_tables,check_logs,maintain}'),
           ('{gdq_consumer,gdq_admin}',
            '{seek,resynced,require_copy,copy_sql,check_captured,set_tables,set_pace,pause,resume}'),
           -- administration of queues, typed reads of their logs, refreshes
           ('{gdq_admin}',
            '{create_queue,set_queue,drop_queue,rebase,set_consumer_role,
              add_table,alter_table_options,differing_options,remove_table,find_tables,require_locks,
              add_new_tables,remove_new_tables,add_sequence,remove_sequence,
              suspend_table,rearm,off_reason,stray_triggers,renamed_triggers,
              apply_ddl,begin_ddl,end_ddl,insert_event,insert_events,
              batch_sql,delta_sql,delta_events,stream_end,log_segments,summarise_logs,
              row_fits,row_is_whole,row_has_all,segment_is,table_name,
              create_view,drop_view,set_view_owner,set_view_audit,note_audit,lock_view,view_changed,view_stamp,
              check_group,create_group,alter_group,drop_group,
              begin_refresh,refresh_unchanged,later_rows_sql,look_body,is_compiled,compile_view,
              refresh,refresh_group,compiled_views,refresh_compiled,
              target_position,refuse_foreign,target_locks,hold_target,why_load,
              begin_compiled_refresh,begin_compiled_load,finish_compiled_refresh,
              add_tick,set_position,start_view_run,finish_view_run}')) g(roles, names)
   where p.pronamespace = 'gdq'::regnamespace and role = any (g.roles) and p.proname = any (g.names)
$$;
comment on function gdq.granted(name) is 'The functions of gdq that one of its roles may execute.';
