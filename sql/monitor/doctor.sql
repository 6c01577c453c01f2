-- doctor(queue, patience): finds faults of capture and delivery, present or coming; queue NULL: in all queues.
-- patience: problems younger than this are not reported.
-- Result: one row for each finding. severity: error (capture is or may be incomplete, writes are in danger, or nothing
-- moves), warning, or note (good to know, nothing to mend). code, object; cause and cure: a line each. fixable: gdq
-- doctor --fix mends it.
-- A check that fails, as when an object is being dropped, is a finding check_failed. No lock is waited for longer than
-- 100 ms. Writes: nothing. Errors: 42704.
create or replace function gdq.doctor(queue text default null, patience interval default '1 min')
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  wanted integer;
  part text;
  parts text[] := array['event_triggers', 'tables', 'new_tables', 'strays', 'flow', 'logs', 'writers', 'replication',
                         'views', 'server'];
begin
  -- in a restored queue the other checks would report numbers of the old cluster
  return query
    select 'error', 'restored', r.queue_name,
           format('queue "%s" was restored from a dump: its ticks, positions and logs are of another cluster',
                  r.queue_name),
           'gdq rebase', false
      from gdq.restored_queues() r;
  if found then
    parts := array['event_triggers'];
  elsif queue is not null then
    wanted := gdq.find_queue(queue);
  end if;
  foreach part in array parts loop
    begin
      return query execute format('select * from gdq.doctor_%s($1, $2)', part)
        using wanted, least(patience, interval '1000 years');
    exception when others then
      return query select 'warning', 'check_failed', part,
                          format('the check of %s failed: %s', replace(part, '_', ' '), sqlerrm), 'Run it again.',
                          false;
    end;
  end loop;
end
$$;
comment on function gdq.doctor(text, interval) is
  'Faults of capture and delivery: severity, code, object, cause, cure, and whether gdq doctor --fix mends them.';

