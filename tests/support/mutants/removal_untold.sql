-- test: batch.test_guards::test_rows_that_nobody_has_read_are_not_dropped_silently
-- A table that is removed by force ends like one that everybody has read.
select pg_temp.mutate('gdq.remove_table', $$when unread is not null then 'resync'$$, $$when unread is not null then 'ddl'$$);
