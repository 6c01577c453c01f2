-- The states of a retry. Its rows are inserted and never changed; its state follows from which rows there are:
--
--   state      rows                                                   next state
--   ---------  -----------------------------------------------------  -------------------------------------------------
--   put aside  retry_event with batch B and a token of it; B is open  waiting: this token ends B; void: another does
--   waiting    ... and batch_end of B with this token (or no batch:   brought: the first batch that is opened after
--              replay_dead_letters() made it)                         due_at takes it along
--   brought    ... and retry_delivery with batch C, which is open     settled: C is finished; waiting: C is left behind
--   settled    ... and batch_end of C                                 none; a consumer that fails again puts the event
--                                                                     aside as a new retry, before it finishes C
--   void       retry_event without batch_end of B and its token, or   none
--              a later copy of the table holds the event
--
-- A retry_event with dead was retried too often, or given up at once: finish_batch() copies it into dead_letter when B
-- is finished. waiting_retries() finds waiting retries, get_retries() gives brought ones, and rotate_control() forgets
-- settled and void ones.

-- retry_event(batch_id, token, ev_id, delay, reason, op): puts an event of an open batch aside, so that
-- gdq.get_retries() gives it again in the first batch that is opened after the delay. This counts once the batch is
-- finished under this token: it is undone with the transaction, and when another worker takes the batch over. An event
-- that was retried as often as gdq.set_retry_limit() allows becomes a dead letter instead. Later changes of the same
-- row do not wait.
--   op: only the event of this number with this op. In mode pk a changed key gives a delete and an insert of one
--   number.
-- Result: true; false when the event became a dead letter. Writes: retry_event. Errors: GDQ01 for a stale token or a
-- finished batch; 42704 when the batch holds no such event; 55000 for a resync event; 22023 for a delay that is
-- negative or above 1000 years; GDQ04.
create or replace function gdq.retry_event(batch_id bigint, token uuid, ev_id bigint, delay interval default '1 minute',
  reason text default null, op text default null) returns boolean
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select gdq.put_aside(batch_id, token, array[ev_id], array[op], delay, array[reason], false) > 0
$$;
comment on function gdq.retry_event(bigint, uuid, bigint, interval, text, text) is
  'Puts an event of an open batch aside, to come again after a delay; false when it became a dead letter.';
