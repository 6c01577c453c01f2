-- test: spark.test_stream_reader::test_streams_that_could_lose_something_are_refused
-- A stream goes on with a consumer that does not hold the changes of its table.
select pg_temp.mutate('gdq.stream_end', 'elsif not exists (select from gdq.subscribed_tables', 'elsif false and not exists (select from gdq.subscribed_tables');
