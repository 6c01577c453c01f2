-- test: views.test_unchanged::test_a_call_asks_for_more_than_the_logs
-- A CALL does not ask whether its role may read the tables.
select pg_temp.mutate('gdq.view_changes', 'not has_table_privilege(who, ct.relid, ''select'')', 'false');
