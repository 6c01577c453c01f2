-- test: batch.test_guards::test_queue_of_another_cluster_stands_still
-- A queue that was restored is found as any other.
select pg_temp.mutate('gdq.find_queue', 'perform gdq.require_era(id);', '');
