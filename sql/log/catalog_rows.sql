-- What the catalogs hold now of captured tables and of their capture functions, to be compared with the witness.

-- catalog_basis(): what the places of catalog rows rest on: the server, and the files of the catalogs. VACUUM FULL
-- moves the rows of a catalog; pg_upgrade and a restore write them anew. Writes: nothing.
create or replace function gdq.catalog_basis() returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (select concat_ws(' ', system_identifier, pg_relation_filenode('pg_catalog.pg_attribute'),
                           pg_relation_filenode('pg_catalog.pg_trigger'),
                           pg_relation_filenode('pg_catalog.pg_inherits'),
                           pg_relation_filenode('pg_catalog.pg_proc'))
            from pg_control_system());
end
$$;
comment on function gdq.catalog_basis() is
  'What the places of catalog rows rest on: the server, the files of the catalogs.';

-- catalog_rows(tables, relations): what the catalogs hold now of these captured tables, by their ids: a row for the
-- table itself, for each partition and for each inheritance child. relations: only these; NULL: all. It reads the
-- catalogs by the query's snapshot, as it is STABLE, and takes no lock on the tables.
-- An element of seen is "meaning|xmin|ctid|label": a digest of what the catalog row says, the transaction that wrote it
-- and its place. Every change of a row gives it another place, or another writer.
-- Index scans, whatever the catalogs' statistics say, and one plan for all calls: else it takes 20 times as long.
-- Writes: nothing.
create or replace function gdq.catalog_rows(tables integer[], relations oid[] default null) returns setof gdq.witness
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set enable_seqscan = off set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  basis constant text := gdq.catalog_basis();
begin
  return query
  with recursive tree as (
    select ct.table_id, ct.relid::oid as root, ct.relid::oid as relid, true as part,
           format('!gdq_%s_%s_', ct.relid::oid, ct.queue_id) as trigger_prefix,
           format('t%s_q%s_', ct.relid::oid, ct.queue_id) as function_prefix
      from gdq.captured_table ct
     where ct.table_id = any (tables)
    union
    select t.table_id, t.root, i.inhrelid, c.relispartition, t.trigger_prefix, t.function_prefix
      from tree t
      join pg_inherits i on i.inhparent = t.relid
      join pg_class c on c.oid = i.inhrelid
     where c.relpersistence <> 't'  -- other sessions do not read temporary children
  )
  select t.table_id, t.relid, c.relfilenode, basis,
         array[concat(md5(concat_ws(' ', c.relkind, c.relpersistence)), '|||kind')]
         || case when t.relid = t.root then concat(md5(gdq.key_meaning(t.table_id)), '|||key') end
         || array(select concat(md5(concat_ws(' ', a.attname, a.atttypid, a.atttypmod, a.attgenerated, a.attisdropped)),
                                '|', a.xmin, '|', a.ctid, '|column ', a.attnum)
                    from pg_attribute a
                   where t.part and a.attrelid = t.relid and a.attnum > 0 order by a.attnum)
         || array(select concat(md5(concat_ws(' ', g.tgenabled, p.proname, g.tgtype, g.tgqual is null, g.tgattr,
                                              g.tgoldtable, g.tgnewtable)),
                                '|', g.xmin, '|', g.ctid, '|trigger ', g.tgname)
                    from pg_trigger g left join pg_proc p on p.oid = g.tgfoid
                   where t.part and g.tgrelid = t.relid
                     and (starts_with(g.tgname, t.trigger_prefix)
                          or (p.pronamespace = 'gdq_log'::regnamespace and starts_with(p.proname, t.function_prefix)))
                   order by g.tgname)
         || array(select concat(md5(i.inhdetachpending::text), '|', i.xmin, '|', i.ctid, '|link ', i.inhparent)
                    from pg_inherits i
                   where t.relid <> t.root and i.inhrelid = t.relid order by i.inhparent)
         || case when t.relid = t.root then gdq.type_rows(t.relid) end
    from tree t join pg_class c on c.oid = t.relid
   where relations is null or t.relid = any (relations);
