-- test: views.test_unchanged::test_what_a_whole_refresh_sees_is_not_overlooked
-- What the catalogs hold of a view's tables does not count.
select pg_temp.mutate('gdq.view_stamp', 't.queue_id = s.queue_id', 'false');
