-- How a change of the catalogs is noticed: marks, files and locks of captured tables.

-- check_tables() finds DDL that no event trigger followed: a forgotten ALTER on a server without them, or one of a
-- session that had them off. The catalog rows of a captured table are remembered by their xmin, which every ALTER
-- changes; only a table whose mark differs is looked at closely.

-- catalog_mark(relid): a hash of all that DDL of a table, its triggers or its partitions changes. Writes: nothing.
create or replace function gdq.catalog_mark(relid oid) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set enable_seqscan = off set plan_cache_mode = force_generic_plan
as $$
declare
  tree oid[] := relid || array(select p.relid::oid from pg_partition_tree(relid) p where p.relid <> catalog_mark.relid);
begin
  -- by index, whatever the catalogs' statistics say, and planned once: else it took 20 x as long
  return md5(concat(
    (select string_agg(concat(a.attnum, ' ', a.xmin), ',' order by a.attnum)
       from pg_attribute a where a.attrelid = relid and a.attnum > 0), ';',
    (select string_agg(concat(t.oid, ' ', t.xmin), ',' order by t.oid)
       from pg_trigger t where t.tgrelid = any (tree)), ';',
    (select string_agg(concat(i.inhrelid, ' ', i.xmin), ',' order by i.inhrelid)
       from pg_inherits i where i.inhparent = any (tree)), ';',
    (select string_agg(concat(i.indexrelid, ' ', i.indisunique, i.indisvalid, i.indisprimary), ','
                       order by i.indexrelid)
       from pg_index i where i.indrelid = relid), ';',
    (select string_agg(c.relpersistence, ',' order by c.oid)
       from pg_class c where c.oid = any (tree))));
end
$$;
comment on function gdq.catalog_mark(oid) is 'What DDL of a table, its triggers or its partitions changes.';

-- note_catalog(table_id, catalog, files): remembers the marks of a table that capture fits: the marks of now, or
-- those that catalog_mark() and table_files() gave before. Only gdq's own commands call it, never DDL of the
-- application. Writes: table_check.
create or replace function gdq.note_catalog(table_id integer, catalog text default null, files text default null)
  returns void
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  insert into gdq.table_check as k (table_id, catalog, files)
    select ct.table_id,
           coalesce(note_catalog.catalog, gdq.catalog_mark(ct.relid)),
           coalesce(note_catalog.files, gdq.table_files(ct.relid))
      from gdq.captured_table ct where ct.table_id = note_catalog.table_id
  on conflict on constraint table_check_pkey do update set catalog = excluded.catalog, files = excluded.files
    where (k.catalog, k.files) is distinct from (excluded.catalog, excluded.files)
$$;
comment on function gdq.note_catalog(integer, text, text) is
  'Remembers the catalog rows of a table, which capture fits now.';

-- table_files(relid): the files of a table and its partitions, as text; a rewrite gives other files. Writes: nothing.
create or replace function gdq.table_files(relid oid) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (select string_agg(concat(r, ' ', pg_relation_filenode(r)), ',' order by r)
            from (select table_files.relid as r union select p.relid from pg_partition_tree(table_files.relid) p) tree);
end
$$;
comment on function gdq.table_files(oid) is 'The files of a table and its partitions.';

-- locked_tables(modes): the relations of this database that this transaction has locked in one of these modes. Column
-- DDL takes ACCESS EXCLUSIVE, trigger DDL SHARE ROW EXCLUSIVE. The lock table is exact where the list of DDL commands
-- is not: it has the children, leaves and typed tables that a command reached through a parent or a type, and what a
-- CASCADE took a column from; and it is fresh in an old snapshot. Writes: nothing.
create or replace function gdq.locked_tables(variadic modes text[]) returns oid[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return array(select l.relation from pg_locks l
                where l.pid = pg_backend_pid() and l.locktype = 'relation' and l.granted and l.mode = any (modes)
                  and l.database = (select d.oid from pg_database d where d.datname = current_database()));
end
$$;
comment on function gdq.locked_tables(text[]) is 'Relations that this transaction has locked in one of these modes.';
