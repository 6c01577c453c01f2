-- test: batch.test_guards::test_rows_that_nobody_has_read_are_not_dropped_silently
-- A table is removed whoever has rows of it to read.
select pg_temp.mutate('gdq.remove_table', 'if unread is not null and not force then', 'if false then');
