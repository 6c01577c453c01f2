-- Segments of logs, the tables to which log rows are written: listing them, pinning them, and creating them.

-- event_segments(queue_id): the segments of a queue's event log; none when the queue is being dropped. Writes: nothing.
create or replace function gdq.event_segments(queue_id integer) returns setof regclass
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select s
      from generate_series(0, 2) slot,
           to_regclass(format('gdq_log.%I', format('q%s_s%s', queue_id, slot))) s
     where s is not null;
end
$$;
comment on function gdq.event_segments(integer) is 'The segments of a queue''s event log.';

-- queue_segments(queue_id): the segments that hold rows, of a queue's event log and of its change logs that are not
-- quiet. Writes: nothing.
create or replace function gdq.queue_segments(queue_id integer) returns setof regclass
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select s.segment
      from gdq.active_tables(queue_id) t
      join gdq.table_version v on v.table_id = t
      join gdq.log_segment s using (version_id)
     where pg_relation_size(s.segment) > 0
    union all
    select s from gdq.event_segments(queue_id) s where pg_relation_size(s) > 0;
end
$$;
comment on function gdq.queue_segments(integer) is 'The log segments of a queue that hold rows, quiet logs aside.';

-- version_segments(version_id): the segments of one version that a batch reads: all that hold rows, whichever slot is
-- written now. A writer with an old snapshot or an old function may have written to any of them. Writes: nothing.
create or replace function gdq.version_segments(version_id bigint) returns setof regclass
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select s.segment from gdq.log_segment s
     where s.version_id = version_segments.version_id and gdq.holds_rows(s.segment) order by s.slot;
end
$$;
comment on function gdq.version_segments(bigint) is 'The segments of a version that hold rows.';

-- pin_segment(segment): keeps a segment from truncation until the transaction ends. Truncation never waits, so
-- pin_segment() waits at most for one that is under way. In REPEATABLE READ the position that allowed a truncation may
-- be invisible; but then pg_class, read in that snapshot, shows another file than the segment has now. Result: its
-- filenode. Writes: a lock. Errors: GDQ01 when the segment was truncated or dropped.
create or replace function gdq.pin_segment(segment regclass) returns oid
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  filenode oid := pg_relation_filenode(segment);
begin
  if filenode is not null then
    begin
      execute format('lock table only %s in access share mode', segment);
      filenode := pg_relation_filenode(segment);
    exception when undefined_table or syntax_error then
      filenode := null;  -- dropped with its version, empty
    end;
  end if;
  if filenode is null or current_setting('transaction_isolation') <> 'read committed'
                         and filenode <> (select c.relfilenode from pg_class c where c.oid = segment) then
    raise exception 'log segment % was truncated after the snapshot of this transaction', segment
      using errcode = 'GDQ01',
      hint = 'The batch was finished elsewhere. Roll back, and ask for the next batch.';
  end if;
  return filenode;
end
$$;
comment on function gdq.pin_segment(regclass) is
  'Keeps a log segment from truncation until the transaction ends; its filenode.';

-- segment_is(segment, filenode): true, or error GDQ01 when the segment has been truncated since a batch was cut from
-- it. pg_relation_filenode() is current in any snapshot, and as a one-time filter this runs after the reader has its
-- lock: an emptied segment can never read as one without rows. Writes: nothing. Errors: GDQ01.
create or replace function gdq.segment_is(segment regclass, filenode oid) returns boolean
language plpgsql stable parallel unsafe security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if pg_relation_filenode(segment) is distinct from filenode then
    raise exception 'log segment % was truncated since the batch was cut', segment using errcode = 'GDQ01',
      hint = 'The batch was finished elsewhere. Ask for the next batch.';
  end if;
  return true;
end
$$;
comment on function gdq.segment_is(regclass, oid) is
  'True, or error GDQ01 when a segment was truncated since a batch was cut from it.';

-- holds_rows(segment): whether a reader must read a segment: it holds rows, or did in the transaction's snapshot, which
-- pin_segment() then reports as truncated. Writes: nothing.
create or replace function gdq.holds_rows(segment regclass) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if coalesce(pg_relation_size(segment), 0) > 0 then
    return true;
  elsif current_setting('transaction_isolation') = 'read committed' then
    return false;  -- reading pg_class costs more with every truncation while a session holds an old snapshot
  end if;
  return (select c.relfilenode from pg_class c where c.oid = segment) is distinct from pg_relation_filenode(segment);
end
$$;
comment on function gdq.holds_rows(regclass) is 'Whether a segment holds rows, or did in the transaction''s snapshot.';

-- active_tables(queue_id): the tables of a queue whose log is not quiet. Writes: nothing.
create or replace function gdq.active_tables(queue_id integer) returns setof integer
language plpgsql volatile rows 10 security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select distinct ct.table_id
      from (select r.version_id from gdq.log_ring r where r.activity <> 'quiet' offset 0) active
      join gdq.table_version v using (version_id) join gdq.captured_table ct using (table_id)
     where ct.queue_id = active_tables.queue_id;
end
$$;
comment on function gdq.active_tables(integer) is 'Tables of a queue whose log is not quiet.';

