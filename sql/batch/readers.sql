-- Readers: functions in gdq_log that give the events of one version's log, as version_events_sql() does. The SELECTs of
-- a reader are static: every session plans them once, and a batch of few rows needs no SQL of its own. They take the
-- snapshots as variables and name all segments of the ring, so neither rotation nor DDL changes them.

-- create_readers(): makes the missing readers of logs that are written; at most 20 a call. A log has none while its
-- ring is incomplete, where halves of updates have to be joined, since that needs a plan for the number of rows, and
-- where the text would be long: each session keeps its plans. Result: how many were made. Writes: functions in gdq_log.
create or replace function gdq.create_readers() returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.table_version;
  body text;
  made integer := 0;
begin
  for v in select tv.*
             from gdq.log_ring r join gdq.table_version tv using (version_id)
            where r.activity <> 'quiet' and not gdq.has_reader(tv) and gdq.may_have_reader(tv)
            order by tv.version_id limit 20 loop
    body := gdq.reader_body(v);
    -- another session may be making it, or has made it since: to_regproc() may remember that there was none
    continue when not pg_try_advisory_xact_lock(gdq.lock_key('reader', v.version_id::integer::oid));
    continue when exists (select from pg_proc p
                           where p.pronamespace = 'gdq_log'::regnamespace and p.proname = gdq.reader_name(v));
    execute format($sql$
      create function gdq_log.%1$I(s0 pg_snapshot, s1 pg_snapshot)
        returns table (ev_id bigint, ev_txid bigint, ev_time timestamptz, op text, tbl text,
                       key jsonb, old jsonb, new jsonb, origin text)
        language plpgsql volatile rows 100 security definer
        set search_path = pg_catalog, pg_temp set enable_seqscan = off set plan_cache_mode = force_generic_plan
        as %2$L $sql$,
      gdq.reader_name(v), body);
    execute format('revoke execute on function gdq_log.%I(pg_snapshot, pg_snapshot) from public', gdq.reader_name(v));
    made := made + 1;
  end loop;
  return made;
end
$$;
comment on function gdq.create_readers() is 'Makes the missing readers of logs that are written.';

-- drop_readers(): drops all readers: a step of an install, since an older gdq may have made them otherwise. Writes:
-- functions in gdq_log.
create or replace function gdq.drop_readers() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  name text;
begin
  for name in select gdq.reader_name(v) from gdq.table_version v where gdq.has_reader(v) loop
    execute format('drop function gdq_log.%I(pg_snapshot, pg_snapshot)', name);
  end loop;
end
$$;
comment on function gdq.drop_readers() is 'Drops all readers.';

-- has_reader(v): whether a version has a reader. Functions are looked up outside MVCC. Writes: nothing.
create or replace function gdq.has_reader(v gdq.table_version) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return to_regproc('gdq_log.' || gdq.reader_name(v)) is not null;
end
$$;
comment on function gdq.has_reader(gdq.table_version) is 'Whether a version has a reader.';

-- may_have_reader(v): whether a reader can be made for a version, see create_readers(). Writes: nothing.
create or replace function gdq.may_have_reader(v gdq.table_version) returns boolean
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return not v.split and jsonb_array_length(v.columns) <= 200
     and 3 = (select count(distinct s.slot) from gdq.log_segment s where s.version_id = v.version_id);
end
$$;
comment on function gdq.may_have_reader(gdq.table_version) is 'Whether a reader can be made for a version.';

-- events_by_number(b): how many event numbers were given out between the ticks of a batch. Those of transactions that
-- were rolled back or commit later count, and those that were given out before do not. NULL when its first tick is
-- gone. Writes: nothing.
create or replace function gdq.events_by_number(b gdq.batch) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return b.event_seq - (select t.event_seq from gdq.tick t where t.tick_id = b.tick_from);
end
$$;
comment on function gdq.events_by_number(gdq.batch) is 'How many event numbers a batch spans.';

