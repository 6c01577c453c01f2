-- begin_refresh(queue, consumer): hands the consumer of a view to a refresh. The tokens of earlier refreshes become
-- stale.
-- Result: one row (batch_id, token, snapshot); snapshot is the consumer's position: rows after it are kept.
-- Writes: batch, batch_token; what note_losses() and check_before_tick() write. Errors: 42704, 42501, GDQ04; 55000 when
-- the consumer has members, or the queue is paused.
create or replace function gdq.begin_refresh(queue text, consumer text)
  returns table (batch_id bigint, token uuid, snapshot pg_snapshot)
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
  perform gdq.note_losses(queue);
  perform gdq.check_before_tick(gdq.find_queue(queue));
  select * into b from gdq.batch where subscription_id = id and batch_no = pos.batch_no + 1;
  if b.batch_id is null then
    insert into gdq.batch (subscription_id, batch_no, tick_from, snapshot_from)
      values (id, pos.batch_no + 1, pos.tick_id, pos.snapshot) returning * into b;
  end if;
  insert into gdq.batch_token (batch_id) values (b.batch_id) returning batch_token.token into token;
  return query select b.batch_id, token, pos.snapshot;
end
$$;
comment on function gdq.begin_refresh(text, text) is
  'Hands the consumer of a view to a refresh; the tokens of earlier refreshes become stale.';
