-- retry_event(batch_id, token, ev_id, delay, reason, op): puts an event of an open batch aside: it comes again, by
-- gdq.get_retries(), in the first batch that is opened after the delay. It counts once this batch is finished under this
-- token, so it is undone with the transaction, and when another worker takes the batch over. An event that has been
-- retried as often as gdq.set_retry_limit() allows becomes a dead letter instead. Later changes of the same row do not wait.
--   op: only the event of this number with this op; mode pk gives a changed key as a delete and an insert of one number.
-- Result: true; false when it became a dead letter. Writes: retry_event. Errors: GDQ01 for a stale token or a finished
-- batch; 42704 when the batch holds no such event; 55000 for a resync event; 22023; GDQ04.
create or replace function gdq.retry_event(batch_id bigint, token uuid, ev_id bigint, delay interval default '1 minute',
  reason text default null, op text default null) returns boolean
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select gdq.put_aside(batch_id, token, array[ev_id], array[op], delay, array[reason], false) > 0
$$;
comment on function gdq.retry_event(bigint, uuid, bigint, interval, text, text) is 'Puts an event of an open batch aside: it comes again after a delay; false when it became a dead letter.';
