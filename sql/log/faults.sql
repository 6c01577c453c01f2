-- Faults of the capture functions and triggers of a table, or of the table itself.

-- function_faults(table_id): the capture functions of an armed table that differ from those that arm() makes, by name.
-- The body is compared letter by letter: another one may have missed or invented changes. own: gdq may replace the
-- function. Writes: nothing.
create or replace function gdq.function_faults(table_id integer) returns table (name text, fault text, own boolean)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  -- a function may announce changes in an earlier segment of the event log
  announced_in constant text := E'insert into gdq_log\\.q\\d+_s([012]) \\(ev_txid, ev_kind, ev_table\\)';
begin
  -- in PL/pgSQL, which keeps the plan: this is called for each table
  return query
  select gdq.capture_name(ct.queue_id, ct.relid, op), found.fault, p.oid is null or pg_has_role(p.proowner, 'usage')
    from gdq.captured_table ct
    join gdq.log_ring r on r.version_id = gdq.current_version(ct.table_id)
   cross join unnest(array['i', 'u', 'd', 't']) op
    left join pg_proc p on p.pronamespace = 'gdq_log'::regnamespace
                       and p.proname = gdq.capture_name(ct.queue_id, ct.relid, op)
                       and p.pronargs = 0
    left join pg_language l on l.oid = p.prolang
   cross join lateral (
     select case op when 't' then gdq.capture_owner() else gdq.capture_role(ct.relid) end) o(right_owner),
         lateral (select case
           when p.oid is null then
             'is missing'
           when pg_get_userbyid(p.proowner) <> right_owner then
             format('belongs to %s, not to %s', p.proowner::regrole, right_owner)
           when not p.prosecdef or l.lanname <> 'plpgsql' then
             'is not SECURITY DEFINER in PL/pgSQL'
           when p.prosrc <> case
                  when op = 't' then gdq.truncate_body(ct.queue_id, ct.relid, ct.origin)
                  when r.activity = 'busy' then gdq.capture_body(r.version_id, r.current_slot, op, null)
                  else gdq.capture_body(r.version_id, r.current_slot, op,
                                        coalesce(substring(p.prosrc from announced_in)::integer, 0)) end then
             'does not do what it should' end) found(fault)
   where ct.table_id = function_faults.table_id and found.fault is not null;
end
$$;
comment on function gdq.function_faults(integer) is
  'Capture functions of a table that differ from those that arm() makes.';

-- capture_fault(table_id): the reason why capture of a table cannot be complete as its catalogs are now; NULL when it
-- can. Changes that escape the triggers could not be recorded later, so capture of such a table is off until that is
-- mended. Writes: nothing.
create or replace function gdq.capture_fault(table_id integer) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  rels oid[];
  fault text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = capture_fault.table_id;
  rels := t.relid::oid || array(select p.relid from pg_partition_tree(t.relid) p);
  select case when c.relpersistence <> 'p' then
                format('%s is unlogged: a crash empties it without any event', gdq.table_name(c.oid))
              when c.relkind = 'f' then
                format('partition %s is a foreign table: changes at its server are not seen', gdq.table_name(c.oid)) end
    into fault
    from pg_class c
   where c.oid = any (rels) and ((c.relkind = 'r' and c.relpersistence <> 'p') or c.relkind = 'f') limit 1;
  if fault is null then
    -- its rows are no longer part of the table, but its triggers still fire; no event trigger saw the broken-off DETACH
    select format('partition %s is half detached: ALTER TABLE ... DETACH PARTITION ... FINALIZE',
                  gdq.table_name(i.inhrelid)) into fault
      from pg_inherits i
     where i.inhparent = any (rels) and i.inhdetachpending limit 1;
  end if;
  fault := coalesce(fault, gdq.json_fault(table_id));
  if fault is null then
    -- temporary children are left out: other sessions do not read them
    select format('inheritance child %s is not captured', gdq.table_name(i.inhrelid)) into fault
      from pg_inherits i join pg_class p on p.oid = i.inhparent join pg_class c on c.oid = i.inhrelid
     where i.inhparent = t.relid and p.relkind = 'r' and c.relpersistence <> 't'
       and not exists (select from gdq.captured_table ct
                        where ct.queue_id = t.queue_id and ct.relid = i.inhrelid) limit 1;
  end if;
  if fault is null and t.granularity = 'statement' then
    fault := gdq.statement_fault(t.relid);
  end if;
  return fault;
