-- test: ddl.test_witness::test_later_ddl_does_not_hide_it
-- The guard witnesses a table without asking who has written what differs.
select pg_temp.mutate('gdq.guard_table', $$unseen := (select min(u.what)$$, $$unseen := (select null$$);
