-- The text of capture functions: from the options of a table to one static INSERT.

-- capture_body(version_id, slot, op): the PL/pgSQL body of one capture function. op is i, u or d. Writes: nothing.
--   Without options it is one static, fully qualified INSERT into the current segment and nothing else: INSERT and DELETE
--   go to the table of single images, an UPDATE to that of pairs; where both may not fit a page it is two single images,
--   o and n, under one number. Whether an UPDATE changed the key is left to the reader: a branch would cost the writer
--   more than the key's old value does.
--   With a row filter an UPDATE of a row that only matched before is a D, of one that only matches now an I.
create or replace function gdq.capture_body(version_id bigint, slot integer, op text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.table_version;
  t gdq.captured_table;
  number text;
  shape text := case op when 'i' then 'I' when 'd' then 'D' else 'U' end;
  declaration text := '';
  work text;
begin
  select * into strict v from gdq.table_version tv where tv.version_id = capture_body.version_id;
  select * into strict t from gdq.captured_table ct where ct.table_id = v.table_id;
  number := format('pg_catalog.nextval(''gdq_log.q%s_ev''::pg_catalog.regclass)', t.queue_id);
  if t.granularity = 'statement' then
    return gdq.statement_body(version_id, slot, op);
  end if;
  if op = 'u' and v.split then
    shape := 'S';
    declaration := format(E'declare\n  ev_number bigint := %s;\n', number);
  end if;
  work := format('  %s;', gdq.log_insert(version_id, slot, shape, case shape when 'S' then 'ev_number' else number end, null));
  if t.row_filter is not null and op = 'u' then
    work := format(E'  if %1$s then\n  if %2$s then\n%3$s\n  else\n  %4$s;\n  end if;\n  elsif %2$s then\n  %5$s;\n  end if;',
      gdq.filter_sql(t.row_filter, v.filter_names, 'OLD'), gdq.filter_sql(t.row_filter, v.filter_names, 'NEW'), work,
      gdq.log_insert(version_id, slot, 'D', number, null), gdq.log_insert(version_id, slot, 'I', number, null));
  elsif t.row_filter is not null then
    work := format(E'  if %s then\n%s\n  end if;', gdq.filter_sql(t.row_filter, v.filter_names, case op when 'i' then 'NEW' else 'OLD' end), work);
  end if;
  return format(E'%sbegin\n%s\n  return null;\nend', declaration, work);
end
$$;
comment on function gdq.capture_body(bigint, integer, text) is 'PL/pgSQL body of one capture function: one static INSERT into the current segment.';

-- statement_body(version_id, slot, op): the body of a capture function of granularity statement: one INSERT ... SELECT
-- from a transition table; for an UPDATE all old images as D, then all new ones as I. Which old belongs to which new is
-- not known, and in this order they can be applied one after the other even where keys were exchanged.
-- A partition that was detached keeps the triggers: it is no part of the root any more. Writes: nothing.
create or replace function gdq.statement_body(version_id bigint, slot integer, op text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.table_version;
  t gdq.captured_table;
  work text;
begin
  select * into strict v from gdq.table_version tv where tv.version_id = statement_body.version_id;
  select * into strict t from gdq.captured_table ct where ct.table_id = v.table_id;
  select string_agg(format(E'  %s%s;\n',
           gdq.log_insert(version_id, slot, image.op, format('pg_catalog.nextval(''gdq_log.q%s_ev''::pg_catalog.regclass)', t.queue_id), image.source),
           ' where ' || gdq.filter_sql(t.row_filter, v.filter_names, 'r')), '' order by image.op) into work
    from (values ('D', 'gdq_old', 'ud'), ('I', 'gdq_new', 'iu')) image(op, source, ops) where strpos(image.ops, statement_body.op) > 0;
  return format(E'begin\n%s%s  return null;\nend',
    case when (select c.relkind from pg_class c where c.oid = t.relid) = 'p' then
      format($f$  if TG_RELID operator(pg_catalog.<>) %1$s::pg_catalog.oid
     and not exists (select from pg_catalog.pg_partition_ancestors(TG_RELID) a where a.relid::pg_catalog.oid operator(pg_catalog.=) %1$s::pg_catalog.oid) then
    return null;
  end if;
$f$, t.relid::oid) else '' end, work);
end
$$;
comment on function gdq.statement_body(bigint, integer, text) is 'Body of a capture function that logs a whole statement.';

-- log_insert(version_id, slot, op, number, source): the INSERT of one change into the current segment, up to its end or
-- a WHERE. op: I, D, U, or S for an UPDATE whose images are two rows under one number; number: SQL for its number;
-- source: a transition table, NULL where the row is NEW or OLD. Writes: nothing.
create or replace function gdq.log_insert(version_id bigint, slot integer, op text, number text, source text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.table_version;
  origin boolean;
  log text;
  header text;
  stamp constant text := '%s, pg_catalog.txid_current(), pg_catalog.clock_timestamp(), %L%s%s';
  origin_value text;
  images text;
begin
  select * into strict v from gdq.table_version tv where tv.version_id = log_insert.version_id;
  select ct.origin, case when ct.origin then ', ' || gdq.origin_sql() else '' end into strict origin, origin_value
    from gdq.captured_table ct where ct.table_id = v.table_id;
  select gdq.table_name(s.segment) into strict log from gdq.log_segment s
   where s.version_id = v.version_id and s.slot = log_insert.slot and s.pair = (op = 'U');
  header := format('(ev_id, ev_txid, ev_time, ev_op%s%s)', case when origin then ', ev_origin' else '' end,
    case op when 'U' then gdq.image_columns(gdq.log_columns(v), 'old_') || gdq.image_columns(gdq.log_columns(v), 'new_') else gdq.image_columns(gdq.log_columns(v), 'row_') end);
  if source is not null then
    return format(E'insert into %s %s\n  select %s from %s r', log, header,
      format(stamp, number, op, origin_value, gdq.log_values(v, 'r')), source);
  end if;
  images := case op when 'I' then format(stamp, number, 'I', origin_value, gdq.log_values(v, 'NEW'))
                    when 'D' then format(stamp, number, 'D', origin_value, gdq.log_values(v, 'OLD'))
                    when 'U' then format(stamp, number, 'U', origin_value, gdq.log_values(v, 'OLD') || gdq.log_values(v, 'NEW'))
                    else format(stamp, number, 'o', origin_value, gdq.log_values(v, 'OLD')) || '), ('
                         || format(stamp, number, 'n', origin_value, gdq.log_values(v, 'NEW')) end;
  return format(E'insert into %s %s\n  values (%s)', log, header, images);
end
$$;
comment on function gdq.log_insert(bigint, integer, text, text, text) is 'The INSERT of one change into the current segment of a log.';

-- image_values(columns, source): the values of one image in a capture function, source being OLD, NEW or the alias of a
-- transition table, as text that goes on after a comma. User types become text by their output function, looked up by
-- name only in pg_catalog: another schema may not be open to the capture role. Writes: nothing.
create or replace function gdq.image_values(columns jsonb, source text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = on
as $$
  select coalesce(string_agg(', ' || case
           when not as_text then format('%s.%I', source, name)
           when output is not null then format('pg_catalog.textin(%s(%s.%I))', output, source, name)
           else format('case when pg_catalog.num_nulls(%1$s.%2$I) operator(pg_catalog.=) 0 then pg_catalog.format(''%%s'', %1$s.%2$I) end', source, name)
         end, '' order by attnum), '')
    from jsonb_to_recordset(columns) c(attnum int, name text, as_text boolean, output text)
$$;
comment on function gdq.image_values(jsonb, text) is 'The values of one image in a capture function.';

create or replace function gdq.log_values(v gdq.table_version, source text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select case when v.shape is null then gdq.image_values(v.columns, source) else format(', pg_catalog.textin(pg_catalog.record_out(%s))', source) end
$$;
comment on function gdq.log_values(gdq.table_version, text) is 'The values of one image in a capture function.';

-- origin_sql(): SQL expression of where a change comes from: the setting gdq.origin of the session, NULL when it is not
-- set. Operators are qualified: nullif() would use the session's own. Writes: nothing.
create or replace function gdq.origin_sql() returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select 'case when pg_catalog.current_setting(''gdq.origin'', true) operator(pg_catalog.<>) '''' then pg_catalog.current_setting(''gdq.origin'', true) end'::text
$$;
comment on function gdq.origin_sql() is 'SQL expression of the origin of a change.';

-- truncate_body(queue_id, relid, origin): body of the TRUNCATE trigger function of a captured table and its partitions.
-- origin: whether the event says where the change comes from, see capture_body().
-- One event per statement and captured root: TRUNCATE of a root also fires the triggers of its partitions. All BEFORE
-- triggers of a statement run before all its AFTER triggers, so the relations met since the last AFTER are this
-- statement's; they are kept in a transaction-local setting, which savepoints roll back too. A partition that was
-- detached still has the triggers: it is no event of the root any more. Writes: nothing.
create or replace function gdq.truncate_body(queue_id integer, relid oid, origin boolean) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format($f$declare
  met pg_catalog.text := coalesce(pg_catalog.current_setting('gdq.truncate_%2$s_%1$s', true), '');
begin
  if TG_WHEN operator(pg_catalog.=) 'BEFORE' then
    if pg_catalog.left(met, 1) operator(pg_catalog.<>) 'b' then
      met := 'b,';
    end if;
    perform pg_catalog.set_config('gdq.truncate_%2$s_%1$s', pg_catalog.concat(met, TG_RELID, ','), true);
    return null;
  end if;
  perform pg_catalog.set_config('gdq.truncate_%2$s_%1$s', pg_catalog.concat('a', pg_catalog.substr(met, 2)), true);
  if TG_RELID operator(pg_catalog.<>) %2$s::pg_catalog.oid
     and not exists (select from pg_catalog.pg_partition_ancestors(TG_RELID) a where a.relid::pg_catalog.oid operator(pg_catalog.=) %2$s::pg_catalog.oid) then
    return null;
  elsif exists (select from pg_catalog.pg_partition_ancestors(TG_RELID) a
              where a.relid operator(pg_catalog.<>) TG_RELID
                and pg_catalog.strpos(met, pg_catalog.concat(',', a.relid::pg_catalog.oid, ',')) operator(pg_catalog.>) 0) then
    return null;
  end if;
  perform gdq_log.q%1$s_event('truncate', %2$s::pg_catalog.oid, %3$s);
  return null;
end$f$, queue_id, relid,
    case when origin then format($f$pg_catalog.jsonb_strip_nulls(pg_catalog.jsonb_build_object('origin', %2$s, 'partition',
    case when TG_RELID operator(pg_catalog.<>) %1$s::pg_catalog.oid then pg_catalog.format('%%I.%%I', TG_TABLE_SCHEMA, TG_TABLE_NAME) end))$f$, relid, gdq.origin_sql())
    else format($f$case when TG_RELID operator(pg_catalog.<>) %1$s::pg_catalog.oid
    then pg_catalog.jsonb_build_object('partition', pg_catalog.format('%%I.%%I', TG_TABLE_SCHEMA, TG_TABLE_NAME)) end$f$, relid) end)
$$;
comment on function gdq.truncate_body(integer, oid, boolean) is 'Body of the TRUNCATE trigger function of a captured table.';

-- Batches must not look at the logs of a thousand tables when three of them change. So a log that has been empty for
-- long is quiet: its capture functions announce each change by a row of kind "active" in the queue's event log, in the
-- same transaction, and a batch looks only at logs that are not quiet or were announced in its own interval. Nobody can
-- keep a change from being announced: there is no state in the session that a writer could forge. A log that has rows
-- again goes back to busy and pays nothing.

-- announcing_body(body, queue_id, relid): a capture function's body that announces its change too. Writes: nothing.
create or replace function gdq.announcing_body(body text, queue_id integer, relid oid) returns text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  -- at the last return: an earlier one is of a change that is not logged
  select regexp_replace(body, '(.*)return null;', format('\1insert into gdq_log.q%s_s%s (ev_txid, ev_kind, ev_table) '
           'values (pg_catalog.txid_current(), ''active'', %L::pg_catalog.oid);%sreturn null;', er.queue_id, er.current_slot, relid, E'\n  '))
    from gdq.event_ring er where er.queue_id = announcing_body.queue_id
$$;
comment on function gdq.announcing_body(text, integer, oid) is 'A capture function''s body that announces its change in the event log too.';

-- filter_sql(row_filter, names, source): a row filter as a SQL expression on OLD, NEW or the alias of a transition table;
-- names from describe_filter(). NULL for no filter. Writes: nothing.
create or replace function gdq.filter_sql(row_filter jsonb, names jsonb, source text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = on
as $$
  select string_agg(case jsonb_typeof(part) when 'number' then format('%s.%I', source, names->>(part#>>'{}')) else part#>>'{}' end, '' order by n)
    from jsonb_array_elements(row_filter->'parts') with ordinality p(part, n)
$$;
comment on function gdq.filter_sql(jsonb, jsonb, text) is 'A row filter as a SQL expression.';
