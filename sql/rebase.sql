-- restore_rights(): gives the roles of gdq what they need, which a restore without roles or privileges has lost, and takes
-- from PUBLIC what it has not. Writes: roles and ACLs of gdq and gdq_log. Errors: 42501.
create or replace function gdq.restore_rights() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  revoke execute on all functions in schema gdq from public;
  perform gdq.grant_roles();
  if exists (select from pg_roles where rolname = 'gdq_capture' and not rolcanlogin and not rolsuper) then
    grant usage on schema gdq_log to gdq_capture;
    grant insert on all tables in schema gdq_log to gdq_capture;
    grant usage on all sequences in schema gdq_log to gdq_capture;
    alter default privileges in schema gdq_log grant insert on tables to gdq_capture;
    alter default privileges in schema gdq_log grant usage on sequences to gdq_capture;
  end if;
end
$$;
comment on function gdq.restore_rights() is 'Gives the roles of gdq what a restore without privileges has lost.';

-- rebase_positions(queue_id): the positions of a restored queue, in order, as snapshots of this cluster. It never had
-- transactions below 500 after its making, so these low numbers are free to stand for "before anything": the position
-- that is n-th from below becomes 3+n:3+n:. A row of the log that c of the positions have not passed gets 3+c.
-- Result: one row a position in use (old, new, event_seq). Writes: nothing. Errors: 54000 for more than 500.
create or replace function gdq.rebase_positions(queue_id integer)
  returns table (old_snapshot pg_snapshot, new_snapshot pg_snapshot, event_seq bigint)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if (select count(distinct p.snapshot::text) from gdq.subscription s, gdq.position_of(s.subscription_id) p
       where s.queue_id = rebase_positions.queue_id) > 500 then
    raise exception 'the consumers have more than 500 different positions' using errcode = 'program_limit_exceeded',
      hint = 'Unregister consumers that can start anew.';
  end if;
  return query
    select used.s::pg_snapshot,
           format('%s:%1$s:', 3 + row_number() over (order by pg_snapshot_xmax(used.s::pg_snapshot),
             (select count(*) from pg_snapshot_xip(used.s::pg_snapshot)) desc))::pg_snapshot, used.seq
      from (select p.snapshot::text as s, max(p.event_seq) as seq
              from gdq.subscription s, gdq.position_of(s.subscription_id) p
             where s.queue_id = rebase_positions.queue_id group by 1) used
     order by pg_snapshot_xmax(used.s::pg_snapshot), (select count(*) from pg_snapshot_xip(used.s::pg_snapshot)) desc;
end
$$;
comment on function gdq.rebase_positions(integer) is 'The positions of a restored queue as snapshots of this cluster.';

