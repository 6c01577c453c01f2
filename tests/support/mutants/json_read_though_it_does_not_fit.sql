-- test: ddl.test_apply_ddl::test_row_that_does_not_fit_is_a_resync_in_its_place
-- A row that was written after an ALTER which nobody followed is read as one without values.
select pg_temp.mutate('gdq.json_images_sql', $$else '!' end as ev_op$$, 'else ev_op end as ev_op');
