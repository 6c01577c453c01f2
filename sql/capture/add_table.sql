-- add_table(queue, tbl, mode, key, include, columns, exclude, allow_rls, ...): captures the changes of a table from now
-- on. A partitioned table is captured at its root, with all partitions that it has and will have.
--   mode: full: both images of every change; columns or exclude choose the logged columns. pk: the key, and the old and
--   new values of the columns in include.
--   key: the identifying columns when they are not the primary key; they need a unique index and NOT NULL.
--   "where": a condition on the row, see parse_filter(); an update that makes a row match is an insert, one after which
--   it no longer matches a delete.
--   operations: the operations to capture: some of insert, update, delete, truncate.
--   granularity: row; or statement, for bulk loads: an UPDATE is then logged as deletes and inserts.
--   always: capture with session_replication_role = replica too; the caller needs the rights of the table's owner.
--   allow_rls: capture a table with row level security, although consumers then read all its rows; else it is refused.
--   origin: log the session's setting gdq.origin with every change, so that a consumer can skip its own changes.
--   pin_search_path: for sessions that change their search_path for every request.
--   format: typed: a log column for each column, of its type. json: the whole row in one value, whatever the mode, so
--   that DDL which capture does not see cannot make a write fail. NULL: typed where the event triggers follow DDL, else
--   json.
--   unchanged: both: an UPDATE logs each value in both images. once: a large value that it leaves as it was is logged
--   in the new image only, and readers see it in both. omit: it is not logged, and readers are told of which columns
--   they get no value; the table needs a key. It changes nothing in format json.
-- Writes: control rows, log segments, functions, triggers. Errors: as refuse_table(); 42704; 22023 and 42703 for the
-- options; 54000 when an image cannot fit; 55P03 when writers hold the table: nothing is changed, try again; GDQ04.
create or replace function gdq.add_table(queue text, tbl regclass, mode text default 'full', key text[] default null,
  include text[] default null, columns text[] default null, exclude text[] default null,
  allow_rls boolean default false, "where" text default null,
  operations text[] default '{insert,update,delete,truncate}', granularity text default 'row',
  always boolean default false, origin boolean default false, pin_search_path boolean default false,
  format text default null, unchanged text default 'both')
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
declare
  queue_of integer := gdq.find_queue(queue);
begin
  perform gdq.require_read_committed('add_table');
  perform gdq.take_turn();
  perform gdq.capture_table(queue_of, tbl, mode, key, include, columns, exclude, allow_rls, "where", operations,
                            granularity, always, origin, pin_search_path, format, unchanged, 3);
end
$$;
comment on function gdq.add_table(text, regclass, text, text[], text[], text[], text[], boolean, text, text[], text,
                                  boolean, boolean, boolean, text, text) is
  'Captures the changes of a table from now on, in mode full or pk.';

