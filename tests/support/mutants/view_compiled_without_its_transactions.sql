-- test: views.test_compiled_view::test_a_transaction_that_was_open_at_the_last_refresh
-- Rows of transactions that were open in a snapshot do not come after it.
select pg_temp.mutate('gdq.later_images_sql', 'ev_txid = any ($2)', 'ev_txid = any ($2) and false');
