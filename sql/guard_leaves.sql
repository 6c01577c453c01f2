-- guard_leaves(table_id, tag): brings the partitions of a captured table under capture, and records what came or went,
-- and whether it had rows. tag NULL: no ddl event, as the resync that goes with it tells enough. Writes: triggers, captured_leaf, a ddl event, resync and the event log.
create or replace function gdq.guard_leaves(table_id integer, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  rel oid;
  attached oid[];
  detached oid[];
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_leaves.table_id;
  -- from the top, so that what is under an attached partition comes after it
  attached := array(select p.relid from pg_partition_tree(t.relid) p join pg_class c on c.oid = p.relid
                     where p.relid <> t.relid and c.relkind in ('r', 'p')
                       and not exists (select from gdq.captured_leaf l where l.table_id = t.table_id and l.leaf = p.relid) order by p.level, p.relid);
  detached := array(select l.leaf from gdq.captured_leaf l
                     where l.table_id = t.table_id and not exists (select from pg_partition_tree(t.relid) p where p.relid = l.leaf) order by l.leaf);
  if attached = '{}' and detached = '{}' then
    return;
  end if;
  -- the guard meets its own CREATE TRIGGER while it is at the partitions, of which it has told by then
  if tag <> 'CREATE TRIGGER' then
    perform gdq.note_ddl(t.table_id, tag, jsonb_strip_nulls(jsonb_build_object('attached', (select jsonb_agg(gdq.table_name(a)) from unnest(attached) a),
      'detached', (select jsonb_agg(gdq.leaf_name(d)) from unnest(detached) d))));
  end if;
  foreach rel in array attached loop
    perform gdq.guard_leaf(t.table_id, rel);
  end loop;
  foreach rel in array detached loop
    delete from gdq.captured_leaf l where l.table_id = t.table_id and l.leaf = rel;
    perform gdq.note_once(t.queue_id, t.relid, 'gap', format('partition %s was detached or dropped', gdq.leaf_name(rel)));
  end loop;
end
$$;
comment on function gdq.guard_leaves(integer, text) is 'Brings new partitions of a captured table under capture and records what came or went.';

-- leaf_name(leaf): the name of a partition, also of one that the command at hand drops. Writes: nothing.
create or replace function gdq.leaf_name(leaf oid) returns text
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce(gdq.table_name(leaf), gdq.ddl_object(leaf), leaf::text)
$$;
comment on function gdq.leaf_name(oid) is 'The name of a partition, also of one that is being dropped.';

-- guard_leaf(table_id, leaf): brings a new partition of a captured table under capture, and records the rows that it came
-- with. Writes: triggers, captured_leaf, resync and the event log.
create or replace function gdq.guard_leaf(table_id integer, leaf oid) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_leaf.table_id;
  -- the guard meets its own CREATE TRIGGER before all triggers are there
  insert into gdq.captured_leaf (table_id, leaf, ready) values (t.table_id, guard_leaf.leaf, false) on conflict do nothing;
  if pg_relation_size(leaf) > 0 then
    perform gdq.note_once(t.queue_id, t.relid, 'gap', format('partition %s was attached with rows', gdq.table_name(leaf)));
  end if;
  begin
    perform gdq.create_triggers(t.queue_id, t.relid, leaf, t.operations, t.granularity, t.always);
  exception when insufficient_privilege then
    perform gdq.note_once(t.queue_id, t.relid, 'gap', format('no right to put TRUNCATE triggers on partition %s: GRANT TRIGGER on it to %I',
      gdq.table_name(leaf), current_user));
  end;
  update gdq.captured_leaf l set ready = true where l.table_id = t.table_id and l.leaf = guard_leaf.leaf and not l.ready;
  if exists (select from gdq.captured_table ct where ct.queue_id = t.queue_id and ct.relid = leaf)
     and gdq.capture_state(t.queue_id, leaf) <> 'covered' then
    perform gdq.note_resync(t.queue_id, leaf, 'covered', format('attached to %s, which is captured', gdq.table_name(t.relid)));
    perform gdq.disarm(t.queue_id, leaf);
    perform gdq.replace_capture(t.queue_id, leaf, 't', E'begin\n  return null;\nend');
  end if;
end
$$;
comment on function gdq.guard_leaf(integer, oid) is 'Brings a new partition of a captured table under capture.';

-- capture_fault(table_id): why capture of a table cannot be complete as its catalogs are now; NULL when it can. Rows
-- that escape the triggers later could not be recorded then, so such a table is off until that has changed.
-- Writes: nothing.
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
  select case when c.relpersistence <> 'p' then format('%s is unlogged: a crash empties it without any event', gdq.table_name(c.oid))
              when c.relkind = 'f' then format('partition %s is a foreign table: changes at its server are not seen', gdq.table_name(c.oid)) end
    into fault
    from pg_class c
   where c.oid = any (rels) and ((c.relkind = 'r' and c.relpersistence <> 'p') or c.relkind = 'f') limit 1;
  if fault is null then
    -- its rows are no part of the table any more, but its triggers still fire; no event trigger fires for what broke off
    select format('partition %s is half detached: ALTER TABLE ... DETACH PARTITION ... FINALIZE', gdq.table_name(i.inhrelid)) into fault
      from pg_inherits i where i.inhparent = any (rels) and i.inhdetachpending limit 1;
  end if;
  fault := coalesce(fault, gdq.json_fault(table_id));
  if fault is null then
    -- a child that only one session sees is no part of what others read
    select format('inheritance child %s is not captured', gdq.table_name(i.inhrelid)) into fault
      from pg_inherits i join pg_class p on p.oid = i.inhparent join pg_class c on c.oid = i.inhrelid
     where i.inhparent = t.relid and p.relkind = 'r' and c.relpersistence <> 't'
       and not exists (select from gdq.captured_table ct where ct.queue_id = t.queue_id and ct.relid = i.inhrelid) limit 1;
  end if;
  if fault is null and t.granularity = 'statement' then
    fault := gdq.statement_fault(t.relid);
  end if;
  return fault;
end
$$;
comment on function gdq.capture_fault(integer) is 'Why capture of a table cannot be complete as its catalogs are now; NULL when it can.';

-- trigger_fault(table_id): the same for the capture triggers of a table and its partitions: missing, disabled, replaced
-- by something else, or renamed, so that a new one would double it. A partition for which there was no right to make
-- the TRUNCATE trigger is recorded elsewhere. Writes: nothing.
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
            union select cl.leaf from gdq.captured_leaf cl join pg_partition_tree(t.relid) p on p.relid = cl.leaf where cl.table_id = t.table_id and cl.ready) r
      join pg_class c on c.oid = r.relid
      left join pg_trigger tg on tg.tgrelid = c.oid and (tg.tgname ~ pattern or tg.tgfoid = any (functions))
     group by c.oid
    having count(*) filter (where right(tg.tgname, 1) <> 'b')
             < cardinality(array_remove(t.operations, 'truncate'))
               + ('truncate' = any (t.operations) and (c.oid = t.relid or (has_table_privilege(c.oid, 'TRIGGER') and has_schema_privilege(c.relnamespace, 'USAGE'))))::integer
        or bool_or(tg.tgname !~ pattern or tg.tgenabled not in ('A', case when t.always then 'A' else 'O' end) or tg.tgqual is not null or tg.tgattr <> ''
                   or tg.tgfoid <> gdq.capture_function(t.queue_id, t.relid, translate(right(tg.tgname, 1), 'b', 't'))) loop
    return case when rel.renamed is null then format('a capture trigger of %s was dropped or disabled', gdq.table_name(rel.oid))
                else format('trigger %I of %s is a renamed capture trigger: drop it', rel.renamed, gdq.table_name(rel.oid)) end;
  end loop;
  return null;
end
$$;
comment on function gdq.trigger_fault(integer) is 'What is wrong with the capture triggers of a table and its partitions; NULL for nothing.';
