-- test: consumer.test_seek::test_back_over_events_that_wait_to_be_retried
-- What a seek back brings again goes on waiting to be retried.
select pg_temp.mutate('gdq.seek', 'perform gdq.settle_retries(id, target.snapshot);', '');
