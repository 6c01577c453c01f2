-- guard_types(): records what ALTER TYPE does to stored values: a gap for every captured table with a column of the
-- type. RENAME VALUE of an enum and ADD or DROP ATTRIBUTE of a composite change how values read without touching the
-- tables that hold them. Harmless forms of the command are known by their text; where the text is not plain to see
-- (inside a function) a gap is recorded. Catalogs are read through the snapshot: a table made after that of a
-- REPEATABLE READ transaction is missed.
-- Writes: resync and the event log.
create or replace function gdq.guard_types() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if current_query() ~* ('^\s*alter\s+type\s+[\w.$"]+\s+'
                         '(add\s+value|rename\s+to|rename\s+attribute|set\s+schema|owner\s+to)\s[^;]*;?\s*$') then
    return;
  end if;
  perform gdq.note_types(array(select case when c.classid = 'pg_class'::regclass
                                           then (select k.reltype from pg_class k where k.oid = c.objid)
                                           else c.objid end
                                 from pg_event_trigger_ddl_commands() c), 'ALTER TYPE');
end
$$;
comment on function gdq.guard_types() is 'Records that ALTER TYPE changed how stored values read.';

-- guard_row_types(relations, tag): records what a command does to stored values of the row types of these relations:
-- a gap for every captured table with such a column. The command is ADD or DROP COLUMN of a table, or changes an
-- attribute's type with CASCADE. Nearly always there is no such column, which an index of pg_depend tells.
-- Writes: resync and the event log.
create or replace function gdq.guard_row_types(relations oid[], tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  types oid[] := array(select c.reltype from pg_class c join pg_type t on t.oid = c.reltype
                        where c.oid = any (relations)
                          and exists (select from pg_depend d
                                       where d.refclassid = 'pg_type'::regclass and d.refobjid in (t.oid, t.typarray)
                                         and d.classid in ('pg_class'::regclass, 'pg_type'::regclass)
                                         and d.deptype = 'n'));
begin
  if types <> '{}' then
    perform gdq.note_types(types, tag);
  end if;
end
$$;
comment on function gdq.guard_row_types(oid[], text) is 'Records that stored values of row types read otherwise.';

-- note_types(types, tag): a gap for every captured table with a column of these types or of one made of them.
-- Writes: resync and the event log.
create or replace function gdq.note_types(types oid[], tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
  made oid[] := gdq.types_made_of(types);
begin
  for r in select distinct a.attrelid as rel, q
             from pg_attribute a join pg_class c on c.oid = a.attrelid, gdq.queue_ids() q
            where a.atttypid = any (made) and not a.attisdropped and c.relkind in ('r', 'p')
              and gdq.capture_function(q, a.attrelid, 'i') is not null loop
    perform gdq.note_once(r.q, r.rel, 'gap', tag || ': stored values read otherwise now, without events');
  end loop;
end
$$;
comment on function gdq.note_types(oid[], text) is 'Records that stored values of these types read otherwise.';

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
