-- The event log of a queue: one row for each event. These functions write events of DDL, of lost changes, and of tables
-- that must be copied anew.

-- log_event(queue_id, kind, relid, data): writes one event into a queue's event log, numbered by the queue's sequence.
-- kind: truncate, ddl, resync or message. Result: its ev_id. Writes: the event log.
create or replace function gdq.log_event(queue_id integer, kind text, relid oid, data jsonb) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id bigint;
begin
  execute format('select gdq_log.%I($1, $2, $3)', 'q' || queue_id || '_event') into id using kind, relid, data;
  return id;
end
$$;
comment on function gdq.log_event(integer, text, oid, jsonb) is 'Writes one event into a queue''s event log.';

-- note_resync(queue_id, relid, kind, reason): records that capture of a table has a gap, or was switched off or on
-- again, and writes a resync event, which consumers get in order. Writes: inserts into resync, and a resync event into
-- the event log.
create or replace function gdq.note_resync(queue_id integer, relid oid, kind text, reason text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  insert into gdq.resync (queue_id, relid, kind, reason) values (queue_id, relid, kind, reason);
  perform gdq.log_event(queue_id, 'resync', relid, jsonb_build_object('kind', kind, 'reason', reason));
end
$$;
comment on function gdq.note_resync(integer, oid, text, text) is
  'Records a gap of capture and puts a resync event into the event log.';

-- note_once(queue_id, relid, kind, reason): note_resync() unless this transaction has noted the same already. In a
-- SERIALIZABLE transaction the note is always written, since reading resync could make the transaction fail. Writes:
-- resync and the event log.
create or replace function gdq.note_once(queue_id integer, relid oid, kind text, reason text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if current_setting('transaction_isolation') <> 'serializable'
     and exists (select from gdq.resync r where r.queue_id = note_once.queue_id and r.relid = note_once.relid
                    and r.kind = note_once.kind and r.reason = note_once.reason and r.txid = txid_current()) then
    return;
  end if;
  perform gdq.note_resync(queue_id, relid, kind, reason);
end
$$;
comment on function gdq.note_once(integer, oid, text, text) is
  'note_resync() unless this transaction has noted the same already.';

-- note_ddl(table_id, tag, data): writes a ddl event of a captured table: tag, table (its name after the command),
-- object, statement (its first 10,000 characters), and the members of data. Result: its ev_id. Writes: the event log.
create or replace function gdq.note_ddl(table_id integer, tag text, data jsonb) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = note_ddl.table_id;
  return gdq.log_event(t.queue_id, 'ddl', t.relid, jsonb_build_object(
    'tag', tag,
    'table', coalesce(gdq.table_name(t.relid), gdq.last_table_name(t.table_id)),
    'object', gdq.ddl_object(),
    'statement', coalesce(nullif(current_setting('gdq.applied', true), ''), left(current_query(), 10000))) || data);
end
$$;
comment on function gdq.note_ddl(integer, text, jsonb) is 'Writes a ddl event of a captured table.';

-- note_dropped(table_id, tag): records that a captured table was dropped. Writes: resync, a ddl event.
create or replace function gdq.note_dropped(table_id integer, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = note_dropped.table_id;
  insert into gdq.resync (queue_id, relid, kind, reason) values (t.queue_id, t.relid, 'dropped', tag);
  perform gdq.note_ddl(t.table_id, tag, (
    select jsonb_build_object('dropped', true,
                              'old_version', v.version_id,
                              'old_columns', gdq.column_list(v.columns))
      from gdq.table_version v where v.version_id = gdq.current_version(t.table_id)));
end
$$;
comment on function gdq.note_dropped(integer, text) is 'Records that a captured table was dropped.';

-- ddl_object(relid): the names of the objects of the current DDL command, which may be a type or a parent of the
-- captured table. With relid: the name of this relation if the command drops it. NULL outside an event trigger. Writes:
-- nothing.
create or replace function gdq.ddl_object(relid oid default null) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  begin
    -- object_identity was made under the session's quote_all_identifiers
    return (select string_agg(distinct case when o.classid <> 'pg_class'::regclass then o.object_identity
                                            else (select string_agg(quote_ident(part), '.' order by n)
                                                    from unnest(o.address_names) with ordinality a(part, n)) end, ', ')
              from pg_event_trigger_dropped_objects() o
             where case when relid is null then o.original
                        else o.classid = 'pg_class'::regclass and o.objid = relid and o.objsubid = 0 end);
  exception when event_trigger_protocol_violated then
    -- outside sql_drop: the objects of the command's end
    return (select string_agg(distinct c.object_identity, ', ')
              from pg_event_trigger_ddl_commands() c where relid is null);
  end;
exception when event_trigger_protocol_violated then
  return null;
end
$$;
comment on function gdq.ddl_object(oid) is 'The names of the objects of the current DDL command.';

-- column_list(columns): the columns of a version as a ddl event shows them: name, type and key of each. Writes:
-- nothing.
create or replace function gdq.column_list(columns jsonb) returns jsonb
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce(jsonb_agg(jsonb_build_object('name', name, 'type', type, 'key', key) order by attnum), '[]')
    from jsonb_to_recordset(columns) c(attnum int, name text, type text, key boolean)
$$;
comment on function gdq.column_list(jsonb) is 'The columns of a version as a ddl event shows them.';

-- A crash, a promotion or a restore empties the logs of an unlogged queue, and nothing in them shows that. The row of
-- the queue in log_marker, which is unlogged too, is lost with them: where it is missing, changes may be lost. Writers
-- may fill the logs again before that is noticed, so every function that hands out changes checks first.

-- note_losses(queue): finds queues (NULL: all) whose unlogged logs were emptied, and has all their consumers resync: by
-- an event for each table now, and by one in every batch that ends before now, as rows of such a batch may be lost. The
-- marker is set again in the same transaction.
-- Result: the number of queues found. Writes: log_marker, log_loss, resync, the event log. Errors: 42704, GDQ07.
create or replace function gdq.note_losses(queue text default null) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  q record;
  found_empty integer := 0;
begin
  -- every batch comes here, and mostly nothing is lost
  if not exists (select from gdq.queue qq
                  where qq.unlogged
                    and not exists (select from gdq.log_marker m where m.queue_id = qq.queue_id)) then
    return 0;
  end if;
  for q in select qq.queue_id from gdq.queue qq
            where qq.unlogged and (queue is null or qq.queue_id = gdq.find_queue(queue))
              and not exists (select from gdq.log_marker m where m.queue_id = qq.queue_id) order by 1 loop
    -- of two sessions at once, one waits here
    insert into gdq.log_marker (queue_id) values (q.queue_id) on conflict do nothing;
    continue when not found;
    insert into gdq.log_loss (queue_id) values (q.queue_id);
    perform gdq.note_resync(q.queue_id, ct.relid, 'gap', gdq.loss_reason())
       from gdq.captured_table ct where ct.queue_id = q.queue_id;
    found_empty := found_empty + 1;
  end loop;
  return found_empty;
end
$$;
comment on function gdq.note_losses(text) is
  'Records the losses of queues whose unlogged logs were emptied, and has their consumers resync.';

-- not_copied_sql(subscription_id, s0): conditions (and ... and ...) on rows of the event log that leave out events
-- which a copy of their table holds already; one for each table that the subscription has copied later than s0; NULL
-- for none. Writes: nothing.
create or replace function gdq.not_copied_sql(subscription_id integer, s0 pg_snapshot) returns text
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select string_agg(format('and (ev_table is distinct from %s or not pg_visible_in_snapshot(ev_txid::text::xid8, %L))',
                           c.relid::oid, c.snapshot), ' ')
    from gdq.copied_tables(subscription_id) c
   where c.relid is not null and not gdq.snapshot_le(c.snapshot, s0)
$$;
comment on function gdq.not_copied_sql(integer, pg_snapshot) is
  'Conditions that leave out events which a subscription''s copies hold already.';

-- loss_events_sql(queue_id, relids, s1, copies_of): SELECT of the resync events that a batch up to s1 must show because
-- the logs of these tables were found empty after s1; NULL for none. Their ev_id is 0, so they come first. copies_of: a
-- subscription, or NULL; a table that it copied after the loss needs no event. Writes: nothing.
create or replace function gdq.loss_events_sql(queue_id integer, relids oid[], s1 pg_snapshot,
                                               copies_of integer default null) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select string_agg(format($sql$
             select 0::bigint as ev_id,
                    %s::bigint as ev_txid,
                    %L::timestamptz as ev_time,
                    'resync'::text as op,
                    %L::text as tbl,
                    null::jsonb as key,
                    null::jsonb as old,
                    %L::jsonb as new,
                    null::text as origin
             $sql$,
             l.txid,
             l.created_at,
             coalesce(gdq.table_name(ct.relid), ct.table_name),
             jsonb_build_object('kind', 'gap', 'reason', gdq.loss_reason())), ' union all ')
      from gdq.log_loss l join gdq.captured_table ct using (queue_id)
     where l.queue_id = loss_events_sql.queue_id and ct.relid = any (relids)
       and not pg_visible_in_snapshot(l.txid::text::xid8,
                                      gdq.snapshot_max(s1, (select c.snapshot from gdq.copied_tables(copies_of) c
                                                             where c.relid = ct.relid))));
end
$$;
comment on function gdq.loss_events_sql(integer, oid[], pg_snapshot, integer) is
  'SELECT of the resync events of logs that were found empty after a batch''s end.';

-- loss_reason(): the reason in the resync events of emptied logs. Writes: nothing.
create or replace function gdq.loss_reason() returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select 'crash: the unlogged logs of the queue were emptied'::text
$$;
comment on function gdq.loss_reason() is 'The reason in the resync events of emptied logs.';
