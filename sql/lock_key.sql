-- lock_key(class, id): the advisory lock key of one thing. class: 'tick' (a queue's tick order), 'position' (a queue's
-- registrations against its truncations), 'capture' (the capture functions of one table, id = its oid),
-- 'control' (rotation of the control tables, id = 0), 'token' (what is put aside under a batch's token against its end),
-- 'view' (the refreshes of one view).
-- Writes: nothing. Keys live under a prefix of gdq's own ("gdq" in the top bytes).
create or replace function gdq.lock_key(class text, id oid) returns bigint
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (x'676471'::bigint << 40) | (case class when 'tick' then 1 when 'position' then 2 when 'capture' then 3 when 'control' then 4 when 'token' then 5 when 'view' then 6 end::bigint << 32) | id::bigint;
end
$$;
comment on function gdq.lock_key(text, oid) is 'Advisory lock key of a queue''s ticks or positions, or of a table''s capture functions.';
