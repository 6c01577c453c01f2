-- test: install.test_rebase::test_retries_are_older_than_a_copy_of_the_new_era
-- Retries keep the numbers of the cluster that was dumped.
select pg_temp.mutate('gdq.rebase_retries', 'set ev_txid = gdq.era_xid(0)', 'set ev_txid = ev_txid');
