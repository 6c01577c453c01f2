-- capture_name(queue_id, relid, op): name of a capture function; op is i, u, d (row) or t (TRUNCATE). Named by oids, so
-- that it can be found by to_regprocedure() where control rows are invisible (an old snapshot). Writes: nothing.
create or replace function gdq.capture_name(queue_id integer, relid oid, op text) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format('t%s_q%s_%s', relid, queue_id, op)
$$;
comment on function gdq.capture_name(integer, oid, text) is 'Name of a capture function in gdq_log.';

-- capture_values(columns, op, key_row, old_row, new_row, ev_id, pad): the column list and the VALUES row of one log row,
-- as text. key_row, old_row and new_row say where the key and the images come from: OLD, NEW, or NULL for a row without
-- them, whose columns are left out, or padded with nulls where several rows share one column list. Writes: nothing.
create or replace function gdq.capture_values(columns jsonb, op text, key_row text, old_row text, new_row text,
                                              ev_id text, pad boolean, out names text, out vals text)
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select 'ev_id, ev_txid, ev_time, ev_op' || coalesce(string_agg(format(', %I', col), '' order by place, attnum), ''),
         format('%s, pg_catalog.txid_current(), pg_catalog.clock_timestamp(), %L', ev_id, op)
         || coalesce(string_agg(', ' || case
              when source is null then 'null'
              when not as_text then format('%s.%I', source, name)
              when output is not null then format('pg_catalog.textin(%s(%s.%I))', output, source, name)
              else format('case when pg_catalog.num_nulls(%1$s.%2$I) operator(pg_catalog.=) 0 then pg_catalog.format(''%%s'', %1$s.%2$I) end', source, name)
            end, '' order by place, attnum), '')
    from jsonb_to_recordset(columns)
           c(attnum int, name text, as_text boolean, output text, log_key text, log_old text, log_new text),
         lateral (values (1, log_key, key_row), (2, log_old, old_row), (3, log_new, new_row)) image(place, col, source)
   where col is not null and (pad or source is not null)
$$;
comment on function gdq.capture_values(jsonb, text, text, text, text, text, boolean) is 'Column list and VALUES row of one log row.';

-- capture_body(version_id, segment, op): the PL/pgSQL body of one capture function: static, fully qualified INSERTs
-- into the current segment and nothing else. op is i, u or d. Writes: nothing.
--   An UPDATE is one row with both images, or two rows 'o' and 'n' under one number when they may not fit a page.
--   pk: the images are the key and the included columns; an UPDATE that changes the key is a D and an I. Keys are
--   compared as images, which runs no operator of the application's and tells 1.0 from 1.00.
--   Every name is quoted: a column may be called like a word that PL/pgSQL reserves and SQL does not (begin, if).
create or replace function gdq.capture_body(version_id bigint, segment regclass, op text) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set quote_all_identifiers = on
as $$
declare
  v gdq.table_version;
  mode text;
  log text;
  old_keys text;
  new_keys text;
  next_id text;
  updated text;
begin
  select * into strict v from gdq.table_version tv where tv.version_id = capture_body.version_id;
  select ct.mode, format('pg_catalog.nextval(''gdq_log.q%s_ev''::pg_catalog.regclass)', ct.queue_id) into mode, next_id
    from gdq.captured_table ct where ct.table_id = v.table_id;
  log := gdq.table_name(segment);
  if op = 'i' then
    return (select format(E'begin\n  insert into %s (%s)\n  values (%s);\n  return null;\nend', log, names, vals)
              from gdq.capture_values(v.columns, 'I', 'NEW', null, 'NEW', next_id, false));
  elsif op = 'd' then
    return (select format(E'begin\n  insert into %s (%s)\n  values (%s);\n  return null;\nend', log, names, vals)
              from gdq.capture_values(v.columns, 'D', 'OLD', 'OLD', null, next_id, false));
  elsif v.split then
    select format(E'  declare\n    ev_number bigint := %s;\n  begin\n    insert into %s (%s)\n    values (%s), (%s);\n  end;\n',
                  next_id, log, o.names, o.vals, n.vals) into updated
      from gdq.capture_values(v.columns, 'o', 'NEW', 'OLD', null, 'ev_number', true) o,
           gdq.capture_values(v.columns, 'n', 'NEW', null, 'NEW', 'ev_number', true) n;
  else
    select format(E'  insert into %s (%s)\n  values (%s);\n', log, names, vals) into updated
      from gdq.capture_values(v.columns, 'U', 'NEW', 'OLD', 'NEW', next_id, false);
  end if;
  if mode = 'full' then
    return format(E'begin\n%s  return null;\nend', updated);
  end if;
  select string_agg(format('OLD.%I', name), ', ' order by attnum), string_agg(format('NEW.%I', name), ', ' order by attnum)
    into old_keys, new_keys
    from jsonb_to_recordset(v.columns) c(attnum int, name text, log_key text) where log_key is not null;
  return (select format(E'begin\n  if pg_catalog.record_image_ne(row(%s), row(%s)) then\n  insert into %s (%s)\n  values (%s), (%s);\n'
                        || E'  else\n%s  end if;\n  return null;\nend',
                        old_keys, new_keys, log, d.names, d.vals, i.vals, updated)
            from gdq.capture_values(v.columns, 'D', 'OLD', 'OLD', null, next_id, true) d,
                 gdq.capture_values(v.columns, 'I', 'NEW', null, 'NEW', next_id, true) i);
end
$$;
comment on function gdq.capture_body(bigint, regclass, text) is 'PL/pgSQL body of one capture function: static INSERTs into the current segment.';
