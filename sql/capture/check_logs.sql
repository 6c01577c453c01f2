-- Logs of an unlogged queue are emptied by a crash, by a promotion and by a restore, and nothing in them tells. A row
-- of log_marker, which is unlogged too, goes with them: where it is missing, changes may be lost. Writers may have
-- filled the logs again before anybody looks, so whoever hands out changes looks first.

-- check_logs(queue): finds queues (NULL: all) whose unlogged logs were emptied, and has every consumer of them
-- resync: by an event for each table, now, and in every batch that ends before now, as its rows may be gone. The
-- marker is set again in the same transaction.
-- Result: the number of queues found. Writes: log_marker, log_loss, resync, the event log. Errors: 42704.
create or replace function gdq.check_logs(queue text default null) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  q record;
  found_empty integer := 0;
begin
  -- every batch asks, and mostly there is nothing
  if not exists (select from gdq.queue qq
                  where qq.unlogged
                    and not exists (select from gdq.log_marker m where m.queue_id = qq.queue_id)) then
    return 0;
  end if;
  for q in select qq.queue_id from gdq.queue qq
            where qq.unlogged and (queue is null or qq.queue_id = gdq.find_queue(queue))
              and not exists (select from gdq.log_marker m where m.queue_id = qq.queue_id) order by 1 loop
    -- of two that look at once one waits here
    insert into gdq.log_marker (queue_id) values (q.queue_id) on conflict do nothing;
    continue when not found;
    insert into gdq.log_loss (queue_id) values (q.queue_id);
    perform gdq.note_resync(q.queue_id, ct.relid, 'gap', gdq.loss_reason())
       from gdq.captured_table ct where ct.queue_id = q.queue_id;
    found_empty := found_empty + 1;
  end loop;
  return found_empty;
end
$$;
comment on function gdq.check_logs(text) is
  'Finds queues whose unlogged logs were emptied, and has their consumers resync.';