-- capture_table(queue_id, tbl, ..., slots): does add_table(), with its options, for a caller that has taken its turn.
-- slots: as for create_version(). Writes and errors: as add_table().
create or replace function gdq.capture_table(queue_id integer, tbl regclass, mode text, key text[], include text[],
  columns text[], exclude text[], allow_rls boolean, "where" text, operations text[], granularity text, always boolean,
  origin boolean, pin_search_path boolean, format text, unchanged text, slots integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
declare
  name text := gdq.table_name(tbl);
  id integer;
  described jsonb;
  log_format text := coalesce(format, case when gdq.event_triggers_on() then 'typed' else 'json' end);
begin
  perform gdq.refuse_table(queue_id, tbl, allow_rls, log_format);
  perform gdq.refuse_partitions(tbl);
  perform gdq.check_options(tbl, mode, include, columns, exclude, operations, granularity, always, "where", log_format,
                            unchanged);
  begin
    perform gdq.create_capture(queue_id, tbl, operations, granularity, always, origin);
  exception when lock_not_available then
    raise exception 'table % is busy: no lock within 500 ms', name using errcode = 'lock_not_available',
      hint = 'Nothing was changed. Try again when no long transaction holds the table.';
  end;
  perform pg_advisory_xact_lock(gdq.lock_key('capture', tbl));
  insert into gdq.captured_table (queue_id, relid, table_name, mode, format,
                                  key_attnums, include_attnums, column_attnums, exclude_attnums,
                                  operations,
                                  granularity, always, origin, pin_search_path, allow_rls, row_filter, unchanged)
    values (queue_id, tbl, name, mode, log_format,
            gdq.column_numbers(tbl, key, 'key'),
            gdq.column_numbers(tbl, include, 'include'),
            gdq.column_numbers(tbl, columns, 'columns'),
            gdq.column_numbers(tbl, exclude, 'exclude'),
            array(select o from unnest('{insert,update,delete,truncate}'::text[]) o where o = any (operations)),
            granularity, always, origin, pin_search_path, coalesce(allow_rls, false), gdq.parse_filter(tbl, "where"),
            unchanged)
    returning table_id into id;
  if gdq.json_fault(id) is not null then
    raise exception '%', gdq.json_fault(id) using errcode = 'feature_not_supported',
      hint = 'Make the partition anew with CREATE TABLE ... PARTITION OF, '
             'or capture in format typed, which needs the event triggers.';
  end if;
  described := gdq.describe_table(id);
  perform gdq.check_key(id, described);
  perform gdq.check_omitted(id, described);
  perform gdq.arm(gdq.create_version(id, described, slots), 0);
  delete from gdq.passed_table p where p.queue_id = capture_table.queue_id and p.relid = tbl;
  insert into gdq.captured_leaf (table_id, leaf) select id, p.relid from pg_partition_tree(tbl) p where p.relid <> tbl;
  perform gdq.witness(array[id]);
  perform gdq.warn_wide(tbl, mode, described);
end
$$;
comment on function gdq.capture_table(integer, regclass, text, text[], text[], text[], text[], boolean, text, text[],
                                      text, boolean, boolean, boolean, text, text, integer) is
  'Captures the changes of a table from now on, for a caller that has taken its turn.';

-- check_omitted(table_id, described): error when a table is to be captured with unchanged "omit" and has no key by
-- which readers find the rows whose values they lack. described: from describe_table(). Where a key is dropped later,
-- updates are logged as with "once". Writes: nothing. Errors: 0A000.
create or replace function gdq.check_omitted(table_id integer, described jsonb) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = check_omitted.table_id;
  if t.unchanged = 'omit' and t.format = 'typed' and not described @? '$[*] ? (@.key == true)' then
    raise exception 'table % has no primary key, by which readers find what unchanged "omit" leaves out', t.table_name
      using errcode = 'feature_not_supported',
      hint = 'Say unchanged once, or name the columns of a unique index with key.';
  end if;
end
$$;
comment on function gdq.check_omitted(integer, jsonb) is
  'Error when a table without a key is to be captured with unchanged "omit".';

-- take_turn(): waits for other transactions that capture a table, another one perhaps, until they end: two that make
-- capture functions at once would both change the rights of the schema gdq_log. Called before add_table() has locked
-- anything that a writer could wait for. Writes: a lock. Errors: 55P03 after 20 s.
create or replace function gdq.take_turn() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '20s'
as $$
begin
  perform pg_advisory_xact_lock(gdq.lock_key('capture', 0));
exception when lock_not_available then
  raise exception 'another transaction that captures a table has been open for 20 s'
    using errcode = 'lock_not_available', hint = 'Nothing was changed. Try again when it has ended.';
end
$$;
comment on function gdq.take_turn() is 'Waits for other transactions that capture a table.';

-- warn_wide(tbl, mode, logged): WARNING when full images will copy large out-of-line values. logged: the columns that
-- are logged, from describe_table(). Writes: nothing.
create or replace function gdq.warn_wide(tbl regclass, mode text, logged jsonb) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  wide text;
begin
  select string_agg(quote_ident(a.attname), ', ' order by a.attnum) into wide
    from jsonb_to_recordset(logged) l(attnum int, same text)
    join pg_attribute a on a.attrelid = tbl and a.attnum = l.attnum
   where l.same is null and a.attstorage in ('x', 'e')
     and a.atttypid = any (array['text', 'bytea', 'json', 'jsonb', 'xml', 'varchar', 'tsvector']::regtype[]);
  if mode = 'full' and wide is not null and exists (
       select from (select tbl as relid union select p.relid from pg_partition_tree(tbl) p) r
         join pg_class c on c.oid = r.relid
        where c.reltoastrelid <> 0 and pg_relation_size(c.reltoastrelid) > 0) then
    raise warning 'table % holds large out-of-line values (%): an UPDATE of any other column logs them twice',
      gdq.table_name(tbl), wide
      using hint = 'Log them once, or not at all, with unchanged, leave them out with exclude, or capture in pk mode.';
  end if;
end
$$;
comment on function gdq.warn_wide(regclass, text, jsonb) is
  'WARNING when full images will copy large out-of-line values.';
