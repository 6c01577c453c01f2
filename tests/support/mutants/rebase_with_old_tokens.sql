-- test: install.test_rebase::test_members_whose_batches_are_kept
-- A batch from before a rebase passes for finished.
select pg_temp.mutate('gdq.rebase_queue', 'perform gdq.fence(p.subscription_id);', '');
