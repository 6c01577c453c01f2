-- test: consumer.test_retry::test_events_of_a_batch_in_one
-- A consumer that reads the events of a batch in one need not hold it.
select pg_temp.mutate('gdq.get_events', 'gdq.open_batch(batch_id, token)', 'gdq.named_batch(batch_id)');
select pg_temp.mutate('gdq.get_events', 'perform gdq.require_held(b, token);', '');
