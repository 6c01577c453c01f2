-- test: batch.test_guards::test_nobody_else_gets_a_batch
-- A batch is handed to any role that names the consumer.
select pg_temp.mutate('gdq.usable_subscription', 'perform gdq.check_consumer_role(id);', '');