-- usual_events_sql(b, typed): SELECT of all events of a batch, unsorted, in one look at the control tables; NULL where
-- subscription_events_sql() has to look closer: there are no rows, the event log holds rows or was lost, the
-- subscription skips origins, or a log has no reader yet. As reader_call().
--   typed: true: with the column types, as with_types() adds it.
-- Writes: nothing.
create or replace function gdq.usual_events_sql(b gdq.batch, typed boolean default false) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (
    select string_agg(case when typed then gdq.with_types(v, call) else call end, ' union all ')
      from gdq.subscription s
      join gdq.captured_table ct using (queue_id)
      join gdq.table_version v using (table_id)
     cross join lateral (
       select case when exists (select from gdq.table_rename r where r.table_id = ct.table_id)
                     then gdq.name_sql(ct.table_id, b.snapshot_to)
                   else quote_literal(ct.table_name) || '::text' end) named(name)
     cross join lateral gdq.reader_call(v, name, gdq.delivered_from(b, ct.relid), b.snapshot_to) call
     where s.subscription_id = b.subscription_id
       and s.skip_origin is null
       and not exists (select from gdq.log_loss)
       and not exists (select from gdq.event_segments(s.queue_id) e where pg_relation_size(e) > 0)
       and ct.table_id = any (array(select gdq.active_tables(s.queue_id)))
       and (s.all_tables or exists (select from gdq.subscription_table st
                                     where st.subscription_id = s.subscription_id and st.table_id = ct.table_id))
       and exists (select from gdq.log_segment ls
                    where ls.version_id = v.version_id and pg_relation_size(ls.segment) > 0)
    having bool_and(gdq.has_reader(v)));
end
$$;
comment on function gdq.usual_events_sql(gdq.batch, boolean) is
  'SELECT of all events of a batch, where it is a usual one.';

-- reader_sql(v, s0, s1): reader_call() with the name that the table had; NULL when the log is empty. Writes: nothing.
create or replace function gdq.reader_sql(v gdq.table_version, s0 pg_snapshot, s1 pg_snapshot) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return case when exists (select from gdq.version_segments(v.version_id))
                then gdq.reader_call(v, gdq.name_sql(v.table_id, s1), s0, s1) end;
end
$$;
comment on function gdq.reader_sql(gdq.table_version, pg_snapshot, pg_snapshot) is
  'The call of a version''s reader for the rows between two snapshots.';

-- reader_call(v, tbl, s0, s1): SELECT of what a version's reader gives for (s0, s1], with the name tbl (SQL). Who runs
-- it checks afterwards, with a fresh snapshot, that the batch is still open: a segment that the reader has locked, or
-- found empty, can then not have been emptied of rows of the batch. Writes: nothing.
create or replace function gdq.reader_call(v gdq.table_version, tbl text, s0 pg_snapshot, s1 pg_snapshot) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return format('select ev_id, ev_txid, ev_time, op, %s as tbl, key, old, new, origin from gdq_log.%I(%L, %L)',
                tbl, gdq.reader_name(v), s0, s1);
end
$$;
comment on function gdq.reader_call(gdq.table_version, text, pg_snapshot, pg_snapshot) is
  'SELECT of what a version''s reader gives between two snapshots.';

-- reader_body(v): the text of a version's reader. The conditions are those of changes_sql(), with variables. Each
-- segment is read by a statement of its own: without rows in (s0, s1] it is unlocked again, as changes_sql() does.
-- Writes: nothing.
create or replace function gdq.reader_body(v gdq.table_version) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (
    select format($body$
#variable_conflict use_column
declare
  from_xmax constant bigint := pg_snapshot_xmax(s0)::text::bigint;
  to_xmax constant bigint := pg_snapshot_xmax(s1)::text::bigint;
  open_ids bigint[] := '{}';
  ended_ids bigint[] := '{}';
begin
  if pg_snapshot_xmin(s1) <> pg_snapshot_xmax(s1) then
    open_ids := array(select x::text::bigint from pg_snapshot_xip(s1) x);
  end if;
  if pg_snapshot_xmin(s0) <> pg_snapshot_xmax(s0) then
    ended_ids := array(select x::text::bigint from pg_snapshot_xip(s0) x where pg_visible_in_snapshot(x, s1));
  end if;
%s
end$body$,
      string_agg(format($segment$
  if pg_relation_size(%1$L::regclass) > 0 then
    begin
      return query %2$s;
      if not found then
        raise exception using errcode = 'GDQ00';
      end if;
    exception when sqlstate 'GDQ00' then
      null;
    end;
  end if;$segment$,
        gdq.table_name(s.segment),
        gdq.image_events_sql(v, 'null::text', gdq.segment_images_sql(s.segment, format($sql$
          select %1$s from %2$s where ev_txid >= from_xmax and ev_txid < to_xmax and ev_txid <> all (open_ids)
           union all
          select %1$s from %2$s where ev_txid = any (ended_ids)$sql$,
          gdq.segment_columns(s.segment), gdq.table_name(s.segment))))), '' order by s.slot, s.pair))
      from gdq.log_segment s
     where s.version_id = v.version_id);
end
$$;
comment on function gdq.reader_body(gdq.table_version) is 'The text of a version''s reader.';
