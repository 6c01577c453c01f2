-- test: consumer.test_retry::test_a_batch_that_is_left_behind_settles_nothing
-- An event that a batch brings again is settled whatever becomes of the batch.
select pg_temp.mutate('gdq.waiting_retries', 'and (exists (select from gdq.batch_end e', 'and (true or exists (select from gdq.batch_end e');
