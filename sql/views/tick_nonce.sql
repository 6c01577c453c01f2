-- tick_nonce(tick_id): the nonce of a tick; NULL when the tick is gone. Writes: nothing.
create or replace function gdq.tick_nonce(tick_id bigint) returns uuid
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select t.nonce from gdq.tick t where t.tick_id = tick_nonce.tick_id
$$;
comment on function gdq.tick_nonce(bigint) is 'Nonce of a tick; NULL when it is gone.';
