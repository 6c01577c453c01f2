-- test: views.test_unchanged::test_what_a_whole_refresh_sees_is_not_overlooked
-- Tables whose capture is off have no change.
select pg_temp.mutate('gdq.view_changes', 'in (''disarmed'', ''dropped'')', 'is null');
