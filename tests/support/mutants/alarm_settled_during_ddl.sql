-- test: ddl.test_guard_alarm::test_ddl_that_is_still_open
-- A tick during DDL takes the alarm for settled.
select pg_temp.mutate('gdq.alarms', $$when answered or open = '{}' then seen$$, 'when true then seen');