end
$$;
comment on function gdq.catalog_rows(integer[], oid[]) is
  'What the catalogs hold now of captured tables, their partitions and children.';

-- type_rows(relid): what the catalogs hold now of the user types of a table's columns that decides how stored values
-- read: labels of enums, attributes of composites. Elements as those of catalog_rows(), without writer and place. A
-- label that is new changes no value. Writes: nothing.
create or replace function gdq.type_rows(relid oid) returns text[]
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set enable_seqscan = off set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
  if not exists (select from pg_attribute a
                  where a.attrelid = type_rows.relid and a.attnum > 0 and a.atttypid >= 16384) then
    return '{}';
  end if;
  return array(
    with recursive made(typid) as (
      select a.atttypid from pg_attribute a where a.attrelid = type_rows.relid and a.attnum > 0 and not a.attisdropped
      union
      select part from made m join pg_type ty on ty.oid = m.typid,
             lateral (select ty.typelem
                      union all select ty.typbasetype
                      union all select r.rngsubtype from pg_range r where m.typid in (r.rngtypid, r.rngmultitypid)
                      union all select a.atttypid from pg_attribute a
                                 where a.attrelid = ty.typrelid and a.attnum > 0 and not a.attisdropped) parts(part)
       where m.typid >= 16384 and part <> 0
    )
    select concat(md5(e.enumlabel), '|||label ', e.oid)
      from made m join pg_enum e on e.enumtypid = m.typid
    union all
    select concat(md5(concat_ws(' ', a.atttypid, a.atttypmod, a.attisdropped)),
                  '|||attribute ', a.attrelid, '.', a.attnum)
      from made m join pg_type ty on ty.oid = m.typid join pg_attribute a on a.attrelid = ty.typrelid
     where ty.typrelid <> 0 and m.typid >= 16384 and a.attnum > 0
     order by 1);
end
$$;
comment on function gdq.type_rows(oid) is 'What the catalogs hold now of the user types of a table''s columns.';

-- key_meaning(table_id): what the catalogs say of the key of a captured table. Writes: nothing.
create or replace function gdq.key_meaning(table_id integer) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = key_meaning.table_id;
  if t.key_attnums is null then
    return (select concat_ws(' ', i.indkey, i.indnkeyatts, i.indimmediate, i.indisvalid)
              from pg_index i where i.indrelid = t.relid and i.indisprimary);
  end if;
  return concat_ws(' ',
    exists (select from pg_index i
             where i.indrelid = t.relid and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null
               and (select array_agg(k order by k)
                      from unnest(i.indkey::smallint[]) with ordinality u(k, n) where n <= i.indnkeyatts)
                   = (select array_agg(k order by k) from unnest(t.key_attnums) k)),
    (select bool_and(a.attnotnull) from pg_attribute a where a.attrelid = t.relid and a.attnum = any (t.key_attnums)));
end
$$;
comment on function gdq.key_meaning(integer) is 'What the catalogs say of the key of a captured table.';

-- function_rows(queue_id, relid): what the catalogs hold now of the capture functions of a table. Result: the basis,
-- then elements as those of catalog_rows(). Writes: nothing.
create or replace function gdq.function_rows(queue_id integer, relid oid) returns text[]
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set enable_seqscan = off set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
  return gdq.catalog_basis() || array(
    select concat(md5(concat_ws(' ', p.prosrc, p.proowner, p.prosecdef, p.proconfig, l.lanname)),
                  '|', p.xmin, '|', p.ctid, '|function ', p.proname)
      from unnest(array['d', 'i', 't', 'u']) op
      join pg_proc p on p.proname = gdq.capture_name(function_rows.queue_id, function_rows.relid, op)
      join pg_language l on l.oid = p.prolang
     where p.pronamespace = 'gdq_log'::regnamespace and p.pronargs = 0
     order by op);
end
$$;
comment on function gdq.function_rows(integer, oid) is
  'What the catalogs hold now of the capture functions of a table.';
