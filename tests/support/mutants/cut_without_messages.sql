-- test: capture.test_max_bytes::test_messages_are_cut_by_name
-- A consumer that is cut off is told of its tables, not of the messages that it loses.
select pg_temp.mutate('gdq.cut_slowest', 'where gdq.takes_messages(s.subscription_id)', 'where false');