-- doctor_event_triggers(queue_id, patience): the findings of doctor() about event triggers. Those of gdq must fire,
-- unless all tables have format json. Event triggers of the application are reported when they fire for DDL of gdq too,
-- since one that fails there keeps capture from following; or when they fire before those of gdq, since their writes
-- then meet capture functions that do not fit the altered table yet. Event triggers of extensions are left out. Writes:
-- nothing.
create or replace function gdq.doctor_event_triggers(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select 'error', 'event_triggers_off', 'event_triggers',
         'the setting event_triggers is off: capture does not follow DDL, and writes after an ALTER TABLE fail',
         'Set event_triggers = on.', false
   where current_setting('event_triggers', true) = 'off'
     and exists (select from gdq.captured_table ct where ct.format = 'typed')
  union all
  select 'error', 'event_triggers_off', coalesce(w.names, '!gdq_*'),
         'event triggers of gdq are missing, disabled or changed: capture does not follow DDL, and writes after an '
         'ALTER TABLE fail',
         'As a superuser: gdq create-event-triggers. Until then run DDL with gdq apply-ddl.',
         (select r.rolsuper from pg_roles r where r.rolname = session_user)
    from (select string_agg(n, ', ' order by n) as names
            from unnest(array['!gdq_ddl', '!gdq_drop', '!gdq_rewrite', '!gdq_capture_role']) n
           where not exists (select from pg_event_trigger e where e.evtname = n and e.evtenabled = 'A')) w
   where not gdq.event_triggers_on()
     and current_setting('event_triggers', true) is distinct from 'off'
     and exists (select from gdq.captured_table ct where ct.format = 'typed')
  union all
  select case when e.outranks then 'warning' else 'note' end, 'event_trigger_of_application', e.evtname::text,
         format('event trigger %I (%s, owner %s) fires %s', e.evtname, e.evtevent, pg_get_userbyid(e.evtowner),
                case when e.outranks then
                  'before those of gdq: its writes to the table that was just altered fail or are not captured'
                     else 'for DDL of gdq too: if it fails there, capture cannot follow' end),
         case when e.outranks then 'Give it a name that sorts after !gdq_.'
              else 'Let it return at once for objects of schema gdq_log, or give it a list of tags.' end, false
    from (select t.*,
                 t.evtevent <> 'ddl_command_start' and t.evtname < '!gdq_'
                 and (t.evttags is null
                      or exists (select from unnest(t.evttags) tag where tag ~ '^(ALTER|DROP) ')) as outranks
            from pg_event_trigger t
           where t.evtevent in ('ddl_command_start', 'ddl_command_end', 'sql_drop', 'table_rewrite')) e
   where e.evtname not in ('!gdq_ddl', '!gdq_drop', '!gdq_rewrite', '!gdq_capture_role')
     and e.evtenabled <> 'D'
     -- the tags of the commands that gdq issues while it follows DDL
     and (e.outranks
          or (e.evtevent <> 'table_rewrite'
              and (e.evttags is null
                   or e.evttags && array['CREATE TABLE', 'CREATE INDEX', 'CREATE FUNCTION', 'CREATE TRIGGER',
                                         'CREATE TYPE', 'ALTER TABLE'])))
     and not exists (select from pg_depend d
                      where d.classid = 'pg_event_trigger'::regclass and d.objid = e.oid and d.deptype = 'e')
   order by 1, 3
$$;
comment on function gdq.doctor_event_triggers(integer, interval) is 'Findings of doctor() about event triggers.';

-- doctor_server(queue_id, patience): the findings of doctor() about the server: sequences near their end, and too many
-- dead or unfrozen rows in gdq's tables. Writes: nothing.
create or replace function gdq.doctor_server(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  s record;
  used bigint;
  dead_max constant bigint := 10000;
  busy oid[] := gdq.busy_relations();
begin
  for s in select c.oid::regclass as name, q.seqmax
             from pg_sequence q join pg_class c on c.oid = q.seqrelid
            where c.relnamespace in ('gdq'::regnamespace, 'gdq_log'::regnamespace)
              and not q.seqcycle and c.oid <> all (busy) loop
    used := pg_sequence_last_value(s.name);
    if used > s.seqmax / 10 * 8 then
      return query
      select case when used > s.seqmax / 100 * 98 then 'error' else 'warning' end, 'sequence_near_end', s.name::text,
             format('%s has given out %s of %s numbers', s.name, used, s.seqmax),
             'Drop gdq and install it anew before they run out.', false;
    end if;
  end loop;
  return query
  select 'warning', 'dead_rows', c.oid::regclass::text,
         format('%s has %s dead rows beside %s',
                c.oid::regclass, pg_stat_get_dead_tuples(c.oid), pg_stat_get_live_tuples(c.oid)),
         case when current_setting('autovacuum') = 'off' then 'Set autovacuum = on.'
              else 'End what holds an old snapshot: see pg_stat_activity.backend_xmin, pg_prepared_xacts and '
                   'pg_replication_slots.xmin.' end, false
    from pg_class c
   where c.relnamespace in ('gdq'::regnamespace, 'gdq_log'::regnamespace) and c.relkind = 'r'
     and pg_stat_get_dead_tuples(c.oid) > greatest(dead_max, pg_stat_get_live_tuples(c.oid));
  return query
  select 'warning', 'not_frozen', c.oid::regclass::text,
         format('%s has rows %s transactions old: autovacuum should have frozen them at %s',
                c.oid::regclass, age(c.relfrozenxid), current_setting('autovacuum_freeze_max_age')),
         'VACUUM (FREEZE) it, and see why autovacuum does not.', false
    from pg_class c
   where c.relnamespace in ('gdq'::regnamespace, 'gdq_log'::regnamespace) and c.relkind = 'r'
     and age(c.relfrozenxid) > current_setting('autovacuum_freeze_max_age')::bigint * 1.2;
end
$$;
comment on function gdq.doctor_server(integer, interval) is 'Findings of doctor() about sequences and dead rows.';
