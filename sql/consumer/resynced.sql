-- resynced(queue, consumer, tbl, snapshot): notes that a consumer has copied a table anew as of a snapshot, so that the
-- consumer goes on after a resync event or after max_bytes cut it off. Changes that are visible in the snapshot do not
-- come again, nor do retries of such changes; other tables are untouched. Call it in the transaction that stored the
-- copy.
--   tbl: a table that the consumer takes, or one removed from the queue. NULL: messages, which cannot be copied; the
--   call then says that the consumer knows of the loss.
--   snapshot: pg_current_snapshot() of the transaction that read the table, on the primary, not before the consumer's
--   position.
-- An open batch becomes stale: next_batch() hands it out again, without the changes that the copy holds.
-- Writes: subscription_resync, batch_token. Errors: 42704; 22023; 42501; 55006 for the consumer of a view; GDQ02 when
-- the consumer has read past the snapshot; GDQ03 when capture missed changes after the snapshot, or is off; GDQ04.
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
    raise exception 'snapshot % is not a past snapshot of this server', coalesce(snapshot::text, 'NULL')
      using errcode = 'invalid_parameter_value',
      hint = 'It is pg_current_snapshot() of the transaction that read the table.';
  elsif tbl is not null and not exists (select from gdq.subscribed_tables(id) t where t.relid = tbl)
        and not exists (select from gdq.subscription_resync r where r.subscription_id = id and r.relid = tbl) then
    raise exception 'consumer "%" of queue "%" does not take table %',
      consumer, queue, coalesce(gdq.table_name(tbl), tbl::text)
      using errcode = 'undefined_object', hint = 'gdq.set_tables() changes what it takes.';
  end if;
  -- a member may have finished a later batch
  select b.snapshot_to into later from gdq.batch b join gdq.batch_end e using (batch_id)
   where b.subscription_id = id and b.batch_no > pos.batch_no order by b.batch_no desc limit 1;
  if not gdq.snapshot_le(coalesce(later, pos.snapshot), snapshot) then
    raise exception 'consumer "%" of queue "%" has read up to %, past snapshot %',
      consumer, queue, coalesce(later, pos.snapshot), snapshot
      using errcode = 'GDQ02', hint = 'Copy the table again, and call this at once.';
  end if;
  perform gdq.refuse_gap(queue_of, tbl, snapshot);
  insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot) values (id, tbl, 'copied', snapshot);
  perform gdq.fence(id);
end
$$;
comment on function gdq.resynced(text, text, regclass, pg_snapshot) is
  'Notes that a consumer has copied a table anew as of a snapshot; it goes on from there.';

-- refuse_gap(queue_id, tbl, snapshot): error when changes of a table after a snapshot were not captured, so that a copy
-- at the snapshot misses changes that no event will bring. Writes: nothing. Errors: GDQ03.
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
    raise exception 'capture of table % is off: changes after the snapshot would be missed', gdq.table_name(tbl)
      using errcode = 'GDQ03',
            hint = 'gdq.maintain() or a ticker switches it on, gdq.table_info() says why it is off. '
                   'Then copy the table again.';
  end if;
end
$$;
comment on function gdq.refuse_gap(integer, regclass, pg_snapshot) is
  'Error GDQ03 when a copy read at a snapshot lacks changes that no event will bring.';
