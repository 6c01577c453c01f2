-- test: ddl.test_guard_alarm::test_rows_wait_for_the_resync
-- The guard answers the alarm although it could record nothing.
select pg_temp.mutate('gdq.follow_ddl', 'if recorded then', 'if true then');
select pg_temp.mutate('gdq.rewrite_guard', 'if recorded then', 'if true then');
