-- test: consumer.test_pause::test_what_is_paused_gets_nothing_and_is_held
-- Nothing is held for the consumers of a paused queue.
select pg_temp.mutate('gdq.held_snapshot', 'where s.queue_id = held_snapshot.queue_id', 'where s.queue_id = held_snapshot.queue_id and not gdq.queue_paused(s.queue_id)');
