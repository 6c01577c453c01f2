-- table_findings(table_id): the faults in the capture of one table. A fault that may have lost changes is an error.
-- Writes: nothing. Errors: P0002 when the table is gone.
create or replace function gdq.table_findings(table_id integer)
  returns table (severity text, code text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  t gdq.captured_table;
  name text;
  state text;
  reason text;
  told boolean;
  unseen text;
  fix constant text := 'gdq doctor --fix captures it again, and records that changes may be missing.';
  instead text := '';
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = table_findings.table_id;
  state := gdq.capture_state(t.queue_id, t.relid);
  name := coalesce(gdq.table_name(t.relid), t.table_name);
  reason := (select o from gdq.open_resync(t.queue_id, t.relid, t.table_id) o);
  if not gdq.event_triggers_on() then
    instead := ' Run DDL with gdq apply-ddl: without event triggers gdq follows no other.';
  end if;
  if state in ('dropped', 'covered') then
    return;
  elsif state = 'disarmed' then
    return query
    select 'error', 'capture_off', format('capture of %s is off: %s', name, reason),
           'Mend that; gdq ticker switches it on again, or gdq doctor --fix at once.'
           || case when reason like '%no event trigger saw it' then instead else '' end, true;
    return;
  elsif reason is not null then
    return query
    select 'warning', 'resync', format('changes of %s are missing: %s', name, reason),
           'Consumers read the table afresh, and views load in full.'
           -- the latest reason may be that capture is on again
           || case when exists (select from gdq.resync r where r.queue_id = t.queue_id and r.relid = t.relid
                                                           and r.reason like '%no event trigger saw it')
                   then instead else '' end, false;
  end if;
  return query
  select 'error', 'columns_changed', format('the columns of %s are not those that its log was made for', name),
         fix || instead, true
   where not gdq.version_fits(gdq.current_version(t.table_id), gdq.describe_table(t.table_id));
  told := found;
  return query
  select 'error', 'cannot_capture', format('capture of %s cannot be complete: %s', name, f),
         'Mend that, then gdq doctor --fix.', true
    from gdq.capture_fault(t.table_id) f
   where f is not null;
  told := told or found;
  return query
  select 'error', 'capture_function', format('capture function %s of %s %s', f.name, name, f.fault),
         case when f.own then fix
              else format('As a superuser: ALTER FUNCTION gdq_log.%I() OWNER TO %I', f.name,
                          case when f.name ~ '_t$' then gdq.capture_owner() else gdq.capture_role(t.relid) end) end,
         f.own
    from gdq.function_faults(t.table_id) f;
  told := told or found;
  return query
  select f.severity, f.code, f.cause, coalesce(f.cure, fix), f.fixable from gdq.trigger_findings(t.table_id) f;
  told := told or exists (select from gdq.trigger_findings(t.table_id) f where f.severity = 'error');
  unseen := case when not told then (select min(u.what) from gdq.unwitnessed(array[t.table_id]) u) end;
  return query
  select 'error', 'trigger_touched', format('%s: it may have been off for a while', unseen), fix, true
   where unseen like 'a capture trigger%';
  return query
  select 'error', 'altered_unseen', format('%s was altered, and gdq has not seen it: %s', name, unseen),
         fix || instead, true
   where unseen not like 'a capture trigger%';
  return query
  select 'warning', 'row_security',
         format('%s has row level security and is captured without allow_rls: consumers read all its rows', name),
         'Remove it from the queue, or gdq alter-table --allow-rls when that is wanted.', false
    from pg_class c
   where c.oid = t.relid and c.relrowsecurity and not t.allow_rls;
end
$$;
comment on function gdq.table_findings(integer) is 'The faults in the capture of one table.';

-- trigger_findings(table_id): the faults of the triggers of a captured table: capture triggers that do not fire, are
-- gone, doubled or were changed; partitions without TRUNCATE triggers; triggers that fire before those of gdq. cure
-- NULL stands for gdq doctor --fix. Writes: nothing.
create or replace function gdq.trigger_findings(table_id integer)
  returns table (severity text, code text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  t gdq.captured_table;
  fault text := gdq.trigger_fault(table_id);
  pattern text;
  rels oid[];
  functions oid[];
  stamps constant boolean := current_setting('track_commit_timestamp')::boolean;
  tg record;
  told boolean := false;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = trigger_findings.table_id;
  pattern := format('^!gdq_%s_%s_[iudtb]$', t.relid::oid, t.queue_id);
  rels := gdq.partition_oids(t.relid);
  functions := array(select gdq.capture_function(t.queue_id, t.relid, op) from unnest(array['i', 'u', 'd', 't']) op);
  for tg in select g.tgname, gdq.table_name(g.tgrelid) as rel, g.tgenabled, g.xmin,
                   ' at ' || case when stamps then pg_xact_commit_timestamp(g.xmin) end as at_time,
                   g.tgname !~ pattern as renamed, pg_has_role(session_user, c.relowner, 'usage') as own
              from pg_trigger g join pg_class c on c.oid = g.tgrelid
             where g.tgrelid = any (rels) and (g.tgname ~ pattern or g.tgfoid = any (functions))
             order by g.tgrelid, g.tgname loop
    if tg.renamed then
      return query
      select 'error', 'trigger_renamed',
             format('trigger %I of %s is a capture trigger under another name: changes would come twice',
                    tg.tgname, tg.rel),
             case when not tg.own then
                    format('As the owner of the table: DROP TRIGGER %I ON %s', tg.tgname, tg.rel) end,
             tg.own;
      told := true;
    elsif tg.tgenabled not in ('A', case when t.always then 'A' else 'O' end) then
      return query
      select 'error', 'trigger_disabled',
             format('capture trigger %I of %s is %s, by transaction %s%s', tg.tgname, tg.rel,
                    case tg.tgenabled when 'R' then 'enabled for replicas only'
                                      when 'O' then 'not enabled ALWAYS'
                                      else 'disabled' end, tg.xmin, tg.at_time),
             null::text, true;
      told := true;
    end if;
  end loop;
  if fault is not null and not told then
    return query select 'error', 'trigger_missing', fault, null::text, true;
  end if;
  return query
  select 'error', 'partition_not_captured',
         format('partition %s has no TRUNCATE trigger of gdq', gdq.table_name(p)),
         case when not has_table_privilege(p, 'TRIGGER') then
                format('GRANT TRIGGER ON %s TO %I, then gdq doctor --fix.', gdq.table_name(p), current_user) end,
         has_table_privilege(p, 'TRIGGER')
    from unnest(rels) p
   where p <> t.relid and 'truncate' = any (t.operations)
     and not exists (select from pg_trigger g
                      where g.tgrelid = p and g.tgname = format('!gdq_%s_%s_t', t.relid::oid, t.queue_id));
  return query
  select 'warning', 'trigger_outranked',
         format('trigger %I of %s fires before those of gdq: its own changes to the table are logged before the change '
                'that fired it', g.tgname, gdq.table_name(g.tgrelid)),
         'Give it a name that sorts after !gdq_.', false
    from pg_trigger g
   where g.tgrelid = any (rels) and g.tgname::text collate "C" < '!gdq_' and not g.tgisinternal and g.tgparentid = 0
     and g.tgenabled <> 'D' and not g.tgdeferrable and gdq.fires_after_each_row(g);
end
$$;
comment on function gdq.trigger_findings(integer) is 'The faults of the triggers of a captured table.';

-- fires_after_each_row(tg): whether a trigger is an AFTER ... FOR EACH ROW one: of the bits of tgtype, 1 is ROW, 2
-- BEFORE and 64 INSTEAD OF. Writes: nothing.
create or replace function gdq.fires_after_each_row(tg pg_trigger) returns boolean
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return tg.tgtype & 1 = 1 and tg.tgtype & (2 | 64) = 0;
end
$$;
comment on function gdq.fires_after_each_row(pg_trigger) is 'Whether a trigger fires AFTER, for each row.';

-- partition_oids(root): the oids of a table and all its partitions, read from the catalogs, without the locks that
-- pg_partition_tree() takes. Writes: nothing.
create or replace function gdq.partition_oids(root oid) returns oid[]
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (select from pg_class c where c.oid = root and c.relkind <> 'p') then
    return array[root];
  end if;
  return array(
    with recursive tree(relid) as (
      select root
      union all
      select c.oid
        from tree t
        join pg_inherits i on i.inhparent = t.relid
        join pg_class c on c.oid = i.inhrelid
       where c.relispartition and c.relkind in ('r', 'p')
    )
    select relid from tree);
end
$$;
comment on function gdq.partition_oids(oid) is 'The oids of a table and all its partitions.';

-- open_resync(queue_id, relid, table_id): the latest reason why a captured table is in resync: capture is off, or some
-- subscription has not passed a gap. No row when it is not in resync. Writes: nothing.
create or replace function gdq.open_resync(queue_id integer, relid oid, table_id integer) returns setof text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  -- once, however many gaps there were
  with passed as materialized (
    select gdq.snapshot_max(
             (select p.snapshot from gdq.position p
               where p.subscription_id = s.subscription_id order by p.batch_no desc limit 1),
             (select c.snapshot from gdq.copied_tables(s.subscription_id) c
               where c.relid = open_resync.relid)) as snapshot
      from gdq.subscription s
     where s.queue_id = open_resync.queue_id and gdq.takes_table(s, open_resync.table_id)
  )
  select r.reason
    from gdq.resync r
   where r.queue_id = open_resync.queue_id and r.relid = open_resync.relid
     and ((select gdq.capture_state(open_resync.queue_id, open_resync.relid)) <> 'armed'
          or exists (select from passed p where not pg_visible_in_snapshot(r.txid::text::xid8, p.snapshot)))
   order by r.resync_id desc limit 1
$$;
comment on function gdq.open_resync(integer, oid, integer) is 'The latest reason why a captured table is in resync.';
