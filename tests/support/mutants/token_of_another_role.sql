-- test: batch.test_guards::test_nobody_else_gets_a_batch
-- Who knows the token may read the batch.
select pg_temp.mutate('gdq.named_batch', 'perform gdq.check_consumer_role(b.subscription_id);', '');
