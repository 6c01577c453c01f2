-- test: views.test_unchanged::test_changes_that_were_dropped
-- Logs that were cut have no change.
select pg_temp.mutate('gdq.changed_logs', 'exists (select from gdq.cut_tables(subscription_id))', 'false');
