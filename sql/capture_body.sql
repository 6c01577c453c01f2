-- capture_name(queue_id, relid, op): name of a capture function; op is i, u, d (row) or t (TRUNCATE). Named by oids, so
-- that it can be found by to_regprocedure() where control rows are invisible (an old snapshot). Writes: nothing.
create or replace function gdq.capture_name(queue_id integer, relid oid, op text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format('t%s_q%s_%s', relid, queue_id, op)
$$;
comment on function gdq.capture_name(integer, oid, text) is 'Name of a capture function in gdq_log.';

-- image_columns(columns, prefix): the log columns of one image, as text that goes on after a comma. Writes: nothing.
-- Every name is quoted: a column may be called like a word that PL/pgSQL reserves and SQL does not (begin, if).
create or replace function gdq.image_columns(columns jsonb, prefix text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = on
as $$
  select coalesce(string_agg(format(', %I', prefix || suffix), '' order by attnum), '')
    from jsonb_to_recordset(columns) c(attnum int, suffix text)
$$;
comment on function gdq.image_columns(jsonb, text) is 'The log columns of one image.';

-- image_values(columns, source): the values of one image in a capture function, source being OLD or NEW, as text that
-- goes on after a comma. User types become text by their output function, looked up by name only in pg_catalog: another
-- schema may not be open to the capture role. Writes: nothing.
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

-- capture_body(version_id, slot, op): the PL/pgSQL body of one capture function: one static, fully qualified INSERT into
-- the current segment and nothing else. op is i, u or d. Writes: nothing.
--   INSERT and DELETE go to the table of single images, an UPDATE to that of pairs; where both may not fit a page it is
--   two single images, o and n, under one number. Whether an UPDATE changed the key is left to the reader: a branch
--   would cost the writer more than the key's old value does.
create or replace function gdq.capture_body(version_id bigint, slot integer, op text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.table_version;
  log text;
  next_id text;
  header constant text := '(ev_id, ev_txid, ev_time, ev_op%s)';
  stamp constant text := '(%s, pg_catalog.txid_current(), pg_catalog.clock_timestamp(), %L%s)';
begin
  select * into strict v from gdq.table_version tv where tv.version_id = capture_body.version_id;
  select format('pg_catalog.nextval(''gdq_log.q%s_ev''::pg_catalog.regclass)', ct.queue_id) into next_id
    from gdq.captured_table ct where ct.table_id = v.table_id;
  select gdq.table_name(s.segment) into strict log from gdq.log_segment s
   where s.version_id = v.version_id and s.slot = capture_body.slot and s.pair = (op = 'u' and not v.split);
  if op = 'u' and v.split then
    return format(E'declare\n  ev_number bigint := %s;\nbegin\n  insert into %s %s\n  values %s, %s;\n  return null;\nend', next_id, log,
      format(header, gdq.image_columns(v.columns, 'row_')),
      format(stamp, 'ev_number', 'o', gdq.image_values(v.columns, 'OLD')), format(stamp, 'ev_number', 'n', gdq.image_values(v.columns, 'NEW')));
  end if;
  return format(E'begin\n  insert into %s %s\n  values %s;\n  return null;\nend', log,
    case op when 'u' then format(header, gdq.image_columns(v.columns, 'old_') || gdq.image_columns(v.columns, 'new_'))
            else format(header, gdq.image_columns(v.columns, 'row_')) end,
    case op when 'i' then format(stamp, next_id, 'I', gdq.image_values(v.columns, 'NEW'))
            when 'd' then format(stamp, next_id, 'D', gdq.image_values(v.columns, 'OLD'))
            else format(stamp, next_id, 'U', gdq.image_values(v.columns, 'OLD') || gdq.image_values(v.columns, 'NEW')) end);
end
$$;
comment on function gdq.capture_body(bigint, integer, text) is 'PL/pgSQL body of one capture function: one static INSERT into the current segment.';
