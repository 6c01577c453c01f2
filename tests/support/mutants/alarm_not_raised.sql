-- test: ddl.test_guard_alarm::test_rows_wait_for_the_resync
-- The guard raises no alarm, so that DDL which it cannot record is found within a minute only.
select pg_temp.mutate('gdq.raise_alarm', $$return nextval('gdq.alarm');$$, 'return null;');