end
$$;
comment on function gdq.capture_fault(integer) is
  'The reason why capture of a table cannot be complete as its catalogs are now; NULL when it can.';

-- trigger_fault(table_id): the fault of the capture triggers of a table and its partitions; NULL for none. A trigger is
-- missing, disabled, or runs another function; or it was renamed, so that a new one would log changes twice. A
-- partition without a TRUNCATE trigger for lack of rights is no fault: its gap is on record. Writes: nothing.
create or replace function gdq.trigger_fault(table_id integer) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  pattern text;
  functions oid[];
  rel record;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = trigger_fault.table_id;
  pattern := format('^!gdq_%s_%s_[iudtb]$', t.relid::oid, t.queue_id);
  functions := array(select gdq.capture_function(t.queue_id, t.relid, op) from unnest('{i,u,d,t}'::text[]) op);
  for rel in
    select c.oid, min(tg.tgname) filter (where tg.tgname !~ pattern) as renamed
      from (select t.relid::oid as relid
            union
            select cl.leaf
              from gdq.captured_leaf cl join pg_partition_tree(t.relid) p on p.relid = cl.leaf
             where cl.table_id = t.table_id and cl.ready) r
      join pg_class c on c.oid = r.relid
      left join pg_trigger tg on tg.tgrelid = c.oid and (tg.tgname ~ pattern or tg.tgfoid = any (functions))
     group by c.oid
    having count(*) filter (where right(tg.tgname, 1) <> 'b')
             < cardinality(array_remove(t.operations, 'truncate'))
               + ('truncate' = any (t.operations)
                  and (c.oid = t.relid
                       or (has_table_privilege(c.oid, 'TRIGGER')
                           and has_schema_privilege(c.relnamespace, 'USAGE'))))::integer
        or bool_or(tg.tgname !~ pattern
                   or tg.tgenabled not in ('A', case when t.always then 'A' else 'O' end)
                   or tg.tgqual is not null
                   or tg.tgattr <> ''
                   or tg.tgfoid <> gdq.capture_function(t.queue_id, t.relid, translate(right(tg.tgname, 1), 'b', 't')))
  loop
    return case when rel.renamed is null then
                  format('a capture trigger of %s was dropped or disabled', gdq.table_name(rel.oid))
                else
                  format('trigger %I of %s is a renamed capture trigger: drop it', rel.renamed, gdq.table_name(rel.oid))
           end;
  end loop;
  return null;
end
$$;
comment on function gdq.trigger_fault(integer) is
  'The fault of the capture triggers of a table and its partitions; NULL for none.';

-- statement_fault(tbl): the reason why statement triggers would miss changes of a table; NULL when they see all. A
-- statement fires only the triggers of the table that it names, and those of a parent would hold the rows of its
-- children. Writes: nothing.
create or replace function gdq.statement_fault(tbl oid) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (
    select format(case when c.relispartition then
                         '%s is a partition: statements on its root fire no statement triggers of it'
                       else
                         '%s has or is an inheritance child, whose statement triggers do not fire for its parent'
                  end, gdq.table_name(tbl))
      from pg_class c
     where c.oid = tbl
       and (c.relispartition
            or exists (select from pg_inherits i
                        where i.inhrelid = tbl or (i.inhparent = tbl and c.relkind = 'r'))));
end
$$;
comment on function gdq.statement_fault(oid) is
  'The reason why statement triggers would miss changes of a table; NULL when they see all.';

-- json_fault(table_id): the reason why format json cannot capture a table as it is now; NULL when it can. All
-- partitions must have their columns in one order, since the text of a row does not show the order. Writes: nothing.
create or replace function gdq.json_fault(table_id integer) returns text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  with orders as (
    select p.relid, string_agg(quote_ident(a.attname), ',' order by a.attnum) as names
      from gdq.captured_table ct, pg_partition_tree(ct.relid) p
      join pg_attribute a on a.attrelid = p.relid and a.attnum > 0 and not a.attisdropped
     where ct.table_id = json_fault.table_id and ct.format = 'json' group by p.relid)
  select format('partition %s has its columns in another order than %s, which format json cannot tell',
                gdq.table_name(leaf.relid), gdq.table_name(root.relid))
    from gdq.captured_table ct join orders root using (relid), orders leaf
   where ct.table_id = json_fault.table_id and leaf.names <> root.names limit 1
$$;
comment on function gdq.json_fault(integer) is
  'The reason why format json cannot capture a table as it is now; NULL when it can.';
