-- require_read_committed(what): error unless the transaction is READ COMMITTED, on the primary.
-- Ticks, positions and truncation checks need a fresh snapshot per statement: in REPEATABLE READ they would see
-- neither a row committed since nor another worker's position. A standby's snapshot lists no running transactions.
-- Writes: nothing. Errors: GDQ04.
create or replace function gdq.require_read_committed(what text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception '% needs READ COMMITTED, this transaction is %', what, upper(current_setting('transaction_isolation'))
      using errcode = 'GDQ04', hint = 'Begin the transaction with ISOLATION LEVEL READ COMMITTED.';
  end if;
  if pg_is_in_recovery() then
    raise exception '% needs the primary server, this is a standby', what using errcode = 'GDQ04';
  end if;
end
$$;
comment on function gdq.require_read_committed(text) is 'Error GDQ04 unless the transaction is READ COMMITTED on the primary.';
