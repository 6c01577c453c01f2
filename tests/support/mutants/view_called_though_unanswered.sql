-- test: views.test_unchanged::test_a_call_asks_for_more_than_the_logs
-- A CALL does not ask whether DDL has raised an alarm that nobody has answered.
select pg_temp.mutate('gdq.compiled_views', 'select k.settled from gdq.alarm_check k order by k.check_id desc limit 1', 'select case when b.is_called then b.last_value else 0 end from gdq.alarm b');
