-- check_logs(queue): finds queues (NULL: all) whose unlogged logs were emptied, and has their consumers resync. It is
-- note_losses() for clients and tickers, which call it before they hand out changes.
-- Result: the number of queues found. Writes: log_marker, log_loss, resync, the event log. Errors: 42704, GDQ07.
create or replace function gdq.check_logs(queue text default null) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return gdq.note_losses(queue);
end
$$;
comment on function gdq.check_logs(text) is
  'Finds queues whose unlogged logs were emptied, and has their consumers resync.';
