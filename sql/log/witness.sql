-- The witness: what the catalogs held of a captured table when gdq saw it last. The DDL guard witnesses a table in the
-- transaction of the DDL, after it has recorded what the DDL means. Whatever differs later was seen by nobody, so it is
-- a resync, whatever it is. A table's file alone tells nothing: VACUUM FULL, CLUSTER and TRUNCATE change it.

-- first_difference(was, was_basis, present, basis, same_file, tag): the label of an element that differs from what was
-- witnessed; NULL when none does.
--   A row that was written anew with the same meaning differs too, as it may have had another one for a while; if
--   VACUUM FULL has moved the catalog's rows since, the writer tells, and after pg_upgrade only the meaning does.
--   same_file: whether the relation has the file that was witnessed. A new row of pg_attribute with the same meaning
--   then changed no value (GRANT on a column, SET STATISTICS).
--   tag: of the DDL command that the guard follows, which explains what this transaction has written; NULL: a check,
--   which knows of nothing. A trigger written anew is explained by CREATE TRIGGER alone: else it was off for a while.
-- Writes: nothing.
create or replace function gdq.first_difference(was text[], was_basis text, present text[], basis text,
                                                same_file boolean, tag text default null) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (
    with w as (
      select split_part(e, '|', 1) as meaning, split_part(e, '|', 2) as writer, split_part(e, '|', 3) as place,
             regexp_replace(e, '^[^|]*[|][^|]*[|][^|]*[|]', '') as label
        from unnest(was) e
    ), p as (
      select split_part(e, '|', 1) as meaning, split_part(e, '|', 2) as writer, split_part(e, '|', 3) as place,
             regexp_replace(e, '^[^|]*[|][^|]*[|][^|]*[|]', '') as label
        from unnest(present) e
    )
    select coalesce(p.label, w.label)
      from w full join p on p.label = w.label
     where case
             when w.label is null and starts_with(p.label, 'label ') then false
             when w.label is null or p.label is null or w.meaning <> p.meaning then true
             when split_part(was_basis, ' ', 1) <> split_part(basis, ' ', 1) then false
             when w.writer = p.writer and (w.place = p.place or was_basis <> basis) then false
             else not (same_file and starts_with(p.label, 'column ')) end
       and (tag is null
            or (p.writer <> '' and not gdq.is_own(p.writer::xid))
            or (starts_with(p.label, 'trigger ') and w.meaning = p.meaning and tag <> 'CREATE TRIGGER')
            or (p.label ~ '^(label|attribute) '
                and exists (select from w k where split_part(k.label, '.', 1) = split_part(p.label, '.', 1))))
     order by 1 limit 1);
end
$$;
comment on function gdq.first_difference(text[], text, text[], text, boolean, text) is
  'The label of an element that differs from what was witnessed.';

-- is_own(writer): whether this transaction, or a subtransaction of it, has written a visible row with this xmin.
-- Writes: nothing.
create or replace function gdq.is_own(writer xid) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  now_id constant bigint := txid_current();
  id bigint := (now_id >> 32 << 32) + writer::text::bigint;
begin
  if id > now_id + (1::bigint << 31) then
    id := id - (1::bigint << 32);
  end if;
  return id >= now_id and txid_status(id) = 'in progress';
end
$$;
comment on function gdq.is_own(xid) is 'Whether this transaction has written a visible row.';

-- unwitnessed(tables, relations, tag): the relations of these captured tables of which the catalogs hold something else
-- than was witnessed. what: what differs, in words; NULL when it cannot concern capture. was, present: the witness and
-- what the catalogs hold, either NULL for none. relations, tag: as for catalog_rows() and first_difference(). With a
-- tag, relations that came or went are left out, as the guard looks at these itself.
-- A table without any witness, as gdq 0.11 left it, has a row with its own oid and what NULL. Writes: nothing.
create or replace function gdq.unwitnessed(tables integer[], relations oid[] default null, tag text default null)
  returns table (table_id integer, relid oid, what text, was gdq.witness, present gdq.witness)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  found_rows gdq.witness[];
  known_rows gdq.witness[];
  basis text;
begin
  -- both by one snapshot: DDL that commits between two would be seen in one of them alone
  select array(select r from gdq.catalog_rows(tables, relations) r),
         array(select k from gdq.witness k
                where k.table_id = any (tables) and (relations is null or k.relid = any (relations)))
    into found_rows, known_rows;
  -- the catalogs before their files: rows that moved in between are then compared without their places
  basis := gdq.catalog_basis();
  return query
  select coalesce((p).table_id, (w).table_id), coalesce((p).relid, (w).relid),
         case when not exists (select from gdq.witness k
                                where k.table_id = coalesce((p).table_id, (w).table_id)) then null
              when (p).relid is null then gdq.relation_name((w).relid) || ' was detached or dropped'
              when (w).relid is null then gdq.relation_name((p).relid) || ' was attached'
              else gdq.element_name((p).relid, gdq.first_difference((w).seen, (w).basis, (p).seen, basis,
                                                                    (w).file = (p).file, tag)) end,
         w, p
    from (select f from unnest(found_rows) f) now_rows(p)
    full join (select k from unnest(known_rows) k) witnessed(w)
      on (w).table_id = (p).table_id and (w).relid = (p).relid
   where ((p).relid is not null and (w).relid is not null or tag is null)
     and ((w).seen is distinct from (p).seen or (w).file is distinct from (p).file or (w).basis is distinct from basis)
  union all
  select ct.table_id, ct.relid::oid,
         case when r.functions is not null then
           gdq.first_difference(r.functions[2:], r.functions[1], f.functions[2:], basis, false) || ' was replaced' end,
         null, null
    from gdq.captured_table ct
    join gdq.log_ring r on r.version_id = gdq.current_version(ct.table_id),
         gdq.function_rows(ct.queue_id, ct.relid) f(functions)
   where tag is null and ct.table_id = any (tables) and r.functions is distinct from f.functions;
