-- require_locks(): error when half of the server's locks are taken: another captured table could leave too few for the
-- commands that follow. Writes: nothing. Errors: 53000.
create or replace function gdq.require_locks() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  most constant bigint := current_setting('max_locks_per_transaction')::bigint
    * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint);
  taken constant bigint := (select count(*) from pg_locks l where not l.fastpath);
begin
  if taken > most / 2 then
    raise exception 'too many tables in one transaction: % of the server''s % locks are taken', taken, most
      using errcode = 'insufficient_resources',
            hint = 'Make or add fewer tables in one transaction, or raise max_locks_per_transaction.';
  end if;
end
$$;
comment on function gdq.require_locks() is 'Error when half of the server''s locks are taken.';
