-- What happens to a consumer that must copy a table anew, or is moved: its open batches become stale, its position
-- moves, and states that nobody needs any more are deleted.

-- fence(subscription_id): makes the tokens of a subscription's open batches stale, since these batches would now give
-- other events than their workers have read. The caller has locked the subscription. Writes: batch_token.
create or replace function gdq.fence(subscription_id integer) returns void
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  insert into gdq.batch_token (batch_id)
    select b.batch_id from gdq.batch b
     where b.subscription_id = fence.subscription_id and not gdq.is_finished(b.subscription_id, b.batch_no, b.batch_id)
$$;
comment on function gdq.fence(integer) is 'Makes the tokens of a subscription''s open batches stale.';

-- move_position(subscription_id, target): puts a subscription at a tick and leaves its open batches behind, also those
-- that members hold. The caller has locked the subscription. Writes: position, batch_token.
create or replace function gdq.move_position(subscription_id integer, target gdq.tick) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform gdq.fence(subscription_id);
  insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
    select p.subscription_id,
           1 + greatest(p.batch_no, (select max(b.batch_no) from gdq.batch b
                                      where b.subscription_id = p.subscription_id)),
           target.tick_id, target.snapshot, target.event_seq
      from gdq.position_of(move_position.subscription_id) p;
end
$$;
comment on function gdq.move_position(integer, gdq.tick) is
  'Puts a subscription at a tick and leaves its open batches behind.';

-- trim_resync(): deletes rows of subscription_resync that are no longer needed: those that a newer row of the same
-- table has replaced, and those of removed tables when the consumer and every possible seek have passed the removal.
-- Writes: subscription_resync.
create or replace function gdq.trim_resync() returns void
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  delete from gdq.subscription_resync r
   where r.kind <> 'removed'
     and exists (select from gdq.subscription_resync newer
                  where newer.subscription_id = r.subscription_id
                    and newer.relid is not distinct from r.relid
                    and newer.kind <> 'removed'
                    and newer.state_id > r.state_id);
  delete from gdq.subscription_resync r
   using gdq.subscription s join gdq.horizon h using (queue_id) join gdq.latest_positions() p using (subscription_id)
   where r.kind = 'removed' and s.subscription_id = r.subscription_id
     and pg_visible_in_snapshot(r.txid::text::xid8, h.snapshot)
     and pg_visible_in_snapshot(r.txid::text::xid8, p.snapshot)
$$;
comment on function gdq.trim_resync() is 'Deletes rows of subscription_resync that are no longer needed.';
