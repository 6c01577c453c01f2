-- test: views.test_unchanged::test_what_a_whole_refresh_sees_is_not_overlooked
-- A refresh that finds no change in the logs does not ask what the catalogs hold.
select pg_temp.mutate('gdq.view_changes', 'gdq.view_stamp(view) = stamp', 'true');
