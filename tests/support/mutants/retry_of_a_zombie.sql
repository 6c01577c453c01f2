-- test: consumer.test_retry::test_what_a_worker_that_was_given_up_put_aside_does_not_count
-- What a worker put aside counts under whichever token its batch was finished.
select pg_temp.mutate('gdq.end_retries', 'and r.token = end_retries.token', '');
select pg_temp.mutate('gdq.waiting_retries', 'and e.token = r.token', '');
