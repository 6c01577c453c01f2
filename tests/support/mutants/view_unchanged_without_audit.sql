-- test: views.test_unchanged::test_audits_that_are_due
-- A view that does not change is not audited.
select pg_temp.mutate('gdq.view_changes', 'audited and coalesce', 'false and coalesce');
