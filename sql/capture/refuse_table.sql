-- refuse_table(queue_id, tbl, allow_rls, format): error when triggers cannot record every change of a table. Writes:
-- nothing. Errors: 42P01, 42809, 0A000, 42501, 42710, 55000, each with the reason and the cure.
create or replace function gdq.refuse_table(queue_id integer, tbl regclass, allow_rls boolean, format text) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  c pg_class;
  name text := gdq.table_name(tbl);
  owner text;
  other regclass;
begin
  select * into c from pg_class where oid = tbl;
  if c.oid is null then
    raise exception 'table % does not exist', tbl using errcode = 'undefined_table';
  elsif c.relkind not in ('r', 'p') then
    raise exception '% is %, only tables can be captured', name,
      case c.relkind when 'v' then 'a view' when 'm' then 'a materialized view' when 'f' then 'a foreign table'
                     when 'S' then 'a sequence' else 'no table' end
      using errcode = 'wrong_object_type', hint = 'Capture the tables that it is made of.';
  elsif c.relpersistence = 't' then
    raise exception '% is a temporary table: its rows end with its session', name
      using errcode = 'feature_not_supported', hint = 'Make it an ordinary table.';
  elsif c.relpersistence = 'u' then
    raise exception '% is unlogged: a crash empties it without any event', name
      using errcode = 'feature_not_supported', hint = 'ALTER TABLE ... SET LOGGED first.';
  elsif c.oid < 16384
        or c.relnamespace in ('gdq'::regnamespace, 'gdq_log'::regnamespace, 'pg_catalog'::regnamespace) then
    raise exception '% is a system table', name
      using errcode = 'feature_not_supported', hint = 'Only tables of applications can be captured.';
  elsif c.relrowsecurity and allow_rls is not true then
    raise exception '% has row level security, which consumers of the queue would pass by', name
      using errcode = 'feature_not_supported', hint = 'Say allow_rls => true to capture it all the same.';
  end if;
  select i.inhrelid into other from pg_inherits i
   where c.relkind = 'r' and i.inhparent = tbl
     and not exists (select from gdq.captured_table ct
                      where ct.queue_id = refuse_table.queue_id and ct.relid = i.inhrelid) limit 1;
  if other is not null then
    raise exception '% has the inheritance child %, whose rows its triggers do not see', name, gdq.table_name(other)
      using errcode = 'feature_not_supported', hint = 'Add the children first.';
  end if;
  select ct.relid into other from gdq.captured_table ct
   where ct.queue_id = refuse_table.queue_id
     and (ct.relid = tbl or exists (select from pg_partition_ancestors(tbl) a where a.relid = ct.relid)
          or exists (select from pg_partition_tree(tbl) p where p.relid = ct.relid)) limit 1;
  if other is not null then
    raise exception 'table % is already captured by this queue%', name,
      case when other = tbl then '' else ' through ' || gdq.table_name(other) end
      using errcode = 'duplicate_object',
            hint = case when other = tbl then 'gdq.alter_table_options() changes how it is captured. ' else '' end
                   || format('Remove %s first with gdq.remove_table(), or use another queue.', gdq.table_name(other));
  end if;
  select pg_get_userbyid(c.relowner) into owner;
  if not has_table_privilege(tbl, 'TRIGGER') then
    raise exception 'no right to put triggers on %', name using errcode = 'insufficient_privilege',
      hint = format('GRANT TRIGGER ON %s TO %I; as %I.', name, current_user, owner);
  elsif gdq.capture_owner() <> 'gdq_capture' and not pg_has_role(current_user, c.relowner, 'usage') then
    raise exception '% belongs to %: without the role gdq_capture only tables of % can be captured',
      name, owner, current_user
      using errcode = 'insufficient_privilege',
            hint = 'Have a role with CREATEROLE create gdq_capture and grant it, then install again.';
  end if;
  if format = 'typed' and not gdq.event_triggers_on() then
    raise exception 'the event triggers of gdq are missing or off: an ALTER TABLE of % could make its writes fail', name
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'Capture it with format json, or as a superuser: gdq create-event-triggers, '
                   'or SELECT gdq.create_event_triggers(). From 17 on also event_triggers = on.';
  end if;
end
$$;
comment on function gdq.refuse_table(integer, regclass, boolean, text) is
  'Error when the changes of a table cannot be captured.';

-- refuse_partitions(tbl): error when triggers cannot record every change of some partition of a table.
-- Writes: nothing. Errors: 0A000, 42501.
create or replace function gdq.refuse_partitions(tbl regclass) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  leaf record;
begin
  for leaf in select gdq.table_name(c.oid) as name, c.relkind, c.relpersistence, pg_get_userbyid(c.relowner) as owner,
                     has_table_privilege(c.oid, 'TRIGGER') as may_trigger
                from pg_partition_tree(tbl) p join pg_class c on c.oid = p.relid where p.relid <> tbl loop
    if leaf.relkind = 'f' then
      raise exception 'partition % of % is a foreign table: changes at its server are not seen',
        leaf.name, gdq.table_name(tbl)
        using errcode = 'feature_not_supported', hint = 'Capture the other partitions one by one.';
    elsif leaf.relkind = 'r' and leaf.relpersistence = 'u' then
      raise exception 'partition % of % is unlogged: a crash empties it without any event',
        leaf.name, gdq.table_name(tbl)
        using errcode = 'feature_not_supported', hint = 'ALTER TABLE ... SET LOGGED first.';
    elsif not leaf.may_trigger then
      raise exception 'no right to put triggers on %, a partition of %', leaf.name, gdq.table_name(tbl)
        using errcode = 'insufficient_privilege',
              hint = format('GRANT TRIGGER ON %s TO %I; as %I.', leaf.name, current_user, leaf.owner);
    end if;
  end loop;
end
$$;
comment on function gdq.refuse_partitions(regclass) is
  'Error when the changes of some partition of a table cannot be captured.';
