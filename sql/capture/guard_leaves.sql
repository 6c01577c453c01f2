-- guard_leaves(table_id, tag): brings new partitions of a captured table under capture, and records which partitions
-- came or went, and whether new ones had rows. tag: that of the command, for the ddl event; NULL: no ddl event, as the
-- resync of rearm() says enough. Writes: triggers, captured_leaf, a ddl event, resync and the event log.
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
  -- parents first, so that the partitions under an attached one come after it
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
  -- guard_leaf() below fires the DDL guard again by its own CREATE TRIGGER; this event has been written by then
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
    -- its changes came through the root; rearm() captures it by itself again
    if gdq.capture_state(t.queue_id, rel) = 'covered' then
      perform gdq.note_resync(t.queue_id, rel, 'disarmed', format('detached from %s', gdq.table_name(t.relid)));
    end if;
  end loop;
end
$$;
comment on function gdq.guard_leaves(integer, text) is
  'Brings new partitions of a captured table under capture and records which came or went.';

-- guard_children(table_id): records a gap when an inheritance child with rows has come or gone, since queries of the
-- captured parent read its rows. Writes: resync and the event log.
create or replace function gdq.guard_children(table_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  child record;
begin
  -- nearly always there is and was no child
  select ct.* into t
    from gdq.captured_table ct join gdq.witness w using (table_id, relid) join pg_class c on c.oid = ct.relid
   where ct.table_id = guard_children.table_id and c.relkind = 'r'
     and (exists (select from pg_inherits i where i.inhparent = ct.relid)
          or exists (select from gdq.witness k where k.table_id = ct.table_id and k.relid <> ct.relid));
  if t.table_id is null then
    return;
  end if;
  for child in
    select coalesce(r.relid, w.relid) as relid, case when w.relid is null then 'came' else 'left' end as how
      from gdq.catalog_rows(array[t.table_id]) r
      full join (select k.relid from gdq.witness k where k.table_id = t.table_id) w using (relid)
     where r.relid is null or w.relid is null
     order by 1
  loop
    if coalesce(pg_relation_size(child.relid), 1) > 0 then
      perform gdq.note_once(t.queue_id, t.relid, 'gap',
                            format('inheritance child %s %s, with rows', gdq.leaf_name(child.relid), child.how));
    end if;
    perform gdq.witness(array[t.table_id], array[child.relid]);
  end loop;
end
$$;
comment on function gdq.guard_children(integer) is
  'Records a gap when an inheritance child with rows has come or gone.';

-- guard_leaf(table_id, leaf): brings a new partition of a captured table under capture, and records a gap if it has
-- rows already. Writes: triggers, captured_leaf, resync and the event log.
create or replace function gdq.guard_leaf(table_id integer, leaf oid) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_leaf.table_id;
  -- create_triggers() below fires the guard again before all triggers exist; ready tells it
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

-- leaf_name(leaf): the name of a partition, also of one that the current command drops. Writes: nothing.
create or replace function gdq.leaf_name(leaf oid) returns text
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce(gdq.table_name(leaf), gdq.ddl_object(leaf), leaf::text)
$$;
comment on function gdq.leaf_name(oid) is 'The name of a partition, also of one that is being dropped.';
