-- test: views.test_compiled_view::test_a_transaction_that_was_open_at_the_last_refresh
-- The look of a CALL passes over transactions that were open at the last refresh.
select pg_temp.mutate('gdq.look_body', 'running <> ''{}'' and', 'false and');
