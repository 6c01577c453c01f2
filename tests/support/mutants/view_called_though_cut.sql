-- test: views.test_unchanged::test_a_call_asks_for_more_than_the_logs
-- A CALL does not ask whether the logs were cut.
select pg_temp.mutate('gdq.view_changes', '(looked is null', '(true');
