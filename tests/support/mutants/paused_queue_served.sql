-- test: consumer.test_pause::test_what_is_paused_gets_nothing_and_is_held
-- The consumers of a paused queue are handed batches.
select pg_temp.mutate('gdq.may_read', 'return not gdq.queue_paused(', 'return true or not gdq.queue_paused(');
