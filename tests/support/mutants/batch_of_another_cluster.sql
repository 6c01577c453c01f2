-- test: batch.test_guards::test_queue_of_another_cluster_stands_still
-- A batch that was open when the dump was taken is read on.
select pg_temp.mutate('gdq.named_batch', 'perform gdq.require_era(', 'perform (');
