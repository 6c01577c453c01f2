-- test: spark.test_stream_reader::test_stream_of_an_unlogged_queue_is_refused
-- A crash between planning and reading a batch would read as a batch without rows.
select pg_temp.mutate('gdq.stream_end', 'if (select q.unlogged', 'if (select false and q.unlogged');
