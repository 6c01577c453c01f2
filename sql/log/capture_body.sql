-- The text of capture functions: from the options of a table to one static INSERT. The calls, from the outside in:
--   capture_body()           the body: declaration, inserts, the announcement of a quiet log
--     row_inserts()          granularity row: one INSERT, inside the row filter
--     statement_inserts()    granularity statement: INSERT ... SELECT from the transition tables
--       log_insert()         one INSERT into the current segment
--         log_values()       the values of one image
--   compared_sql()           around the INSERT of an UPDATE: which large values it left as they were
-- Installs and gdq.doctor() compare this text letter by letter with the functions that are there.

-- capture_body(version_id, slot, op, event_slot): the PL/pgSQL body of one capture function. op: i, u or d.
--   Without options it is one static, fully qualified INSERT into the current segment and nothing else. INSERT and
--   DELETE go to the table of single images, an UPDATE to the table of pairs; where both images may not fit a page, an
--   UPDATE is two single images, o and n, under one number. The reader finds out whether an UPDATE changed the key: a
--   branch would cost the writer more than the key's old value does.
--   event_slot: the slot of the event log in which the function announces its change, see update_activity(); NULL: it
--   announces nothing. The announcement is an event of kind "active", written in the transaction of the change. No
--   writer can prevent it: it depends on no state of the session.
-- Writes: nothing.
create or replace function gdq.capture_body(version_id bigint, slot integer, op text, event_slot integer) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.table_version;
  t gdq.captured_table;
  number text;
begin
  select * into strict v from gdq.table_version tv where tv.version_id = capture_body.version_id;
  select * into strict t from gdq.captured_table ct where ct.table_id = v.table_id;
  number := format($sql$pg_catalog.nextval('gdq_log.q%s_ev'::pg_catalog.regclass)$sql$, t.queue_id);
  return concat(
    case when t.granularity = 'row' and op = 'u' and v.split then
      format(E'declare\n  ev_number bigint := %s;\n', number) end,
    E'begin\n',
    case t.granularity when 'row' then gdq.row_inserts(t, v, slot, op, number)
                       else gdq.statement_inserts(t, v, slot, op, number) end,
    case when event_slot is not null then
      format(E'  insert into gdq_log.q%s_s%s (ev_txid, ev_kind, ev_table) values (%s, %L, %L::pg_catalog.oid);\n',
        t.queue_id, event_slot, 'pg_catalog.txid_current()', 'active', t.relid::oid) end,
    E'  return null;\nend');
end
$$;
comment on function gdq.capture_body(bigint, integer, text, integer) is
  'PL/pgSQL body of one capture function: one static INSERT into the current segment.';

