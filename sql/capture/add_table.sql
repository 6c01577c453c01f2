-- add_table(queue, tbl, mode, key, include, columns, exclude, allow_rls, ...): captures a table from now on.
--   mode full: both images of every change; columns or exclude choose the logged columns.
--   mode pk: the key, and old and new values of the columns in include.
--   key: the identifying columns when they are not the primary key; they need a unique index and NOT NULL.
--   "where": a condition on the row, see parse_filter(); a row that comes to match is an insert, one that no longer does a delete.
--   operations: those to capture, of insert, update, delete, truncate.
--   granularity: row, or statement for bulk loads: an UPDATE is then logged as deletes and inserts.
--   always: capture with session_replication_role = replica too; the caller needs the rights of the table's owner.
--   allow_rls: also with row level security, which consumers pass by; without it a table that has it is refused.
--   origin: log the session's setting gdq.origin with every change, so that consumers can leave out what they wrote.
--   pin_search_path: for sessions that change their search_path for every request.
--   format typed: a log column for each column, of its type; json: the whole row in one value, whatever the mode, so that
--   DDL which nobody follows cannot make a write fail. NULL: typed where the event triggers follow DDL, else json.
-- A partitioned table is captured at its root, with all partitions that it has and will have.
-- Writes: control rows, log segments, functions, triggers. Errors: as refuse_table(); 22023 for options that do not go
-- together; 54000 when an image cannot fit; 55P03 when writers hold the table: nothing is changed, try again.
create or replace function gdq.add_table(queue text, tbl regclass, mode text default 'full', key text[] default null,
  include text[] default null, columns text[] default null, exclude text[] default null, allow_rls boolean default false,
  "where" text default null, operations text[] default '{insert,update,delete,truncate}', granularity text default 'row',
  always boolean default false, origin boolean default false, pin_search_path boolean default false, format text default null)
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  name text := gdq.table_name(tbl);
  id integer;
  described jsonb;
  log_format text := coalesce(format, case when gdq.event_triggers_on() then 'typed' else 'json' end);
begin
  perform gdq.require_read_committed('add_table');
  perform gdq.refuse_table(queue_of, tbl, allow_rls, log_format);
  perform gdq.refuse_partitions(tbl);
  perform gdq.check_options(tbl, mode, include, columns, exclude, operations, granularity, always, "where", log_format);
  begin
    perform gdq.create_capture(queue_of, tbl, operations, granularity, always, origin);
  exception when lock_not_available then
    raise exception 'table % is busy: no lock within 500 ms', name using errcode = 'lock_not_available',
      hint = 'Nothing was changed. Try again when no long transaction holds the table.';
  end;
  perform pg_advisory_xact_lock(gdq.lock_key('capture', tbl));
  insert into gdq.captured_table (queue_id, relid, table_name, mode, format, key_attnums, include_attnums, column_attnums, exclude_attnums,
                                                        operations, granularity, always, origin, pin_search_path, allow_rls, row_filter)
    values (queue_of, tbl, name, mode, log_format, gdq.column_numbers(tbl, key, 'key'), gdq.column_numbers(tbl, include, 'include'),
            gdq.column_numbers(tbl, columns, 'columns'), gdq.column_numbers(tbl, exclude, 'exclude'),
            array(select o from unnest('{insert,update,delete,truncate}'::text[]) o where o = any (operations)), granularity, always, origin, pin_search_path, coalesce(allow_rls, false),
            gdq.parse_filter(tbl, "where"))
    returning table_id into id;
  if gdq.json_fault(id) is not null then
    raise exception '%', gdq.json_fault(id) using errcode = 'feature_not_supported',
      hint = 'Make the partition anew with CREATE TABLE ... PARTITION OF, or capture in format typed, which needs the event triggers.';
  end if;
  described := gdq.describe_table(id);
  perform gdq.check_key(id, described);
  perform gdq.arm(gdq.create_version(id, described, 3), 0);
  insert into gdq.captured_leaf (table_id, leaf) select id, p.relid from pg_partition_tree(tbl) p where p.relid <> tbl;
  perform gdq.note_catalog(id);
  perform gdq.warn_wide(tbl, mode, (select array_agg((c->>'attnum')::smallint) from jsonb_array_elements(described) c));
end
$$;
comment on function gdq.add_table(text, regclass, text, text[], text[], text[], text[], boolean, text, text[], text, boolean, boolean, boolean, text) is
  'Captures the changes of a table from now on, in mode full or pk.';

