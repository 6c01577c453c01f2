-- set_tables(queue, consumer, tables): changes which tables a consumer takes; NULL: all, also tables that are added
-- later. A new table gives its changes from now on: for its rows, copy it at a snapshot after this commit and call
-- resynced(). A table that is taken away gives nothing more, not even events of an open batch; open batches become
-- stale. Whether the consumer gets messages does not change.
-- Result: true; false when the consumer takes just these tables already. Writes: subscription, subscription_table,
-- subscription_resync, subscription_messages, batch_token. Errors: 42704; 42501 as for next_batch(); 55006 for the
-- consumer of a view; 55P03 while a worker holds the consumer; GDQ04.
create or replace function gdq.set_tables(queue text, consumer text, tables regclass[]) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500ms'
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  id integer := gdq.own_subscription(queue, consumer);
  wanted integer[] := array(select gdq.find_table(queue, t) from unnest(tables) t);
  taken integer[];
begin
  perform gdq.refuse_view_consumer(queue_of, consumer, 'it takes what its query reads');
  -- Truncation takes the same lock: rows that it emptied before lie before now, and from now on it keeps rows for this
  -- consumer.
  perform pg_advisory_xact_lock(gdq.lock_key('position', queue_of));
  perform gdq.lock_idle_subscription(queue, consumer);
  taken := array(select t.table_id from gdq.subscribed_tables(id) t);
  if (select s.all_tables from gdq.subscription s where s.subscription_id = id) = (tables is null)
     and (tables is null or wanted @> taken and taken @> wanted) then
    return false;
  end if;
  -- a consumer of all tables has the messages too, and keeps them
  insert into gdq.subscription_messages (subscription_id) select id where gdq.takes_messages(id) on conflict do nothing;
  update gdq.subscription s
     set all_tables = tables is null
   where s.subscription_id = id and s.all_tables <> (tables is null);
  delete from gdq.subscription_table st where st.subscription_id = id and st.table_id <> all (wanted);
  insert into gdq.subscription_table (subscription_id, table_id)
    select id, w from unnest(wanted) w
    on conflict do nothing;
  insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot)
    select id, t.relid, 'copied', pg_current_snapshot()
      from gdq.subscribed_tables(id) t where t.table_id <> all (taken);
  perform gdq.check_consumer_tables(id);
  perform gdq.fence(id);
  return true;
end
$$;
comment on function gdq.set_tables(text, text, regclass[]) is
  'Changes which tables a consumer takes; false when it takes just these already.';
