-- drop_queue(queue, force): removes a queue with all its logs.
--   force: also when it still has tables, consumers or views; they go with it.
-- Result: true; false when there was none.
-- Writes: drops gdq_log.q<id>_*, the logs, the triggers on the captured tables; deletes the control rows. Errors: 55006
-- without force, when the queue has tables, consumers or views; 55P03 when a writer holds a table; GDQ07.
create or replace function gdq.drop_queue(queue text, force boolean default false) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set lock_timeout = '500ms' set client_min_messages = warning
as $$
declare
  id integer;
  t record;
begin
  perform pg_advisory_xact_lock(gdq.lock_key('drop', 0));
  perform pg_advisory_xact_lock(gdq.lock_key('tick', 0));
  select q.queue_id into id from gdq.queue q where q.queue_name = queue for update;
  if id is null then
    return false;
  end if;
  perform gdq.require_era(id);
  perform pg_advisory_xact_lock(gdq.lock_key('tick', id));
  if not force and (exists (select from gdq.captured_table ct where ct.queue_id = id)
                    or exists (select from gdq.subscription s where s.queue_id = id)
                    or exists (select from gdq.view v where v.queue_id = id)) then
    raise exception 'queue "%" still has % table(s), % consumer(s) and % view(s)', queue,
      (select count(*) from gdq.captured_table ct where ct.queue_id = id),
      (select count(*) from gdq.subscription s where s.queue_id = id),
      (select count(*) from gdq.view v where v.queue_id = id)
      using errcode = 'object_in_use', hint = 'Remove them first, or drop all with the queue: gdq drop-queue --force.';
  end if;
  for t in select ct.relid from gdq.captured_table ct where ct.queue_id = id order by ct.relid loop
    perform gdq.remove_table(queue, t.relid, force => true);
  end loop;
  delete from gdq.view v where v.queue_id = id;
  delete from gdq.resync r where r.queue_id = id;
  delete from gdq.queue q where q.queue_id = id;
  perform gdq.create_producers();
  execute format($sql$
    drop function gdq_log.q%1$s_event(text, oid, jsonb),
                  gdq_log.q%1$s_truncate(oid, text, oid, name, name, text),
                  gdq_log.q%1$s_message(text, jsonb, text, text, text, text),
                  gdq_log.q%1$s_messages(text[], jsonb[], text[], text[], text[], text[]) $sql$, id);
  execute format('drop table gdq_log.q%1$s_s0, gdq_log.q%1$s_s1, gdq_log.q%1$s_s2, gdq_log.q%1$s_truncation', id);
  execute format('drop sequence gdq_log.q%s_ev', id);
  return true;
end
$$;
comment on function gdq.drop_queue(text, boolean) is
  'Removes a queue; error 55006 while it has tables, consumers or views, unless forced.';
