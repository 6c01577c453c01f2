-- test: ddl.test_guard_off::test_partition_that_is_half_detached
-- A partition whose DETACH CONCURRENTLY broke off counts as one of the table.
select pg_temp.mutate('gdq.capture_fault', 'and i.inhdetachpending', 'and false');