-- rebase_retries(queue_id): what waits to be retried goes on waiting, under a number that every position and every later copy of
-- its table has passed: the dump's own may lie ahead of this cluster's. What a copy holds, which the copies of the dump do not
-- tell any more, would come again: it goes. Writes: retry_event, dead_letter.
create or replace function gdq.rebase_retries(queue_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  delete from gdq.retry_event r
   using gdq.subscription s, gdq.copied_tables(s.subscription_id) c
   where s.queue_id = rebase_retries.queue_id and r.subscription_id = s.subscription_id
     and gdq.table_name(c.relid) = r.tbl and pg_visible_in_snapshot(r.ev_txid::text::xid8, c.snapshot);
  update gdq.retry_event r set ev_txid = 3 from gdq.subscription s where s.queue_id = rebase_retries.queue_id and r.subscription_id = s.subscription_id;
  update gdq.dead_letter d set ev_txid = 3 from gdq.subscription s where s.queue_id = rebase_retries.queue_id and d.subscription_id = s.subscription_id;
end
$$;
comment on function gdq.rebase_retries(integer) is 'Gives the retries and dead letters of a restored queue a number of this cluster.';

-- move_rows(segment, positions, keep_below): gives the rows of a restored log numbers of this cluster, by the positions
-- that have not passed them, and deletes those that all have. A row with a number above keep_below may have been written
-- after the restore: no position has passed it. Writes: the segment.
create or replace function gdq.move_rows(segment regclass, positions pg_snapshot[], keep_below bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  execute format('delete from %s where ev_id <= $2 and not exists (select from unnest($1) p where not pg_visible_in_snapshot(ev_txid::text::xid8, p))',
                 gdq.table_name(segment)) using positions, keep_below;
  execute format('update %s set ev_txid = 3 + case when ev_id > $2 then cardinality($1) '
                 'else (select count(*) from unnest($1) p where not pg_visible_in_snapshot(ev_txid::text::xid8, p)) end',
                 gdq.table_name(segment)) using positions, keep_below;
end
$$;
comment on function gdq.move_rows(regclass, pg_snapshot[], bigint) is 'Gives the rows of a restored log numbers of this cluster.';

-- rebase_columns(table_id): attribute numbers of a captured table and its versions as they are in this database: a dump
-- does not keep them when columns were dropped. Found by the names that the newest version has; of excluded columns no
-- name is kept, so those that it does not log stay out. Result: the columns of the table's options that are gone or have
-- another name since; a key that lost one fits no index, so that it is never taken for another.
-- Writes: captured_table, table_rename, table_version.
create or replace function gdq.rebase_columns(table_id integer) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  now_at jsonb;
  lost text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = rebase_columns.table_id;
  select coalesce(jsonb_object_agg(c.attnum, a.attnum), '{}') into now_at
    from gdq.table_version v, jsonb_to_recordset(v.columns) c(attnum int, name text), pg_attribute a
   where v.version_id = gdq.current_version(t.table_id) and a.attrelid = t.relid and a.attname = c.name and a.attnum > 0 and not a.attisdropped;
  select string_agg(coalesce(quote_ident(c.name), k.attnum::text), ', ' order by k.attnum) into lost
    from unnest(t.key_attnums || t.include_attnums || t.column_attnums) k(attnum)
    left join (select l.attnum, l.name from gdq.table_version v, jsonb_to_recordset(v.columns) l(attnum int, name text)
                where v.version_id = gdq.current_version(t.table_id)) c using (attnum)
   where not now_at ? k.attnum::text and (c.name is not null or k.attnum = any (t.key_attnums));
  update gdq.captured_table ct
     set table_name = coalesce(gdq.table_name(ct.relid), gdq.last_table_name(ct.table_id)),
         key_attnums = (select array_agg(coalesce((now_at->>k::text)::smallint, 0) order by n) from unnest(ct.key_attnums) with ordinality u(k, n)),
         include_attnums = (select array_agg((now_at->>k::text)::smallint order by n) from unnest(ct.include_attnums) with ordinality u(k, n) where now_at ? k::text),
         column_attnums = (select array_agg((now_at->>k::text)::smallint order by n) from unnest(ct.column_attnums) with ordinality u(k, n) where now_at ? k::text),
         exclude_attnums = case when ct.exclude_attnums is not null then
           array(select a.attnum from pg_attribute a
                  where a.attrelid = ct.relid and a.attnum > 0 and not a.attisdropped and a.attnum::text not in (select jsonb_each_text.value from jsonb_each_text(now_at))) end
   where ct.table_id = t.table_id;
  delete from gdq.table_rename r where r.table_id = t.table_id;
  perform gdq.rebase_filter(t.table_id);
  -- a column that has gone since an older version gets a number that no column has
  update gdq.table_version v
     set columns = (select coalesce(jsonb_agg(c || jsonb_build_object('attnum', coalesce((now_at->>(c->>'attnum'))::int, 10000 + (c->>'attnum')::int))), '[]')
                      from jsonb_array_elements(v.columns) c)
   where v.table_id = t.table_id;
  return lost;
end
$$;
comment on function gdq.rebase_columns(integer) is 'Brings attribute numbers of a captured table in line with this database.';

-- rebase_table(table_id, keep): puts a captured table under capture anew: functions, triggers and a log version that fit
-- this database. keep: the old versions stay until their rows are read; else they are dropped, unread.
-- Writes: triggers, functions, control rows, segments; resync where it cannot be captured. Errors: 42501, 55P03.
create or replace function gdq.rebase_table(table_id integer, keep boolean) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
declare
  t gdq.captured_table;
  old_version bigint := gdq.current_version(table_id);
  version bigint;
  described jsonb;
  lost text := gdq.rebase_columns(table_id);
  fault text;
  s record;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = rebase_table.table_id;
  if not has_table_privilege(t.relid, 'TRIGGER') or (gdq.capture_owner() <> 'gdq_capture'
       and not pg_has_role(current_user, (select c.relowner from pg_class c where c.oid = t.relid), 'usage')) then
    raise exception 'no right to capture %', t.table_name using errcode = 'insufficient_privilege',
      hint = format('GRANT TRIGGER ON %s TO %I; and create role gdq_capture and GRANT gdq_capture TO %2$I;', t.table_name, current_user);
  end if;
  perform gdq.create_capture(t.queue_id, t.relid, t.operations, t.granularity, t.always, t.origin);
  perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
  delete from gdq.captured_leaf cl where cl.table_id = t.table_id;
  insert into gdq.captured_leaf (table_id, leaf) select t.table_id, p.relid from pg_partition_tree(t.relid) p where p.relid <> t.relid;
  begin
    perform gdq.refuse_partitions(t.relid);
    fault := case when lost is not null then 'captured columns are gone or renamed: ' || lost else gdq.capture_fault(t.table_id) end;
    if fault is not null then
      raise exception '%', fault;
    end if;
    described := gdq.describe_table(t.table_id);
    perform gdq.check_key(t.table_id, described);
    version := gdq.create_version(t.table_id, described, 3);
    perform gdq.arm(version, 0);
    perform gdq.note_catalog(t.table_id);
  exception when others then
    version := null;
    perform gdq.note_resync(t.queue_id, t.relid, 'disarmed', 'capture stays off: ' || sqlerrm);
  end;
  if not keep then
    -- one that cannot be captured now keeps the columns that it had, for when it can
    for s in select ls.segment, v.version_id = old_version and version is null as kept
               from gdq.log_segment ls join gdq.table_version v using (version_id) where v.table_id = t.table_id and v.version_id <= old_version loop
      execute format(case when s.kept then 'truncate %s' else 'drop table %s' end, gdq.table_name(s.segment));
    end loop;
    perform gdq.drop_row_type(v.version_id) from gdq.table_version v where v.table_id = t.table_id and v.version_id < coalesce(version, old_version);
    delete from gdq.table_version v where v.table_id = t.table_id and v.version_id < coalesce(version, old_version);
  end if;
end
$$;
comment on function gdq.rebase_table(integer, boolean) is 'Puts a captured table under capture anew after a restore.';

-- rebase_tables(queue_id, keep): rebase_table() for every captured table of a queue; a table that was gone or covered is
-- forgotten. All functions go first: the oid in the name of one may be that of another table by now. The table's own
-- triggers lead to those of its functions, and go with them. Writes: as rebase_table(); resync and the event log.
create or replace function gdq.rebase_tables(queue_id integer, keep boolean, why text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set client_min_messages = warning set lock_timeout = '500ms'
as $$
declare
  t record;
  f record;
  gone integer[] := array(select ct.table_id from gdq.captured_table ct
                           where ct.queue_id = rebase_tables.queue_id
                             and (gdq.capture_state(ct.queue_id, ct.relid) in ('dropped', 'covered')
                                  or not exists (select from pg_class c where c.oid = ct.relid)));
begin
  delete from gdq.resync r where r.queue_id = rebase_tables.queue_id;
  -- tells the DDL guard that what follows is no accident
  insert into gdq.resync (queue_id, relid, kind, reason)
    select ct.queue_id, ct.relid, 'dropped', 'rebase' from gdq.captured_table ct where ct.queue_id = rebase_tables.queue_id;
  for f in select p.proname, pg_has_role(current_user, p.proowner, 'usage') as own, pg_get_userbyid(p.proowner) as owner from pg_proc p
            where p.pronamespace = 'gdq_log'::regnamespace and p.proname ~ format('^t\d+_q%s_[iudt]$', queue_id) loop
    if not f.own then
      raise exception 'function gdq_log.% belongs to %, who restored it', f.proname, f.owner using errcode = 'insufficient_privilege',
        hint = format('As %s: GRANT %I TO %I; then rebase, and REVOKE it again.', f.owner, f.owner, current_user);
    end if;
    execute format('drop function gdq_log.%I() cascade', f.proname);
  end loop;
  for t in select ct.*, ct.table_id = any (gone) as is_gone from gdq.captured_table ct
            where ct.queue_id = rebase_tables.queue_id order by ct.relid loop
    if t.is_gone then
      for f in select ls.segment from gdq.log_segment ls join gdq.table_version v using (version_id) where v.table_id = t.table_id loop
        execute format('drop table %s', gdq.table_name(f.segment));
      end loop;
      perform gdq.drop_row_type(v.version_id) from gdq.table_version v where v.table_id = t.table_id;
      delete from gdq.captured_table ct where ct.table_id = t.table_id;
      perform gdq.log_event(queue_id, 'resync', null, jsonb_build_object('kind', 'dropped', 'reason', why, 'table', t.table_name));
    else
      perform gdq.rebase_table(t.table_id, keep);
      -- where capture stays off, the reason has been noted already
      if not keep and gdq.capture_state(t.queue_id, t.relid) <> 'disarmed' then
        perform gdq.note_resync(t.queue_id, t.relid, 'gap', why);
      end if;
    end if;
  end loop;
  delete from gdq.resync r where r.queue_id = rebase_tables.queue_id and r.kind = 'dropped';
end
$$;
comment on function gdq.rebase_tables(integer, boolean, text) is 'Puts the captured tables of a queue under capture anew after a restore.';

-- rebase_events(queue_id, keep, positions, keep_below): the event log of a restored queue: messages stay unread for
-- whoever has not passed them. What else it holds goes, since a resync event says more; with keep it stays likewise,
-- under the tables' oids of this database, which their triggers' names lead to. Writes: the event log.
create or replace function gdq.rebase_events(queue_id integer, keep boolean, positions pg_snapshot[], keep_below bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  log regclass;
begin
  for log in select s from gdq.event_segments(queue_id) s loop
    if keep then
      execute format('update %s e set ev_table = r.relid from (select distinct split_part(tg.tgname, ''_'', 2)::oid as was, ct.relid::oid '
        'from gdq.captured_table ct join pg_trigger tg on tg.tgrelid = ct.relid and tg.tgname ~ %L where ct.queue_id = %s) r where e.ev_table = r.was',
        gdq.table_name(log), format('^!gdq_\d+_%s_i$', queue_id), queue_id);
    else
      execute format('delete from %s where ev_kind <> ''message''', gdq.table_name(log));
    end if;
    perform gdq.move_rows(log, positions, keep_below);
  end loop;
end
$$;
comment on function gdq.rebase_events(integer, boolean, pg_snapshot[], bigint) is 'Gives the event log of a restored queue numbers of this cluster.';

-- require_kept(queue_id): error unless the positions of a restored queue can be kept: every number that was given out lies
-- before its last tick, so nothing was written since, in neither cluster. Writes: nothing. Errors: 55000.
create or replace function gdq.require_kept(queue_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  why text;
begin
  select case when gdq.last_event(q.queue_id) <> (gdq.last_tick(q.queue_id)).event_seq then 'changes were captured after its last tick'
              when exists (select from gdq.log_loss l where l.queue_id = q.queue_id) then 'a crash had emptied its unlogged logs'
              else coalesce((select 'capture of ' || ct.table_name || ' was off' from gdq.captured_table ct
                              where ct.queue_id = q.queue_id and gdq.capture_state(ct.queue_id, ct.relid) <> 'armed' limit 1),
                            (select 'members of consumer ' || c.consumer_name || ' finished batches before an older one'
                               from gdq.subscription s join gdq.consumer c using (consumer_id), gdq.position_of(s.subscription_id) p
                              where s.queue_id = q.queue_id
                                and exists (select from gdq.batch_end e where e.subscription_id = s.subscription_id and e.batch_no > p.batch_no) limit 1)) end
    into why from gdq.queue q where q.queue_id = require_kept.queue_id;
  if why is not null then
    raise exception 'the positions of queue "%" cannot be kept: %', (select q.queue_name from gdq.queue q where q.queue_id = require_kept.queue_id), why
      using errcode = 'object_not_in_prerequisite_state', hint = 'Rebase without keep: every consumer then reads its tables afresh.';
  end if;
end
$$;
comment on function gdq.require_kept(integer) is 'Error unless the positions of a restored queue can be kept.';

-- drop_strays(): drops logs that no control row knows: a dump that was restored over an installed database has left them,
-- and new ones may get their names. Writes: drops tables in gdq_log.
create or replace function gdq.drop_strays() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500ms'
as $$
declare
  stray record;
begin
  for stray in select c.oid from pg_class c
                where c.relnamespace = 'gdq_log'::regnamespace and c.relkind = 'r' and c.relname ~ '^t\d+_v\d+_[su]\d$'
                  and not exists (select from gdq.log_segment s where s.segment = c.oid) loop
    execute format('drop table %s', gdq.table_name(stray.oid));
  end loop;
end
$$;
comment on function gdq.drop_strays() is 'Drops logs that no control row knows.';

-- rebase_queue(queue_id, keep): rebase() of one queue, whose tick lock the caller holds. Writes and errors: as rebase().
create or replace function gdq.rebase_queue(queue_id integer, keep boolean) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  positions record;
  tick bigint;
  p record;
  last_number bigint := (select max(t.event_seq) from gdq.tick t where t.queue_id = rebase_queue.queue_id and not t.refresh);
begin
  perform pg_advisory_xact_lock(gdq.lock_key('position', queue_id));
  perform from gdq.subscription s where s.queue_id = rebase_queue.queue_id order by s.subscription_id for update;
  if keep then
    perform gdq.require_kept(queue_id);
  end if;
  perform gdq.rebase_retries(queue_id);
  perform gdq.rebase_resync(queue_id, keep);
  select array_agg(r.old_snapshot order by n) as old, array_agg(r.new_snapshot order by n) as new, array_agg(r.event_seq order by n) as seq
    into positions from gdq.rebase_positions(queue_id) with ordinality r(old_snapshot, new_snapshot, event_seq, n);
  perform gdq.rebase_events(queue_id, keep, coalesce(positions.old, '{}'), last_number);
  if keep then
    perform gdq.move_rows(ls.segment, coalesce(positions.old, '{}'), last_number)
       from gdq.captured_table ct join gdq.table_version v using (table_id) join gdq.log_segment ls using (version_id)
      where ct.queue_id = rebase_queue.queue_id;
  end if;
  -- an old tick would be a place to start from; this happens once a restore, so the dead rows do not matter
  delete from gdq.tick t where t.queue_id = rebase_queue.queue_id;
  delete from gdq.log_loss l where l.queue_id = rebase_queue.queue_id;
  insert into gdq.tick (queue_id, snapshot, event_seq) values (queue_id, '3:3:', 0);
  perform gdq.start_era(queue_id);
  perform gdq.rebase_tables(queue_id, keep, 'the database was restored from a dump');
  update gdq.horizon h set snapshot = '3:3:' where h.queue_id = rebase_queue.queue_id;
  for i in 1 .. coalesce(cardinality(positions.new), 0) loop
    insert into gdq.tick (queue_id, snapshot, event_seq) values (queue_id, positions.new[i], positions.seq[i]) returning tick_id into tick;
    for p in select s.subscription_id, pos.batch_no, pos.event_seq,
                    (select max(b.batch_no) from gdq.batch b where b.subscription_id = s.subscription_id) as open_no
               from gdq.subscription s, gdq.position_of(s.subscription_id) pos
              where s.queue_id = rebase_queue.queue_id and pos.snapshot::text = positions.old[i]::text loop
      perform gdq.fence(p.subscription_id);
      insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
        values (p.subscription_id, greatest(p.batch_no, p.open_no) + 1, tick, positions.new[i], p.event_seq);
    end loop;
  end loop;
end
$$;
comment on function gdq.rebase_queue(integer, boolean) is 'Starts a new era of one restored queue.';

-- rebase(queue, keep): starts a new era of a queue, or of all, that was restored from a dump: capture is made anew, and
-- every consumer is told to read each of its tables afresh (a resync event with the reason). Messages that a
-- consumer has not passed come all the same.
--   keep: consumers go on where the dump has them, and no table is read afresh. Only if writers were stopped before the
--   last tick of the old server and begin after this, which is checked but for TRUNCATE and statement triggers of
--   partitions, and consumers read nothing there after the dump, which is not.
-- It also helps where the last tick is later than the server's transactions, after pg_resetwal or a replica made by logical
-- replication. Result: one row a consumer and table with what became of it, resync or kept; none for nothing to do.
-- Writes: all control tables of the queue, its logs, capture functions and triggers.
-- Errors: 42704; 55000 where event triggers or captured tables are missing or positions cannot be kept; 42501; 55P03 when writers or readers
-- hold a table or log: nothing is changed, try again; GDQ04.
create or replace function gdq.rebase(queue text default null, keep boolean default false)
  returns table (queue_name text, consumer_name text, table_name text, outcome text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  q record;
begin
  perform gdq.require_read_committed('rebase');
  if queue is not null and not exists (select from gdq.queue qq where qq.queue_name = queue) then
    raise exception 'queue "%" does not exist', queue using errcode = 'undefined_object', hint = 'List the queues with gdq.queue_info().';
  end if;
  if exists (select from gdq.table_version v where not exists (select from gdq.captured_table ct where ct.table_id = v.table_id)) then
    raise exception 'the dump was restored in part: captured tables are missing' using errcode = 'object_not_in_prerequisite_state',
      hint = 'Restore the whole database; or gdq uninstall and install, and start anew.';
  end if;
  for q in select qq.queue_id, qq.queue_name from gdq.queue qq where queue is null or qq.queue_name = queue order by 2 loop
    perform pg_advisory_xact_lock(gdq.lock_key('tick', q.queue_id));
    continue when (gdq.era_of(q.queue_id)).era is not null and gdq.snapshot_le((gdq.last_tick(q.queue_id)).snapshot, pg_current_snapshot());
    if not gdq.event_triggers_on() and exists (select from gdq.captured_table ct where ct.queue_id = q.queue_id and ct.format = 'typed') then
      raise exception 'the event triggers of gdq are missing or off: an ALTER TABLE could make writes fail'
        using errcode = 'object_not_in_prerequisite_state', hint = 'As a superuser: gdq create-event-triggers, or SELECT gdq.create_event_triggers().';
    end if;
    perform gdq.restore_rights();
    perform gdq.drop_strays();
    perform gdq.rebase_queue(q.queue_id, keep);
    return query
      select q.queue_name, c.consumer_name, t.table_name, case when keep and gdq.capture_state(q.queue_id, t.relid) = 'armed' then 'kept' else 'resync' end
        from gdq.subscription s join gdq.consumer c using (consumer_id), gdq.subscribed_tables(s.subscription_id) t
       where s.queue_id = q.queue_id order by 2, 3;
  end loop;
end
$$;
comment on function gdq.rebase(text, boolean) is 'Starts a new era of queues that were restored from a dump.';
