-- guard_leaves(table_id, tag): brings new partitions of a captured table under capture, and records which came or
-- went, and whether they had rows. tag: that of the command, for the ddl event; NULL: no ddl event, as the resync
-- that goes with it tells enough.
-- Writes: triggers, captured_leaf, a ddl event, resync and the event log.
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
                       and not exists (select from gdq.captured_leaf l
                                        where l.table_id = t.table_id and l.leaf = p.relid)
                     order by p.level, p.relid);
  detached := array(select l.leaf from gdq.captured_leaf l
                     where l.table_id = t.table_id
                       and not exists (select from pg_partition_tree(t.relid) p where p.relid = l.leaf)
                     order by l.leaf);
  if attached = '{}' and detached = '{}' then
    return;
  end if;
  -- the guard meets its own CREATE TRIGGER while it is at the partitions, of which it has told by then
  if tag <> 'CREATE TRIGGER' then
    perform gdq.note_ddl(t.table_id, tag, jsonb_strip_nulls(jsonb_build_object(
      'attached', (select jsonb_agg(gdq.table_name(a)) from unnest(attached) a),
      'detached', (select jsonb_agg(gdq.leaf_name(d)) from unnest(detached) d))));
  end if;
  foreach rel in array attached loop
    perform gdq.guard_leaf(t.table_id, rel);
  end loop;
  foreach rel in array detached loop
    delete from gdq.captured_leaf l where l.table_id = t.table_id and l.leaf = rel;
    perform gdq.note_once(t.queue_id, t.relid, 'gap',
                          format('partition %s was detached or dropped', gdq.leaf_name(rel)));
  end loop;
end
$$;
comment on function gdq.guard_leaves(integer, text) is
  'Brings new partitions of a captured table under capture and records what came or went.';

-- guard_leaf(table_id, leaf): brings a new partition of a captured table under capture, and records a gap if it has
-- rows already. Writes: triggers, captured_leaf, resync and the event log.
create or replace function gdq.guard_leaf(table_id integer, leaf oid) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_leaf.table_id;
  -- the guard meets its own CREATE TRIGGER before all triggers are there
  insert into gdq.captured_leaf (table_id, leaf, ready) values (t.table_id, guard_leaf.leaf, false)
    on conflict do nothing;
  if pg_relation_size(leaf) > 0 then
    perform gdq.note_once(t.queue_id, t.relid, 'gap',
                          format('partition %s was attached with rows', gdq.table_name(leaf)));
  end if;
  begin
    perform gdq.create_triggers(t.queue_id, t.relid, leaf, t.operations, t.granularity, t.always);
  exception when insufficient_privilege then
    perform gdq.note_once(t.queue_id, t.relid, 'gap',
      format('no right to put TRUNCATE triggers on partition %s: GRANT TRIGGER on it to %I',
             gdq.table_name(leaf), current_user));
  end;
  update gdq.captured_leaf l set ready = true
   where l.table_id = t.table_id and l.leaf = guard_leaf.leaf and not l.ready;
  if exists (select from gdq.captured_table ct where ct.queue_id = t.queue_id and ct.relid = leaf)
     and gdq.capture_state(t.queue_id, leaf) <> 'covered' then
    perform gdq.note_resync(t.queue_id, leaf, 'covered',
                            format('attached to %s, which is captured', gdq.table_name(t.relid)));
    perform gdq.disarm(t.queue_id, leaf);
    perform gdq.replace_capture(t.queue_id, leaf, 't', E'begin\n  return null;\nend');
  end if;
end
$$;
comment on function gdq.guard_leaf(integer, oid) is 'Brings a new partition of a captured table under capture.';

-- leaf_name(leaf): the name of a partition, also of one that the command at hand drops. Writes: nothing.
create or replace function gdq.leaf_name(leaf oid) returns text
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce(gdq.table_name(leaf), gdq.ddl_object(leaf), leaf::text)
$$;
comment on function gdq.leaf_name(oid) is 'The name of a partition, also of one that is being dropped.';
