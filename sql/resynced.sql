-- resynced(queue, consumer, tbl, snapshot): the consumer has copied a table anew, as of a snapshot: it goes on past
-- whatever asked for that (a resync event, max_bytes). Changes that are visible in the snapshot are not delivered again,
-- nor are those that wait to be retried; other tables are untouched. To be called in the transaction that stored the copy.
--   tbl: a table that the consumer takes, or one removed from the queue; NULL: messages, which nobody can copy: the
--   consumer only says that it knows. snapshot: pg_current_snapshot() of the transaction that read the table, on the
--   primary, not before the consumer's position.
-- A batch that is open becomes stale: next_batch() hands it out again, without what the copy holds.
-- Writes: subscription_resync, batch_token. Errors: 42704; 22023; 55006 for the consumer of a view; GDQ02 when changes
-- after the snapshot are gone or passed; GDQ03 when the snapshot has missed changes itself; GDQ04.
create or replace function gdq.resynced(queue text, consumer text, tbl regclass, snapshot pg_snapshot) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  id integer;
  pos gdq.position;
  later pg_snapshot;
begin
  perform gdq.refuse_view_consumer(queue_of, consumer, 'it loads itself in full');
  id := gdq.lock_subscription(queue, consumer);
  pos := gdq.position_of(id);
  if snapshot is null or not gdq.snapshot_le(snapshot, pg_current_snapshot()) then
    raise exception 'snapshot % is not one of this server''s past', coalesce(snapshot::text, 'NULL') using errcode = 'invalid_parameter_value',
      hint = 'It is pg_current_snapshot() of the transaction that read the table.';
  elsif tbl is not null and not exists (select from gdq.subscribed_tables(id) t where t.relid = tbl)
        and not exists (select from gdq.subscription_resync r where r.subscription_id = id and r.relid = tbl) then
    raise exception 'consumer "%" of queue "%" does not take table %', consumer, queue, coalesce(gdq.table_name(tbl), tbl::text)
      using errcode = 'undefined_object', hint = 'gdq.set_tables() changes what it takes.';
  end if;
  -- a member may have finished a later batch
  select b.snapshot_to into later from gdq.batch b join gdq.batch_end e using (batch_id)
   where b.subscription_id = id and b.batch_no > pos.batch_no order by b.batch_no desc limit 1;
  if not gdq.snapshot_le(coalesce(later, pos.snapshot), snapshot) then
    raise exception 'consumer "%" of queue "%" has read up to %, past snapshot %', consumer, queue, coalesce(later, pos.snapshot), snapshot
      using errcode = 'GDQ02', hint = 'Copy the table again, and call this at once.';
  end if;
  perform gdq.refuse_gap(queue_of, tbl, snapshot);
  insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot) values (id, tbl, 'copied', snapshot);
  perform gdq.fence(id);
end
$$;
comment on function gdq.resynced(text, text, regclass, pg_snapshot) is 'Notes that a consumer has copied a table anew as of a snapshot; it goes on from there.';

-- refuse_gap(queue_id, tbl, snapshot): error when a copy read at a snapshot lacks changes that no event will bring:
-- capture was off then, or missed something since. Writes: nothing. Errors: GDQ03.
create or replace function gdq.refuse_gap(queue_id integer, tbl regclass, snapshot pg_snapshot) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  gap gdq.resync;
begin
  select * into gap from gdq.resync r
   where r.queue_id = refuse_gap.queue_id and r.relid = tbl and r.kind in ('gap', 'disarmed', 'armed')
     and not pg_visible_in_snapshot(r.txid::text::xid8, snapshot)
   order by r.resync_id desc limit 1;
  if gap.resync_id is not null then
    raise exception 'table % has another gap since snapshot %: %', gdq.table_name(tbl), snapshot, gap.reason
      using errcode = 'GDQ03', hint = 'Copy it again.';
  elsif gdq.capture_state(queue_id, tbl) = 'disarmed' then
    raise exception 'capture of table % is off, what follows the snapshot would be missed', gdq.table_name(tbl)
      using errcode = 'GDQ03', hint = 'gdq.maintain() or a ticker switches it on, gdq.table_info() says why it is off. Then copy the table again.';
  end if;
end
$$;
comment on function gdq.refuse_gap(integer, regclass, pg_snapshot) is 'Error GDQ03 when a copy read at a snapshot lacks changes that no event will bring.';

