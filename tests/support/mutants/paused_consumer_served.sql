-- test: consumer.test_pause::test_what_is_paused_gets_nothing_and_is_held
-- A paused consumer is handed a batch.
select pg_temp.mutate('gdq.may_read', 'and not exists (select from gdq.subscription_pause sp', 'and exists (select from gdq.subscription sp');
