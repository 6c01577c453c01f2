-- test: views.test_operations::test_change_of_a_transaction_that_was_open_at_the_last_refresh
-- Only transactions that began after the last refresh wake a view.
select pg_temp.mutate('gdq.changed_logs', 'running <> ''{}''', 'false');
