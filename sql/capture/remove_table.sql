-- remove_table(queue, tbl, force): stops capturing a table and drops its logs. Every consumer that takes the table gets
-- an event about it, in order: ddl when all consumers have read all changes; else force is needed, and the event is a
-- resync. tbl: also the oid of a table that is gone.
-- Writes: drops triggers, functions, logs, perhaps a capture role; deletes control rows; passed_table,
-- subscription_resync and the event log. Errors: 42704;
-- 55006 when a consumer has not read all changes and force is not given; 55P03 when writers or readers hold the table
-- or a log: nothing is changed, try again; GDQ04.
create or replace function gdq.remove_table(queue text, tbl regclass, force boolean default false) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set lock_timeout = '500ms' set client_min_messages = warning
as $$
declare
  id integer := gdq.find_table(queue, tbl);
  queue_of integer := gdq.find_queue(queue);
  gone boolean := gdq.capture_state(queue_of, tbl) = 'dropped';
  unread text;
  s record;
begin
  perform gdq.require_read_committed('remove_table');
  -- with state dropped, the DDL guard ignores the drops that follow
  insert into gdq.resync (queue_id, relid, kind, reason) values (queue_of, tbl, 'dropped', 'remove_table');
  begin
    -- maintenance must not look for the logs meanwhile
    perform pg_advisory_xact_lock(gdq.lock_key('drop', 0));
    perform gdq.drop_capture(queue_of, tbl);
    perform pg_advisory_xact_lock(gdq.lock_key('capture', tbl));
    -- dropping the triggers has locked the table: no session can write to it
    unread := gdq.unread_by(id);
    if unread is not null and not force then
      raise exception 'changes of table % have not been read by %', coalesce(gdq.table_name(tbl), tbl::text), unread
        using errcode = 'object_in_use',
              hint = 'Stop the writers and let the consumers catch up, '
                     'or remove it with force: they are told that they miss changes.';
    end if;
    perform gdq.tell_removed(id, case when unread is not null then 'resync' when not gone then 'ddl' end);
    for s in select gdq.table_name(ls.segment) as name
               from gdq.log_segment ls join gdq.table_version v using (version_id) where v.table_id = id loop
      execute format('drop table %s', s.name);
    end loop;
    perform gdq.drop_version(v.version_id) from gdq.table_version v where v.table_id = id;
  exception when lock_not_available then
    raise exception 'table % or its log is busy: no lock within 500 ms', coalesce(gdq.table_name(tbl), tbl::text)
      using errcode = 'lock_not_available', hint = 'Nothing was changed. Try again.';
  end;
  delete from gdq.resync r where r.queue_id = queue_of and r.relid = tbl;
  delete from gdq.captured_table ct where ct.table_id = id;
  -- a rule for new tables must not bring it back
  insert into gdq.passed_table (queue_id, relid)
    select queue_of, tbl
     where not gone and exists (select from gdq.new_table_rule r where r.queue_id = queue_of)
    on conflict on constraint passed_table_pkey do nothing;
  perform gdq.drop_capture_roles();
end
$$;
comment on function gdq.remove_table(text, regclass, boolean) is
  'Stops capturing a table, drops its logs and tells its consumers.';

-- tell_removed(table_id, kind): writes the event that tells every consumer of a table, in order, that the table leaves
-- the queue. Events of the table that a consumer has not read yet are still delivered.
--   kind: resync when changes are dropped unread, else ddl; NULL: none, since an event told it when the table was
--   dropped.
-- Writes: the event log, subscription_resync.
create or replace function gdq.tell_removed(table_id integer, kind text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = tell_removed.table_id;
  insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot)
    select s.subscription_id, t.relid, 'removed', pg_current_snapshot()
      from gdq.subscription s
     where s.queue_id = t.queue_id and t.relid in (select st.relid from gdq.subscribed_tables(s.subscription_id) st);
  if kind = 'resync' then
    perform gdq.log_event(t.queue_id, 'resync', t.relid,
      jsonb_build_object('table', t.table_name, 'kind', 'dropped',
                         'reason', 'removed from the queue, with changes that were not read'));
  elsif kind = 'ddl' then
    perform gdq.log_event(t.queue_id, 'ddl', t.relid,
      jsonb_build_object('tag', 'remove_table', 'table', t.table_name, 'dropped', true));
  end if;
end
$$;
comment on function gdq.tell_removed(integer, text) is 'Writes the event that a table leaves the queue.';

-- unread_by(table_id): the names of the consumers that have not read every row in a table's logs; NULL when none.
-- Writes: nothing.
create or replace function gdq.unread_by(table_id integer) returns text
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select string_agg(format('"%s"', c.consumer_name), ', ' order by c.consumer_name)
    from gdq.captured_table ct
    join gdq.subscription s using (queue_id)
    join gdq.consumer c using (consumer_id)
    join gdq.latest_positions() p using (subscription_id)
   where ct.table_id = unread_by.table_id
     and ct.relid in (select t.relid from gdq.subscribed_tables(s.subscription_id) t)
     and exists (select from gdq.table_version v, gdq.version_segments(v.version_id) segment
                  where v.table_id = ct.table_id
                    and not gdq.segment_is_consumed(segment, gdq.snapshot_max(p.snapshot,
                          (select k.snapshot from gdq.copied_tables(s.subscription_id) k where k.relid = ct.relid))))
$$;
comment on function gdq.unread_by(integer) is 'The consumers that have not read all rows of a table''s logs.';
