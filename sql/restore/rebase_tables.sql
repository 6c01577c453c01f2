-- rebase_tables(queue_id, keep, why): does rebase_table() for every captured table of a queue, and forgets tables that
-- were dropped or covered. First all capture functions are dropped, and their triggers with them: the oid in a
-- function's name may be that of another table by now. why: the reason that resync events give. Writes: as
-- rebase_table(); resync and the event log.
create or replace function gdq.rebase_tables(queue_id integer, keep boolean, why text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set client_min_messages = warning set lock_timeout = '500ms'
as $$
declare
  t record;
  f record;
  gone integer[] := array(select ct.table_id from gdq.captured_table ct
                           where ct.queue_id = rebase_tables.queue_id
                             and (gdq.capture_state(ct.queue_id, ct.relid) in ('dropped', 'covered')
                                  or not exists (select from pg_class c where c.oid = ct.relid)));
begin
  delete from gdq.resync r where r.queue_id = rebase_tables.queue_id;
  -- with state dropped, the DDL guard ignores the drops that follow
  insert into gdq.resync (queue_id, relid, kind, reason)
    select ct.queue_id, ct.relid, 'dropped', 'rebase'
      from gdq.captured_table ct
     where ct.queue_id = rebase_tables.queue_id;
  for f in select p.proname, pg_has_role(current_user, p.proowner, 'usage') as own,
                  pg_get_userbyid(p.proowner) as owner
             from pg_proc p
            where p.pronamespace = 'gdq_log'::regnamespace
              and p.proname ~ format(E'^t\\d+_q%s_[iudt]$', queue_id) loop
    if not f.own then
      raise exception 'function gdq_log.% belongs to %, the role that restored it', f.proname, f.owner
        using errcode = 'insufficient_privilege',
              hint = format('As %s: GRANT %I TO %I; then rebase, and REVOKE it again.', f.owner, f.owner, current_user);
    end if;
    execute format('drop function gdq_log.%I() cascade', f.proname);
  end loop;
  for t in select ct.*, ct.table_id = any (gone) as is_gone from gdq.captured_table ct
            where ct.queue_id = rebase_tables.queue_id order by ct.relid loop
    if t.is_gone then
      for f in select ls.segment
                 from gdq.log_segment ls join gdq.table_version v using (version_id)
                where v.table_id = t.table_id loop
        execute format('drop table %s', gdq.table_name(f.segment));
      end loop;
      perform gdq.drop_version(v.version_id) from gdq.table_version v where v.table_id = t.table_id;
      delete from gdq.captured_table ct where ct.table_id = t.table_id;
      perform gdq.log_event(queue_id, 'resync', null,
                            jsonb_build_object('kind', 'dropped', 'reason', why, 'table', t.table_name));
    else
      perform gdq.rebase_table(t.table_id, keep);
      -- where capture stays off, rebase_table() has noted the reason
      if not keep and gdq.capture_state(t.queue_id, t.relid) <> 'disarmed' then
        perform gdq.note_resync(t.queue_id, t.relid, 'gap', why);
      end if;
    end if;
  end loop;
  delete from gdq.resync r where r.queue_id = rebase_tables.queue_id and r.kind = 'dropped';
end
$$;
comment on function gdq.rebase_tables(integer, boolean, text) is
  'Puts the captured tables of a queue under capture anew after a restore.';

-- rebase_table(table_id, keep): puts a captured table under capture anew, with functions, triggers and a log version
-- that fit this database. keep: the old versions stay until their rows are read; else they are dropped, unread. Writes:
-- triggers, functions, control rows, segments; resync where the table cannot be captured. Errors: 42501, 55P03.
create or replace function gdq.rebase_table(table_id integer, keep boolean) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
declare
  t gdq.captured_table;
  old_version bigint := gdq.current_version(table_id);
  version bigint;
  described jsonb;
  lost text := gdq.rebase_columns(table_id);
  fault text;
  s record;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = rebase_table.table_id;
  if not has_table_privilege(t.relid, 'TRIGGER')
     or (gdq.capture_owner() <> 'gdq_capture'
         and not pg_has_role(current_user, (select c.relowner from pg_class c where c.oid = t.relid), 'usage')) then
    raise exception 'no right to capture %', t.table_name
      using errcode = 'insufficient_privilege',
            hint = format('GRANT TRIGGER ON %s TO %I; and create role gdq_capture and GRANT gdq_capture TO %2$I;',
                          t.table_name, current_user);
  end if;
  perform gdq.create_capture(t.queue_id, t.relid, t.operations, t.granularity, t.always, t.origin);
  perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
  delete from gdq.captured_leaf cl where cl.table_id = t.table_id;
  insert into gdq.captured_leaf (table_id, leaf)
    select t.table_id, p.relid from pg_partition_tree(t.relid) p where p.relid <> t.relid;
  begin
    perform gdq.refuse_partitions(t.relid);
    fault := case when lost is not null then 'captured columns are gone or renamed: ' || lost
                  else gdq.capture_fault(t.table_id) end;
    if fault is not null then
      raise exception '%', fault;
    end if;
    described := gdq.describe_table(t.table_id);
    perform gdq.check_key(t.table_id, described);
    version := gdq.create_version(t.table_id, described, 3);
    perform gdq.arm(version, 0);
    perform gdq.witness(array[t.table_id]);
  exception when others then
    version := null;
    perform gdq.note_resync(t.queue_id, t.relid, 'disarmed', 'capture stays off: ' || sqlerrm);
  end;
  if not keep then
    -- a table that cannot be captured now keeps its newest version, emptied, for when it can
    for s in select ls.segment, v.version_id = old_version and version is null as kept
               from gdq.log_segment ls join gdq.table_version v using (version_id)
              where v.table_id = t.table_id and v.version_id <= old_version loop
      execute format(case when s.kept then 'truncate %s' else 'drop table %s' end, gdq.table_name(s.segment));
    end loop;
    perform gdq.drop_version(v.version_id)
       from gdq.table_version v
      where v.table_id = t.table_id and v.version_id < coalesce(version, old_version);
    delete from gdq.table_version v where v.table_id = t.table_id and v.version_id < coalesce(version, old_version);
  end if;
end
$$;
comment on function gdq.rebase_table(integer, boolean) is 'Puts a captured table under capture anew after a restore.';

-- rebase_columns(table_id): brings the attribute numbers of a captured table and its versions in line with this
-- database, since a dump does not keep them when columns were dropped. Columns are found by the names in the newest
-- version. It has no names of excluded columns, so every column that it does not log stays excluded. Result: the
-- columns of the table's options that are gone or renamed; a key that lost a column fits no index, so another column is
-- never taken for it. Writes: captured_table, table_rename, table_version.
create or replace function gdq.rebase_columns(table_id integer) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  now_at jsonb;
  lost text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = rebase_columns.table_id;
  select coalesce(jsonb_object_agg(c.attnum, a.attnum), '{}') into now_at
    from gdq.table_version v, jsonb_to_recordset(v.columns) c(attnum int, name text), pg_attribute a
   where v.version_id = gdq.current_version(t.table_id)
     and a.attrelid = t.relid and a.attname = c.name and a.attnum > 0 and not a.attisdropped;
  select string_agg(coalesce(quote_ident(c.name), k.attnum::text), ', ' order by k.attnum) into lost
    from unnest(t.key_attnums || t.include_attnums || t.column_attnums) k(attnum)
    left join (select l.attnum, l.name from gdq.table_version v, jsonb_to_recordset(v.columns) l(attnum int, name text)
                where v.version_id = gdq.current_version(t.table_id)) c using (attnum)
   where not now_at ? k.attnum::text and (c.name is not null or k.attnum = any (t.key_attnums));
  update gdq.captured_table ct
     set table_name = coalesce(gdq.table_name(ct.relid), gdq.last_table_name(ct.table_id)),
         key_attnums = (select array_agg(coalesce((now_at->>k::text)::smallint, 0) order by n)
                          from unnest(ct.key_attnums) with ordinality u(k, n)),
         include_attnums = (select array_agg((now_at->>k::text)::smallint order by n)
                              from unnest(ct.include_attnums) with ordinality u(k, n) where now_at ? k::text),
         column_attnums = (select array_agg((now_at->>k::text)::smallint order by n)
                             from unnest(ct.column_attnums) with ordinality u(k, n) where now_at ? k::text),
         exclude_attnums = case when ct.exclude_attnums is not null then
           array(select a.attnum from pg_attribute a
                  where a.attrelid = ct.relid and a.attnum > 0 and not a.attisdropped
                    and a.attnum::text not in (select jsonb_each_text.value from jsonb_each_text(now_at))) end
   where ct.table_id = t.table_id;
  delete from gdq.table_rename r where r.table_id = t.table_id;
  perform gdq.rebase_filter(t.table_id);
  -- a column that was dropped after an older version gets a number that no column has
  update gdq.table_version v
     set columns = (select coalesce(jsonb_agg(c || jsonb_build_object('attnum',
                             coalesce((now_at->>(c->>'attnum'))::int, 10000 + (c->>'attnum')::int))), '[]')
                      from jsonb_array_elements(v.columns) c)
   where v.table_id = t.table_id;
  return lost;
end
$$;
comment on function gdq.rebase_columns(integer) is
  'Brings attribute numbers of a captured table in line with this database.';

-- rebase_filter(table_id): gives the row filter of a restored table the attribute numbers of this database. Columns are
-- found by the names in the newest version; a column that is gone gets a number that no column has. Writes:
-- captured_table.
create or replace function gdq.rebase_filter(table_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  now_at jsonb;
begin
  select jsonb_object_agg(n.key, coalesce(a.attnum, 10000 + n.key::integer)) into now_at
    from gdq.table_version v cross join jsonb_each_text(v.filter_names) n
    join gdq.captured_table ct using (table_id)
    left join pg_attribute a on a.attrelid = ct.relid and a.attname = n.value and a.attnum > 0 and not a.attisdropped
   where v.version_id = gdq.current_version(rebase_filter.table_id);
  update gdq.captured_table ct
     set row_filter = ct.row_filter || jsonb_build_object(
           'parts', (select jsonb_agg(case jsonb_typeof(part) when 'number' then now_at->(part#>>'{}')
                                           else part end order by n)
                       from jsonb_array_elements(ct.row_filter->'parts') with ordinality p(part, n)),
           'columns', (select jsonb_object_agg(now_at->>c.key, c.value) from jsonb_each(ct.row_filter->'columns') c))
   where ct.table_id = rebase_filter.table_id and ct.row_filter is not null;
end
$$;
comment on function gdq.rebase_filter(integer) is
  'Brings the attribute numbers of a row filter in line with this database.';