-- announced_tables(queue_id, s0, s1): the tables that announced changes in (s0, s1]. Writes: a lock, see pin_segment().
-- Errors: GDQ01.
create or replace function gdq.announced_tables(queue_id integer, s0 pg_snapshot, s1 pg_snapshot) returns oid[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  announcements text;
  tables oid[];
begin
  select string_agg(format('(select ev_table from (%s) e where ev_kind = ''active'')', part), ' union ')
    into announcements
    from gdq.event_segments(queue_id) s, gdq.changes_sql(s, 'ev_table, ev_kind', s0, s1) part
   where gdq.holds_rows(s) and part is not null;
  if announcements is not null then
    execute format('select array_agg(ev_table) from (%s) e', announcements) into tables;
  end if;
  return coalesce(tables, '{}');
end
$$;
comment on function gdq.announced_tables(integer, pg_snapshot, pg_snapshot) is
  'Tables that announced changes between two snapshots.';

-- changed_tables(subscription_id, s0, s1): the tables of a subscription whose logs may hold rows in (s0, s1]; it may
-- name too many tables, but never too few. Writes: a lock, see pin_segment(). Errors: GDQ01.
create or replace function gdq.changed_tables(subscription_id integer, s0 pg_snapshot, s1 pg_snapshot)
  returns setof gdq.captured_table
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  sub gdq.subscription;
  announced oid[];
  active integer[];
begin
  select * into sub from gdq.subscription s where s.subscription_id = changed_tables.subscription_id;
  announced := gdq.announced_tables(sub.queue_id, s0, s1);
  active := array(select gdq.active_tables(sub.queue_id));
  return query
    select ct.* from gdq.captured_table ct
     where ct.queue_id = sub.queue_id and (ct.table_id = any (active) or ct.relid = any (announced))
       and (sub.all_tables
            or exists (select from gdq.subscription_table st
                        where st.subscription_id = sub.subscription_id and st.table_id = ct.table_id));
end
$$;
comment on function gdq.changed_tables(integer, pg_snapshot, pg_snapshot) is
  'Tables of a subscription whose logs may hold rows between two snapshots.';

-- events_given_out(queue_id): last_event(), or NULL while the queue is being dropped. Writes: nothing.
create or replace function gdq.events_given_out(queue_id integer) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  numbers regclass := to_regclass(format('gdq_log.%I', 'q' || queue_id || '_ev'));
begin
  return case when numbers is not null then coalesce(pg_sequence_last_value(numbers), 0) end;
exception when lock_not_available or undefined_table or internal_error then
  return null;
end
$$;
comment on function gdq.events_given_out(integer) is
  'Last event number given out by a queue; NULL while it is being dropped.';

-- create_segment(version_id, slot): creates the log tables of one slot of a version, each with its BRIN index: s<slot>
-- for rows with one image (INSERT, DELETE), u<slot> for both images of an UPDATE. Two tables, because a third of a
-- capture function's time grows with the number of columns of the table that it writes to, null or not.
-- The settings are pinned because this also runs inside the application's DDL, whose session may have others. BRIN uses
-- minmax_multi: plain minmax would read the whole log when one long transaction is interleaved.
-- The owner of the table's capture functions may insert into them.
-- Writes: creates gdq_log.t<table>_v<version>_s<slot> and _u<slot>, inserts into log_segment.
create or replace function gdq.create_segment(version_id bigint, slot integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set default_table_access_method = 'heap' set default_tablespace = '' set client_min_messages = warning
as $$
declare
  v gdq.table_version;
  kept record;
  s record;
  images text;
begin
  select * into strict v from gdq.table_version tv where tv.version_id = create_segment.version_id;
  select ct.origin, q.unlogged, pg_get_userbyid(p.proowner) as writer into strict kept
    from gdq.captured_table ct
    join gdq.queue q using (queue_id)
   cross join lateral (select gdq.capture_function(ct.queue_id, ct.relid, 'i') as number offset 0) f
    left join pg_proc p on p.oid = f.number
   where ct.table_id = v.table_id;
  for s in select pair, prefixes, format('t%s_v%s_%s%s', v.table_id, v.version_id, letter, slot) as name
             from (values (false, 's', array['row_']), (true, 'u', array['old_', 'new_'])) kind(pair, letter, prefixes)
            where not (pair and v.split) loop
    select string_agg(format(', %I %s', prefix || c.suffix, c.log_type), '' order by place, c.attnum) into images
      from jsonb_to_recordset(gdq.log_columns(v)) c(attnum int, log_type text, suffix text),
           unnest(s.prefixes) with ordinality p(prefix, place);
    if s.pair then
      images := concat(images, (select string_agg(format(', %I boolean', same), '' order by attnum)
                                  from jsonb_to_recordset(v.columns) c(attnum int, same text) where same is not null));
    end if;
    execute format($sql$
      create %s table gdq_log.%I (ev_id bigint, ev_txid bigint, ev_time timestamptz, ev_op "char"%s%s)
        with (fillfactor = 100, autovacuum_enabled = false, toast.autovacuum_enabled = false)
      $sql$,
      case when kept.unlogged then 'unlogged' end,
      s.name,
      case when kept.origin then ', ev_origin text' end,
      images);
    execute format($sql$
      create index %I on gdq_log.%I using brin (ev_txid int8_minmax_multi_ops) with (pages_per_range = 16)
      $sql$,
      s.name || '_txid',
      s.name);
    if kept.writer <> current_user then
      execute format('grant insert on gdq_log.%I to %I', s.name, kept.writer);
    end if;
    insert into gdq.log_segment values (v.version_id, slot, s.pair, format('gdq_log.%I', s.name)::regclass);
  end loop;
end
$$;
comment on function gdq.create_segment(bigint, integer) is
  'Creates the log tables of one slot of a version, with their BRIN indexes.';
