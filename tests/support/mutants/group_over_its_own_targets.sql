-- test: views.test_stored_groups::test_refused
-- A view goes into a group with one whose target it reads by way of a third.
select pg_temp.mutate('gdq.check_group', 'from reached o join reads r on r.above = o.below', 'from reached o join reads r on false');
