-- touch_batch(batch_id, token): shows that the member which holds a batch is alive: its dead_after begins anew. Call it
-- beside long work, in a transaction of its own. Writes: batch_token. Errors: GDQ01 when the batch was taken over or is
-- finished; GDQ04; GDQ07; 42501.
create or replace function gdq.touch_batch(batch_id bigint, token uuid) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  b gdq.batch;
begin
  perform gdq.require_read_committed('touch_batch');
  b := gdq.open_batch(batch_id, token);
  perform from gdq.subscription s where s.subscription_id = b.subscription_id for no key update;
  perform gdq.require_held(b, token);  -- another member may have taken the batch over meanwhile
  insert into gdq.batch_token (batch_id, token, member)
    select b.batch_id, bt.token, bt.member
      from gdq.batch_token bt
     where bt.batch_id = b.batch_id
     order by bt.grant_id desc limit 1;
end
$$;
comment on function gdq.touch_batch(bigint, uuid) is 'Shows that the member which holds a batch is alive.';
