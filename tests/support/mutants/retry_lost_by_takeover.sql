-- test: consumer.test_retry::test_a_successor_puts_the_same_event_aside
-- What a worker that was given up for dead put aside passes for what its successor puts aside.
select pg_temp.mutate('gdq.put_aside', ' and r.token = put_aside.token', '');
