-- test: views.test_unchanged::test_positions_move_so_that_logs_are_dropped
-- A view without changes keeps its position, and the logs after it.
select pg_temp.mutate('gdq.view_changes', 'interval ''1 minute''', 'interval ''1 year''');
