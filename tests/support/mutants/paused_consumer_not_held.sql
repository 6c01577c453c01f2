-- test: consumer.test_pause::test_what_is_paused_gets_nothing_and_is_held
-- Nothing is held for a paused consumer.
select pg_temp.mutate('gdq.held_snapshot', 'where s.queue_id = held_snapshot.queue_id', 'where s.queue_id = held_snapshot.queue_id
  and not exists (select from gdq.subscription_pause sp where sp.subscription_id = s.subscription_id)');
