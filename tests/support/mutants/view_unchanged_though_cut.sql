-- test: views.test_unchanged::test_changes_that_were_dropped
-- Logs that were cut have no change.
select pg_temp.mutate('gdq.lacks_changes', 'exists (select from gdq.cut_tables(lacks_changes.subscription_id))', 'false');
