-- altered_types(event, tag): the types whose stored values read otherwise since the command. RENAME VALUE of an enum
-- and ADD or DROP ATTRIBUTE of a composite do that without touching the tables that hold them, and so do ADD and DROP
-- COLUMN for columns of the table's row type. The text of the command shows harmless forms; where the text cannot be
-- seen, as inside a function, the types are taken for altered. Catalogs are read in the transaction's snapshot: a table
-- made after the snapshot of a REPEATABLE READ transaction is missed. Writes: nothing.
create or replace function gdq.altered_types(event text, tag text) returns oid[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if event = 'sql_drop' then
    return gdq.row_types(array(select o.objid from pg_event_trigger_dropped_objects() o
                                where o.classid = 'pg_class'::regclass and o.objsubid <> 0));
  elsif tag = 'ALTER TYPE'
        and current_query() !~* (E'^\\s*alter\\s+type\\s+[\\w.$"]+\\s+('
                                 'add\\s+value|rename\\s+to|rename\\s+attribute|set\\s+schema|owner\\s+to'
                                 ')\\s[^;]*;?\\s*$') then
    return array(select case when c.classid = 'pg_class'::regclass
                             then (select k.reltype from pg_class k where k.oid = c.objid)
                             else c.objid end
                   from pg_event_trigger_ddl_commands() c);
  elsif tag = 'ALTER TABLE' and current_query() !~* E'^\\s*alter\\s+table\\s(?!.*(\\madd\\M|;\\s*\\S))' then
    return gdq.row_types(gdq.locked_tables('AccessExclusiveLock'));
  end if;
  return '{}';
end
$$;
comment on function gdq.altered_types(text, text) is 'The types whose stored values read otherwise since a command.';

-- row_types(relations): the row types of these relations that columns have. Nearly always there is none, which an index
-- of pg_depend tells. Writes: nothing.
create or replace function gdq.row_types(relations oid[]) returns oid[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return array(select c.reltype from pg_class c join pg_type t on t.oid = c.reltype
                where c.oid = any (relations)
                  and exists (select from pg_depend d
                               where d.refclassid = 'pg_type'::regclass and d.refobjid in (t.oid, t.typarray)
                                 and d.classid in ('pg_class'::regclass, 'pg_type'::regclass)
                                 and d.deptype = 'n'));
end
$$;
comment on function gdq.row_types(oid[]) is 'The row types of these relations that columns have.';

-- note_types(types, tag): records a gap for every captured table with a column of these types, or of a type made of
-- them. Result: whether all is recorded. Writes: as note_or_disarm().
create or replace function gdq.note_types(types oid[], tag text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
  made oid[];
  recorded boolean := true;
begin
  if coalesce(types, '{}') = '{}' then
    return true;
  end if;
  made := gdq.types_made_of(types);
  for r in select distinct a.attrelid as rel, q
             from pg_attribute a join pg_class c on c.oid = a.attrelid, gdq.queue_ids() q
            where a.atttypid = any (made) and not a.attisdropped and c.relkind in ('r', 'p')
              and gdq.capture_function(q, a.attrelid, 'i') is not null loop
    if gdq.note_or_disarm(r.q, r.rel, 'gap', tag || ': stored values read otherwise now, without events') then
      perform gdq.witness_types(r.rel);
    else
      recorded := false;
    end if;
  end loop;
  return recorded;
end
$$;
comment on function gdq.note_types(oid[], text) is
  'Records a gap for tables whose stored values of these types read otherwise.';

-- types_made_of(types): these types and every type that is made of them: arrays, domains, composites, ranges.
-- Writes: nothing.
create or replace function gdq.types_made_of(types oid[]) returns oid[]
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  with recursive made(t) as (
    select unnest(types)
    union
    select u.oid from made m, lateral (
      select ty.oid from pg_type ty where ty.typelem = m.t or (ty.typtype = 'd' and ty.typbasetype = m.t)
      union all
      select c.reltype from pg_attribute a join pg_class c on c.oid = a.attrelid
       where a.atttypid = m.t and c.reltype <> 0 and not a.attisdropped
      union all
      select r from pg_range, lateral (values (rngtypid), (rngmultitypid)) v(r) where rngsubtype = m.t) u
  )
  select array_agg(t) from made
$$;
comment on function gdq.types_made_of(oid[]) is 'These types and every type that is made of them.';
