-- test: capture.test_max_bytes::test_only_who_holds_something_is_cut
-- A consumer that is cut off is moved to the last tick and not told.
select pg_temp.mutate('gdq.cut_slowest', 'from gdq.subscribed_tables(s.subscription_id) t', 'from gdq.subscribed_tables(0) t');