-- row_inserts(t, v, slot, op, number): the statements by which a capture function of granularity row logs one change.
-- With a row filter, an UPDATE is a D when only the old row matches, an I when only the new row does. number: SQL for
-- the number of the change. Writes: nothing.
create or replace function gdq.row_inserts(t gdq.captured_table, v gdq.table_version, slot integer, op text,
                                           number text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  work text;
begin
  work := format('  %s;', case
    when op = 'i' then gdq.log_insert(t, v, slot, 'I', number, null)
    when op = 'd' then gdq.log_insert(t, v, slot, 'D', number, null)
    when v.split then gdq.log_insert(t, v, slot, 'S', 'ev_number', null)
    else gdq.log_insert(t, v, slot, 'U', number, null) end);
  if op = 'u' and not v.split then
    work := gdq.compared_sql(v.columns, work);
  end if;
  if t.row_filter is not null and op = 'u' then
    work := format($sql$  if %1$s then
  if %2$s then
%3$s
  else
  %4$s;
  end if;
  elsif %2$s then
  %5$s;
  end if;$sql$,
      gdq.filter_sql(t.row_filter, v.filter_names, 'OLD'),
      gdq.filter_sql(t.row_filter, v.filter_names, 'NEW'),
      work,
      gdq.log_insert(t, v, slot, 'D', number, null),
      gdq.log_insert(t, v, slot, 'I', number, null));
  elsif t.row_filter is not null then
    work := format($sql$  if %s then
%s
  end if;$sql$,
      gdq.filter_sql(t.row_filter, v.filter_names, case op when 'i' then 'NEW' else 'OLD' end),
      work);
  end if;
  return work || E'\n';
end
$$;
comment on function gdq.row_inserts(gdq.captured_table, gdq.table_version, integer, text, text) is
  'The statements by which a capture function of granularity row logs one change.';

-- statement_inserts(t, v, slot, op, number): the statements by which a capture function of granularity statement logs
-- one statement: INSERT ... SELECT from a transition table; for an UPDATE all old images as D, then all new ones as I.
-- Which old image belongs to which new one is unknown; in this order they can be applied one after the other even where
-- rows exchanged their keys. number: SQL for the number of a change. Writes: nothing.
create or replace function gdq.statement_inserts(t gdq.captured_table, v gdq.table_version, slot integer, op text,
                                                 number text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  partitioned boolean := (select c.relkind = 'p' from pg_class c where c.oid = t.relid);
begin
  return concat(
    case when partitioned then
      format(E'  if %s then\n    return null;\n  end if;\n', gdq.detached_sql(t.relid)) end,
    (select string_agg(format(E'  %s%s;\n', gdq.log_insert(t, v, slot, image.op, number, image.source),
                              ' where ' || gdq.filter_sql(t.row_filter, v.filter_names, 'r')), '' order by image.op)
       from (values ('D', 'gdq_old', 'ud'), ('I', 'gdq_new', 'iu')) image(op, source, ops)
      where strpos(image.ops, statement_inserts.op) > 0));
end
$$;
comment on function gdq.statement_inserts(gdq.captured_table, gdq.table_version, integer, text, text) is
  'The statements by which a capture function of granularity statement logs one statement.';

-- log_insert(t, v, slot, op, number, source): the INSERT of one change into the current segment, to which a WHERE may
-- be added. op: I, D, U, or S for an UPDATE whose images are two rows under one number. number: SQL for that number.
-- source: a transition table; NULL where the row is NEW or OLD. Writes: nothing.
create or replace function gdq.log_insert(t gdq.captured_table, v gdq.table_version, slot integer, op text, number text,
                                          source text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  log text;
  header text;
  same text := (select string_agg(', ' || c.same, '' order by c.attnum)
                  from jsonb_to_recordset(v.columns) c(attnum int, same text));
  stamp constant text := '%s, pg_catalog.txid_current(), pg_catalog.clock_timestamp(), %L%s%s';
  origin text := case when t.origin then ', ' || gdq.origin_sql() end;
begin
  select gdq.table_name(s.segment) into strict log
    from gdq.log_segment s
   where s.version_id = v.version_id and s.slot = log_insert.slot and s.pair = (op = 'U');
  header := concat('ev_id, ev_txid, ev_time, ev_op', case when t.origin then ', ev_origin' end,
    case op when 'U' then gdq.image_columns(gdq.log_columns(v), 'old_') || gdq.image_columns(gdq.log_columns(v), 'new_')
                       || coalesce(same, '')
            else gdq.image_columns(gdq.log_columns(v), 'row_') end);
  if source is not null then
    return format(E'insert into %s (%s)\n  select %s from %s r',
      log, header, format(stamp, number, op, origin, gdq.log_values(v, 'r')), source);
  end if;
  return format(E'insert into %s (%s)\n  values (%s)', log, header, case op
    when 'I' then format(stamp, number, 'I', origin, gdq.log_values(v, 'NEW'))
    when 'D' then format(stamp, number, 'D', origin, gdq.log_values(v, 'OLD'))
    when 'U' then format(stamp, number, 'U', origin,
                         concat(gdq.log_values(v, 'OLD', true), gdq.log_values(v, 'NEW', true), same))
    else concat_ws('), (', format(stamp, number, 'o', origin, gdq.log_values(v, 'OLD')),
                           format(stamp, number, 'n', origin, gdq.log_values(v, 'NEW'))) end);
end
$$;
comment on function gdq.log_insert(gdq.captured_table, gdq.table_version, integer, text, text, text) is
  'The INSERT of one change into the current segment of a log.';

-- log_values(v, source, once): the values of one image of a version in a capture function, as text that begins with
-- a comma: one for each logged column, or in format json the whole row as one text. source: OLD, NEW or the alias of a
-- transition table. once: without the values that compared_sql() has found to be the same: in the old image, and in the
-- new one of a column with omit. Writes: nothing.
create or replace function gdq.log_values(v gdq.table_version, source text, once boolean default false) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select case when v.shape is null then gdq.image_values(v.columns, source, once)
              -- .* since the alias of a transition table may be the name of a column too
              else format(', pg_catalog.textin(pg_catalog.record_out(%s.*))', source) end
$$;
comment on function gdq.log_values(gdq.table_version, text, boolean) is
  'The values of one image in a capture function.';

-- image_values(columns, source, once): log_values() in format typed. User types become text by their output function,
-- which is named only where it is one of pg_catalog: another schema may not be open to the capture role. Writes:
-- nothing.
create or replace function gdq.image_values(columns jsonb, source text, once boolean) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = on
as $$
  select coalesce(string_agg(', ' || case when once and same is not null and (omit or source = 'OLD')
                                          then format('case when %s is not true then %s end', same, logged)
                                          else logged end, '' order by attnum), '')
    from jsonb_to_recordset(columns) c(attnum int, name text, as_text boolean, output text, same text, omit boolean),
         format('%s.%I', source, name) value,
         lateral (select case
           when not as_text then value
           when output is not null then format('pg_catalog.textin(%s(%s))', output, value)
           else format(
             $sql$case when pg_catalog.num_nulls(%1$s) operator(pg_catalog.=) 0 then %2$s end$sql$,
             value, format($sql$pg_catalog.format('%%s', %s)$sql$, value)) end) l(logged)
$$;
comment on function gdq.image_values(jsonb, text, boolean) is
  'The values of one image in a capture function of format typed.';

-- compared_sql(columns, work): the INSERT work of an UPDATE in a block of PL/pgSQL that first finds the large values
-- which the UPDATE left as they were; work itself where the version does not ask for this.
--   A value counts as large from 2,000 bytes, compressed as it is stored: the server moves such values out of line.
--   Values of one size are compared as bytes: this runs no operator of the application's, and distinguishes 1.0 from
--   1.00. Reading both costs little beside logging one of them again. A row that gets another key is logged whole
--   where values are omitted: a reader finds them by the key.
-- Writes: nothing.
create or replace function gdq.compared_sql(columns jsonb, work text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = on
as $$
  select coalesce(E'  declare\n' || string_agg(format(E'  %s boolean := %s;\n', same, replace(
             $sql$case when pg_catalog.pg_column_size(NEW.%I) operator(pg_catalog.>=) 2000
      and pg_catalog.pg_column_size(OLD.%I) operator(pg_catalog.=) pg_catalog.pg_column_size(NEW.%I)
      and pg_catalog.record_image_eq(row(OLD.%I), row(NEW.%I))$sql$,
             '%I', quote_ident(name)) || case when omit then key_kept else '' end || ' then true end'),
             '' order by attnum) || format(E'  begin\n%s\n  end;', work), work)
    from jsonb_to_recordset(columns) c(attnum int, name text, same text, omit boolean),
         (select format(E'\n      and pg_catalog.record_image_eq(row(%s), row(%s))',
                        string_agg(format('OLD.%I', k.name), ', ' order by k.attnum),
                        string_agg(format('NEW.%I', k.name), ', ' order by k.attnum)) as key_kept
            from jsonb_to_recordset(columns) k(attnum int, name text, key boolean) where k.key) key
   where same is not null
$$;
comment on function gdq.compared_sql(jsonb, text) is
  'The INSERT of an UPDATE, in a block that first finds the large values which it left as they were.';

-- origin_sql(): SQL expression of the origin of a change: the setting gdq.origin of the session, NULL when it is not
-- set. Operators are qualified: nullif() would use the session's own. Writes: nothing.
create or replace function gdq.origin_sql() returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format($sql$case when %1$s operator(pg_catalog.<>) '' then %1$s end$sql$,
                $sql$pg_catalog.current_setting('gdq.origin', true)$sql$)
$$;
comment on function gdq.origin_sql() is 'SQL expression of the origin of a change.';

-- detached_sql(relid): SQL condition for a trigger function, true when its relation is no longer a partition of a
-- captured root: a detached partition keeps the triggers. Writes: nothing.
create or replace function gdq.detached_sql(relid oid) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format($sql$TG_RELID operator(pg_catalog.<>) %1$s::pg_catalog.oid
     and not exists (select from pg_catalog.pg_partition_ancestors(TG_RELID) a where %2$s)$sql$,
                relid,
                format($sql$a.relid::pg_catalog.oid operator(pg_catalog.=) %s::pg_catalog.oid$sql$, relid))
$$;
comment on function gdq.detached_sql(oid) is
  'SQL condition for a trigger function, true when its relation was detached from a root.';

-- filter_sql(row_filter, names, source): a row filter as a SQL expression; NULL for no filter. names: from
-- describe_filter(). source: OLD, NEW or the alias of a transition table. Writes: nothing.
create or replace function gdq.filter_sql(row_filter jsonb, names jsonb, source text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = on
as $$
  select string_agg(case jsonb_typeof(part) when 'number' then format('%s.%I', source, names->>(part#>>'{}'))
                                            else part#>>'{}' end, '' order by n)
    from jsonb_array_elements(row_filter->'parts') with ordinality p(part, n)
$$;
comment on function gdq.filter_sql(jsonb, jsonb, text) is 'A row filter as a SQL expression.';
