-- test: views.test_operations::test_second_refresh_is_refused_and_a_killed_one_blocks_nobody
-- The lock of a view is not heeded: two refreshes of it work side by side.
select pg_temp.mutate('gdq.lock_view', 'perform pg_advisory_lock(key);', 'perform pg_try_advisory_lock(key);');