-- refuse_view_consumer(queue_id, consumer, instead): error for the consumer of a view, whose position lies in its target.
-- Writes: nothing. Errors: 55006.
create or replace function gdq.refuse_view_consumer(queue_id integer, consumer text, instead text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  used_by text;
begin
  select v.view_name into used_by from gdq.view v where v.queue_id = refuse_view_consumer.queue_id and v.consumer_name = consumer;
  if used_by is not null then
    raise exception 'consumer "%" refreshes the view "%": %', consumer, used_by, instead using errcode = 'object_in_use';
  end if;
end
$$;
comment on function gdq.refuse_view_consumer(integer, text, text) is 'Error 55006 for the consumer of a view.';

-- fence(subscription_id): makes the tokens of open batches stale: what they were read as is no longer what they hold.
-- The caller has locked the subscription. Writes: batch_token.
create or replace function gdq.fence(subscription_id integer) returns void
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  insert into gdq.batch_token (batch_id)
    select b.batch_id from gdq.batch b
     where b.subscription_id = fence.subscription_id and not gdq.is_finished(b.subscription_id, b.batch_no, b.batch_id)
$$;
comment on function gdq.fence(integer) is 'Makes the tokens of a subscription''s open batches stale.';

-- move_position(subscription_id, target): puts a subscription at a tick and leaves its open batches behind, also those
-- that members hold. The caller has locked it. Writes: position, batch_token.
create or replace function gdq.move_position(subscription_id integer, target gdq.tick) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform gdq.fence(subscription_id);
  insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
    select p.subscription_id, 1 + greatest(p.batch_no, (select max(b.batch_no) from gdq.batch b where b.subscription_id = p.subscription_id)),
           target.tick_id, target.snapshot, target.event_seq
      from gdq.position_of(move_position.subscription_id) p;
end
$$;
comment on function gdq.move_position(integer, gdq.tick) is 'Puts a subscription at a tick and leaves its open batches behind.';

-- copied_tables(subscription_id): the tables that a subscription gets changes of only after a snapshot of their own,
-- from which on it has them. Writes: nothing.
create or replace function gdq.copied_tables(subscription_id integer) returns table (relid regclass, snapshot pg_snapshot)
language plpgsql volatile rows 1 security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select r.relid, r.snapshot
      from (select distinct on (sr.relid) sr.relid, sr.kind, sr.snapshot from gdq.subscription_resync sr
             where sr.subscription_id = copied_tables.subscription_id and sr.kind <> 'removed' order by sr.relid, sr.state_id desc) r
     where r.kind = 'copied';
end
$$;
comment on function gdq.copied_tables(integer) is 'The tables of a subscription that it has as of a snapshot of their own.';

-- snapshot_max(a, b): the later of two snapshots of one primary; b may be NULL. Writes: nothing.
create or replace function gdq.snapshot_max(a pg_snapshot, b pg_snapshot) returns pg_snapshot
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select case when b is null or gdq.snapshot_le(b, a) then a else b end
$$;
comment on function gdq.snapshot_max(pg_snapshot, pg_snapshot) is 'The later of two snapshots.';

-- delivered_from(b, tbl): the snapshot after which a batch gives changes of a table: the batch's own start, or that of a
-- later copy. Writes: nothing.
create or replace function gdq.delivered_from(b gdq.batch, tbl regclass) returns pg_snapshot
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select gdq.snapshot_max(b.snapshot_from, (select c.snapshot from gdq.copied_tables(b.subscription_id) c where c.relid = tbl))
$$;
comment on function gdq.delivered_from(gdq.batch, regclass) is 'The snapshot after which a batch gives changes of a table.';

-- cut_tables(subscription_id): the tables (NULL: messages) whose changes were dropped before a subscription read them,
-- and which it must copy before it gets another batch. Writes: nothing.
create or replace function gdq.cut_tables(subscription_id integer) returns table (relid regclass, reason text)
language plpgsql volatile rows 1 security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select r.relid, r.reason
      from (select distinct on (sr.relid) sr.* from gdq.subscription_resync sr
             where sr.subscription_id = cut_tables.subscription_id and sr.kind <> 'removed' order by sr.relid, sr.state_id desc) r
     where r.kind = 'cut'
       and (r.relid is null or r.relid in (select t.relid from gdq.subscribed_tables(cut_tables.subscription_id) t join pg_class c on c.oid = t.relid));
end
$$;
comment on function gdq.cut_tables(integer) is 'The tables that a subscription must copy before it gets another batch.';

-- resync_tables(subscription_id): the tables that a subscription must copy anew, now (cut) or once it comes to the
-- resync event, with the latest reason. Writes: nothing.
create or replace function gdq.resync_tables(subscription_id integer) returns table (relid regclass, reason text)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select c.relid, c.reason from gdq.cut_tables(resync_tables.subscription_id) c
  union all
  (select distinct on (r.relid) r.relid, r.reason
     from gdq.latest_positions() p join gdq.subscription s using (subscription_id) join gdq.resync r using (queue_id)
     left join gdq.copied_tables(resync_tables.subscription_id) c on c.relid = r.relid
    where s.subscription_id = resync_tables.subscription_id and r.kind in ('gap', 'disarmed', 'armed', 'covered')
      and (not pg_visible_in_snapshot(r.txid::text::xid8, gdq.snapshot_max(p.snapshot, c.snapshot)) or gdq.capture_state(r.queue_id, r.relid) = 'disarmed')
      and r.relid in (select t.relid from gdq.subscribed_tables(s.subscription_id) t)
      and r.relid not in (select k.relid from gdq.cut_tables(s.subscription_id) k where k.relid is not null)
    order by r.relid, r.resync_id desc)
$$;
comment on function gdq.resync_tables(integer) is 'The tables that a subscription must copy anew.';

-- batch_gaps(batch_id, token, of_table): the truncate, ddl and resync events of one table in an open batch: what its row
-- images do not show. Writes: nothing. Errors: GDQ01; 42704 for a table that the consumer does not take.
create or replace function gdq.batch_gaps(batch_id bigint, token uuid, of_table regclass) returns table (ev_id bigint, kind text, tbl text, data jsonb)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
  events text := gdq.queue_events_sql((select s.queue_id from gdq.subscription s where s.subscription_id = b.subscription_id),
                                      array[of_table::oid], b.snapshot_from, b.snapshot_to, false, b.subscription_id);
begin
  perform gdq.require_held(b, token);
  if not exists (select from gdq.subscribed_tables(b.subscription_id) t where t.relid = of_table)
     and not exists (select from gdq.subscription_resync r where r.subscription_id = b.subscription_id and r.relid = of_table and r.kind = 'removed') then
    raise exception 'table % is not among those of batch %', of_table, batch_id using errcode = 'undefined_object';
  end if;
  if events is not null then
    return query execute 'select ev_id, op, tbl, new from (' || events || ') e order by ev_id';
  end if;
end
$$;
comment on function gdq.batch_gaps(bigint, uuid, regclass) is 'The truncate, ddl and resync events of one table in an open batch.';

-- trim_resync(): deletes states that a newer one of the same table has replaced, and those of removed tables that no
-- position and no seek can come back to. Writes: subscription_resync.
create or replace function gdq.trim_resync() returns void
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  delete from gdq.subscription_resync r
   where r.kind <> 'removed' and exists (select from gdq.subscription_resync newer
                                          where newer.subscription_id = r.subscription_id and newer.relid is not distinct from r.relid
                                            and newer.kind <> 'removed' and newer.state_id > r.state_id);
  delete from gdq.subscription_resync r
   using gdq.subscription s join gdq.horizon h using (queue_id) join gdq.latest_positions() p using (subscription_id)
   where r.kind = 'removed' and s.subscription_id = r.subscription_id
     and pg_visible_in_snapshot(r.txid::text::xid8, h.snapshot) and pg_visible_in_snapshot(r.txid::text::xid8, p.snapshot)
$$;
comment on function gdq.trim_resync() is 'Deletes states of tables that are no longer needed.';

-- rebase_resync(queue_id, keep): the states of a restored queue, whose snapshots mean nothing here. A table that a
-- consumer had copied further than it has read must be copied anew; without keep an event says so of every table.
-- Writes: subscription_resync. Errors: 55000 when an event of a removed table would not find its consumer.
create or replace function gdq.rebase_resync(queue_id integer, keep boolean) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  s integer;
begin
  perform gdq.trim_resync();
  for s in select ss.subscription_id from gdq.subscription ss where ss.queue_id = rebase_resync.queue_id loop
    if keep and exists (select from gdq.subscription_resync r, gdq.position_of(s) p
                         where r.subscription_id = s and r.kind = 'removed' and not pg_visible_in_snapshot(r.txid::text::xid8, p.snapshot)) then
      raise exception 'the positions of the queue cannot be kept: a table was removed, and not all consumers had come to that'
        using errcode = 'object_not_in_prerequisite_state', hint = 'Rebase without keep: every consumer then reads its tables afresh.';
    end if;
    insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot, reason)
      select s, c.relid, 'cut', '1:1:', 'copied, and restored from a dump before what follows was read'
        from gdq.copied_tables(s) c, gdq.position_of(s) p where keep and c.relid is not null and not gdq.snapshot_le(c.snapshot, p.snapshot);
    delete from gdq.subscription_resync r where r.subscription_id = s and r.kind <> 'cut';
    -- no seek leads back to before it
    update gdq.subscription_resync r set snapshot = '1:1:' where r.subscription_id = s;
  end loop;
end
$$;
comment on function gdq.rebase_resync(integer, boolean) is 'Makes the states of a restored queue mean something in this cluster.';
