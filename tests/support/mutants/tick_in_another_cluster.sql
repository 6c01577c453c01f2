-- test: batch.test_guards::test_queue_of_another_cluster_stands_still
-- A ticker of all queues does not ask whether the numbers of the last tick are of this cluster.
select pg_temp.mutate('gdq.ticker', 'perform gdq.require_era(', 'perform (');
