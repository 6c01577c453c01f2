-- require_copy(queue, consumer, tables): has a consumer copy tables before it gets another batch: next_batch() gives
-- GDQ03 until resynced() was called for each. So a new consumer begins with the rows that are there, and nothing is
-- passed over if it ends in between.
--   tables: tables that the consumer takes; NULL: all of them.
-- An open batch becomes stale. Result: the number of tables that it must copy now and did not have to before.
-- Writes: subscription_resync, batch_token. Errors: 42704; 42501; 55006 for the consumer of a view; GDQ04.
create or replace function gdq.require_copy(queue text, consumer text, tables regclass[] default null) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  id integer;
  strange regclass;
  required integer;
begin
  perform gdq.refuse_view_consumer(queue_of, consumer, 'it loads itself in full');
  id := gdq.lock_subscription(queue, consumer);
  select t into strange from unnest(tables) t
   where t not in (select s.relid from gdq.subscribed_tables(id) s) limit 1;
  if strange is not null then
    raise exception 'consumer "%" of queue "%" does not take table %', consumer, queue, gdq.table_name(strange)
      using errcode = 'undefined_object', hint = 'gdq.set_tables() changes what it takes.';
  end if;
  insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot, reason)
    select id, t.relid, 'cut', (gdq.position_of(id)).snapshot, 'a copy is asked for'
      from gdq.subscribed_tables(id) t
     where (tables is null or t.relid = any (tables))
       and t.relid not in (select c.relid from gdq.cut_tables(id) c where c.relid is not null);
  get diagnostics required = row_count;
  perform gdq.fence(id);
  return required;
end
$$;
comment on function gdq.require_copy(text, text, regclass[]) is
  'Has a consumer copy tables before it gets another batch.';
