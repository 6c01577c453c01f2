-- finish_batch(batch_id, token): finishes a batch: its consumer moves past it. In the transaction that applied the
-- batch to the same database this gives exactly-once processing. Events that were put aside then wait for their retry,
-- and the retries that the batch brought are settled (their states: retry/retry_event.sql). With members, the position
-- moves once all older batches are finished too. Other workers of the consumer wait from here to the end of the
-- transaction.
-- Result: true; false when this token had finished the batch already.
-- Writes: position, batch_end, dead_letter. Errors: GDQ01 for a stale token; GDQ04; GDQ07; 42501 for a batch of another
-- role's consumer; 55000 for a batch of a refresh.
create or replace function gdq.finish_batch(batch_id bigint, token uuid) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  b gdq.batch;
  later gdq.batch;
  pos gdq.position;
begin
  perform gdq.require_read_committed('finish_batch');
  -- before the row lock: other workers must not wait for a worker that is putting an event aside
  perform pg_advisory_xact_lock(gdq.token_key(token));
  b := gdq.named_batch(batch_id);
  perform from gdq.subscription s where s.subscription_id = b.subscription_id for no key update;
  if not gdq.holds_batch(b, token) then
    return false;
  end if;
  if b.snapshot_to is null then
    raise exception 'batch % belongs to a refresh', batch_id
      using errcode = 'object_not_in_prerequisite_state', hint = 'A refresh ends with gdq.set_position().';
  end if;
  pos := gdq.position_of(b.subscription_id);
  if gdq.end_retries(b, token) or b.batch_no > pos.batch_no + 1 then
    insert into gdq.batch_end (subscription_id, batch_no, batch_id, token)
      values (b.subscription_id, b.batch_no, b.batch_id, finish_batch.token);
  end if;
  if b.batch_no = pos.batch_no + 1 then
    -- the position also passes later batches that other members have finished already
    loop
      select bb.* into later from gdq.batch bb join gdq.batch_end e on e.batch_id = bb.batch_id
       where bb.subscription_id = b.subscription_id and bb.batch_no = b.batch_no + 1;
      exit when later.batch_id is null;
      b := later;
    end loop;
    insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
      values (b.subscription_id, b.batch_no, b.tick_to, b.snapshot_to, b.event_seq);
  end if;
  return true;
end
$$;
comment on function gdq.finish_batch(bigint, uuid) is
  'Finishes a batch: its consumer moves past it; false when this token had finished it already.';

-- end_retries(b, token): does the part of finish_batch() about retries: stores the dead letters of a batch. Result:
-- whether the batch brought or put aside any events, and so needs a row in batch_end. Writes: dead_letter.
create or replace function gdq.end_retries(b gdq.batch, token uuid) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  put boolean := exists (select from gdq.retry_event r where r.batch_id = b.batch_id and r.token = end_retries.token);
begin
  if put then
    insert into gdq.dead_letter (subscription_id, ev_id, ev_txid, ev_time, op, tbl, key, old, new, origin,
                                 retries, reason)
      select r.subscription_id, r.ev_id, r.ev_txid, r.ev_time, r.op, r.tbl, r.key, r.old, r.new, r.origin,
             r.retries, r.reason
        from gdq.retry_event r
       where r.batch_id = b.batch_id and r.token = end_retries.token and r.dead
       order by r.retry_id;
  end if;
  return put or exists (select from gdq.retry_delivery d where d.batch_id = b.batch_id);
end
$$;
comment on function gdq.end_retries(gdq.batch, uuid) is
  'Stores the dead letters of a batch; whether it brought or put aside any events.';
