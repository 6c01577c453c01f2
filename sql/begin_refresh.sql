-- begin_refresh(queue, consumer): takes a consumer for the refresh of a view. Older holders are fenced off.
-- Result: one row (batch_id, token, snapshot = the subscription's position: rows after it are held).
-- Writes: batch, batch_token; what check_logs() writes. Errors: 42704, GDQ04; 55000 when the consumer has members, or the
-- queue is paused.
create or replace function gdq.begin_refresh(queue text, consumer text) returns table (batch_id bigint, token uuid, snapshot pg_snapshot)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  id integer := gdq.lock_subscription(queue, consumer);
  pos gdq.position := gdq.position_of(id);
  b gdq.batch;
begin
  perform gdq.require_member(id, null);
  perform gdq.refuse_paused(gdq.find_queue(queue));
  perform gdq.check_logs(queue);
  select * into b from gdq.batch where subscription_id = id and batch_no = pos.batch_no + 1;
  if b.batch_id is null then
    insert into gdq.batch (subscription_id, batch_no, tick_from, snapshot_from)
      values (id, pos.batch_no + 1, pos.tick_id, pos.snapshot) returning * into b;
  end if;
  insert into gdq.batch_token (batch_id) values (b.batch_id) returning batch_token.token into token;
  return query select b.batch_id, token, pos.snapshot;
end
$$;
comment on function gdq.begin_refresh(text, text) is 'Takes a consumer for a refresh and fences older holders off.';

-- add_tick(queue, snapshot): records the snapshot of a refresh as a tick. A position that is kept outside the database
-- names it with its nonce, so that a source which lost its tail is recognised. next_batch does not stop at it.
-- Result: one row (tick_id, nonce). Writes: tick. Errors: 42704, GDQ04; 55000 for a snapshot from the future.
create or replace function gdq.add_tick(queue text, snapshot pg_snapshot) returns table (tick_id bigint, nonce uuid)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  queue_of integer := gdq.find_queue(queue);
begin
  perform gdq.require_read_committed('add_tick');
  if not gdq.snapshot_le(add_tick.snapshot, pg_current_snapshot()) then
    raise exception 'snapshot % is later than the server''s %', add_tick.snapshot, pg_current_snapshot()
      using errcode = 'object_not_in_prerequisite_state';
  end if;
  return query
    insert into gdq.tick (queue_id, snapshot, event_seq, refresh) values (queue_of, add_tick.snapshot, gdq.last_event(queue_of), true)
    returning tick.tick_id, tick.nonce;
end
$$;
comment on function gdq.add_tick(text, pg_snapshot) is 'Records the snapshot of a refresh as a tick; returns its id and nonce.';

-- tick_nonce(tick_id): the nonce of a tick; NULL when it is gone. Writes: nothing.
create or replace function gdq.tick_nonce(tick_id bigint) returns uuid
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select t.nonce from gdq.tick t where t.tick_id = tick_nonce.tick_id
$$;
comment on function gdq.tick_nonce(bigint) is 'Nonce of a tick; NULL when it is gone.';

-- set_position(queue, consumer, token, snapshot): ends a refresh: rows up to the snapshot are no longer held for it.
-- Writes: position, subscription_resync. Errors: GDQ01 for a stale token; 22023 when the snapshot lies before the position; GDQ04.
create or replace function gdq.set_position(queue text, consumer text, token uuid, snapshot pg_snapshot) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.lock_subscription(queue, consumer);
  pos gdq.position := gdq.position_of(id);
  b gdq.batch;
begin
  select * into b from gdq.batch bb where bb.subscription_id = id and bb.batch_no = pos.batch_no + 1;
  b := gdq.open_batch(b.batch_id, token);
  if not gdq.snapshot_le(pos.snapshot, snapshot) or not gdq.snapshot_le(snapshot, pg_current_snapshot()) then
    raise exception 'snapshot % does not lie between the position % and now', snapshot, pos.snapshot using errcode = 'invalid_parameter_value';
  end if;
  -- The tick of the refresh itself, which the target names: trim() keeps what a position points at.
  insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
    select id, b.batch_no, coalesce(max(t.tick_id), pos.tick_id), set_position.snapshot, coalesce(max(t.event_seq), pos.event_seq)
      from gdq.tick t
     where t.queue_id = gdq.find_queue(queue) and t.refresh and t.snapshot::text = set_position.snapshot::text and t.tick_id >= pos.tick_id;
  -- a refresh that found its changes gone has loaded in full
  insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot)
    select id, c.relid, 'copied', set_position.snapshot from gdq.cut_tables(id) c;
end
$$;
comment on function gdq.set_position(text, text, uuid, pg_snapshot) is 'Ends a refresh: moves its consumer to the snapshot that the target holds.';
