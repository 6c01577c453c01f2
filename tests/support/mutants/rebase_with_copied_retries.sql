-- test: install.test_rebase::test_retries_that_a_copy_held_do_not_come_back
-- Retries that a copy holds wait again when the copy is forgotten.
select pg_temp.mutate('gdq.rebase_retries', 'and gdq.table_name(c.relid) = r.tbl', 'and false');
