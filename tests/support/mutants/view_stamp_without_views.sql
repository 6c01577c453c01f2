-- test: views.test_unchanged::test_what_a_whole_refresh_sees_is_not_overlooked
-- Ordinary views in a view's query do not count.
select pg_temp.mutate('gdq.view_stamp', 'v.options ? ''written''', 'false');