-- check_options(tbl, ...): error when options of capture do not go together or do not fit a table; as add_table().
-- Writes: nothing. Errors: 22023; 42501 for always on a table of others.
create or replace function gdq.check_options(tbl regclass, mode text, include text[], columns text[], exclude text[],
  operations text[], granularity text, always boolean, "where" text, format text) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  known constant text[] := '{insert,update,delete,truncate}';
  other regclass;
begin
  if mode is null or mode not in ('full', 'pk') then
    raise exception 'unknown mode "%"', mode using errcode = 'invalid_parameter_value', hint = 'mode is full or pk.';
  elsif mode = 'full' and include is not null then
    raise exception 'include goes with mode pk: mode full logs every column'
      using errcode = 'invalid_parameter_value', hint = 'Leave include out, or say mode pk.';
  elsif mode = 'pk' and (columns is not null or exclude is not null) then
    raise exception 'columns and exclude go with mode full' using errcode = 'invalid_parameter_value',
      hint = 'Name the columns to log beside the key with include.';
  elsif columns is not null and exclude is not null then
    raise exception 'give columns or exclude, not both'
      using errcode = 'invalid_parameter_value', hint = 'columns names those to log, exclude those not to.';
  elsif format not in ('typed', 'json') then
    raise exception 'unknown format "%"', format using errcode = 'invalid_parameter_value', hint = 'format is typed or json.';
  elsif format = 'json' and (columns is not null or exclude is not null or "where" is not null) then
    raise exception 'columns, exclude and where go with format typed: format json logs whole rows' using errcode = 'invalid_parameter_value',
      hint = case when not gdq.event_triggers_on() then 'format is json where the event triggers of gdq are missing or off. ' else '' end
             || 'Leave them out, or capture in mode pk to hand on the key alone.';
  elsif columns = '{}' then
    raise exception 'columns: name at least one column'
      using errcode = 'invalid_parameter_value', hint = 'Leave columns out to log them all.';
  elsif operations is null or not operations <@ known or not operations && array_remove(known, 'truncate') then
    raise exception 'operations: % is no list of operations to capture', coalesce(operations::text, 'null')
      using errcode = 'invalid_parameter_value', hint = 'Some of insert, update, delete, and truncate beside them.';
  elsif granularity is null or granularity not in ('row', 'statement') then
    raise exception 'unknown granularity "%"', granularity using errcode = 'invalid_parameter_value', hint = 'granularity is row or statement.';
  elsif granularity = 'statement' and always then
    raise exception 'always goes with granularity row: a logical replication worker fires no statement triggers'
      using errcode = 'invalid_parameter_value', hint = 'Leave always out, or say granularity row.';
  elsif granularity = 'statement' and gdq.statement_fault(tbl) is not null then
    raise exception '%', gdq.statement_fault(tbl) using errcode = 'feature_not_supported', hint = 'Capture it with granularity row, or the root of its partitions.';
  end if;
  if always then
    select c.oid into other from (select tbl::oid as relid union select p.relid from pg_partition_tree(tbl) p) r join pg_class c on c.oid = r.relid
     where not pg_has_role(current_user, c.relowner, 'usage') limit 1;
    if other is not null then
      raise exception 'only the owner of % can have triggers fire always', gdq.table_name(other) using errcode = 'insufficient_privilege',
        hint = format('GRANT %I TO %I;', (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = other), current_user);
    end if;
  end if;
end
$$;
comment on function gdq.check_options(regclass, text, text[], text[], text[], text[], text, boolean, text, text) is
  'Error when options of capture do not go together or do not fit a table.';

-- warn_wide(tbl, mode): WARNING when full images will copy large out-of-line values. Writes: nothing.
create or replace function gdq.warn_wide(tbl regclass, mode text, logged smallint[]) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  wide text;
begin
  select string_agg(quote_ident(a.attname), ', ' order by a.attnum) into wide
    from pg_attribute a
   where a.attrelid = tbl and a.attnum = any (logged) and a.attstorage in ('x', 'e')
     and a.atttypid = any (array['text', 'bytea', 'json', 'jsonb', 'xml', 'varchar', 'tsvector']::regtype[]);
  if mode = 'full' and wide is not null and exists (
       select from (select tbl as relid union select p.relid from pg_partition_tree(tbl) p) r
         join pg_class c on c.oid = r.relid where c.reltoastrelid <> 0 and pg_relation_size(c.reltoastrelid) > 0) then
    raise warning 'table % holds large out-of-line values (%): an UPDATE of any other column logs them twice', gdq.table_name(tbl), wide
      using hint = 'Leave them out with exclude, or capture in pk mode.';
  end if;
end
$$;
comment on function gdq.warn_wide(regclass, text, smallint[]) is
  'WARNING when full images will copy large out-of-line values.';