end
$$;
comment on function gdq.unwitnessed(integer[], oid[], text) is
  'Relations of captured tables of which the catalogs hold something else than was witnessed.';

-- element_name(relid, label): an element of catalog_rows() in words; NULL for NULL. Writes: nothing.
create or replace function gdq.element_name(relid oid, label text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = off
as $$
declare
  kind constant text := split_part(label, ' ', 1);
  object constant text := substr(label, length(split_part(label, ' ', 1)) + 2);
begin
  return (select format(case kind when 'column' then 'column %2$s of %1$s was changed or its values were'
                          when 'trigger' then 'a capture trigger of %1$s was dropped, disabled or changed'
                          when 'link' then '%1$s was attached or detached'
                          when 'key' then 'the key of %1$s was changed'
                          when 'label' then 'a type of %1$s was changed, so that stored values read otherwise'
                          when 'attribute' then 'a type of %1$s was changed, so that stored values read otherwise'
                          else '%1$s was changed' end,
                gdq.relation_name(relid),
                case kind when 'column' then
                  (select quote_ident(a.attname) from pg_attribute a
                    where a.attrelid = relid and a.attnum = object::smallint) end)
         || ', and no event trigger saw it'
   where label is not null);
end
$$;
comment on function gdq.element_name(oid, text) is 'An element of catalog_rows() in words.';

-- relation_name(relid): the name of a relation, or its oid when it is gone. Writes: nothing.
create or replace function gdq.relation_name(relid oid) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return coalesce(gdq.table_name(relid), 'relation ' || relid);
end
$$;
comment on function gdq.relation_name(oid) is 'The name of a relation, or its oid when it is gone.';

-- witness(tables, relations): witnesses what the catalogs hold now of these captured tables, by their ids. relations:
-- only these relations; NULL: all. In READ COMMITTED; another transaction that witnesses the same relation is waited
-- for. Writes: witness.
create or replace function gdq.witness(tables integer[], relations oid[] default null) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  found_rows constant gdq.witness[] := array(select r from gdq.catalog_rows(tables, relations) r);
begin
  insert into gdq.witness as w
    select f.* from unnest(found_rows) f
  on conflict on constraint witness_pkey do update
     set file = excluded.file, basis = excluded.basis, seen = excluded.seen
    where (w.file, w.basis, w.seen) is distinct from (excluded.file, excluded.basis, excluded.seen);
  delete from gdq.witness w
   where w.table_id = any (tables) and (relations is null or w.relid = any (relations))
     and not exists (select from unnest(found_rows) f where f.table_id = w.table_id and f.relid = w.relid);
end
$$;
comment on function gdq.witness(integer[], oid[]) is 'Witnesses what the catalogs hold now of captured tables.';

-- witness_types(relid): witnesses the user types of a captured table's columns, and nothing else of it. In an old
-- snapshot, where this may fail, the next check records a second resync. Writes: witness.
create or replace function gdq.witness_types(relid oid) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  update gdq.witness w
     set seen = array(select e from unnest(w.seen) e where e !~ '^[^|]*[|][|][|](label|attribute) ')
                || gdq.type_rows(w.relid)
    from gdq.captured_table ct
   where ct.relid = witness_types.relid and w.table_id = ct.table_id and w.relid = ct.relid;
exception when others then
  raise log 'gdq: the types of % could not be witnessed: %', relid, sqlerrm;
end
$$;
comment on function gdq.witness_types(oid) is 'Witnesses the user types of a captured table''s columns.';

-- witnessed_functions(queue_id, relid): the versions of a captured table whose functions are as they were witnessed.
-- Writes: nothing.
create or replace function gdq.witnessed_functions(queue_id integer, relid oid) returns bigint[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return array(select r.version_id
                 from gdq.log_ring r
                 join gdq.table_version v using (version_id)
                 join gdq.captured_table ct using (table_id)
                where ct.queue_id = witnessed_functions.queue_id and ct.relid = witnessed_functions.relid
                  and r.functions = gdq.function_rows(ct.queue_id, ct.relid));
end
$$;
comment on function gdq.witnessed_functions(integer, oid) is 'Versions whose functions are as they were witnessed.';

-- witness_functions(version_id): witnesses the capture functions of a version, which gdq has just made. Writes:
-- log_ring.
create or replace function gdq.witness_functions(version_id bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  update gdq.log_ring r set functions = gdq.function_rows(ct.queue_id, ct.relid)
    from gdq.table_version v join gdq.captured_table ct using (table_id)
   where v.version_id = witness_functions.version_id and r.version_id = v.version_id;
end
$$;
comment on function gdq.witness_functions(bigint) is 'Witnesses the capture functions of a version.';
