-- test: capture.test_row_filter::test_update_moves_a_row_in_and_out
-- An UPDATE that takes a row out of the filter comes as an update.
select pg_temp.mutate('gdq.capture_body', $$gdq.log_insert(version_id, slot, 'D', number, null), $$, $$gdq.log_insert(version_id, slot, 'U', number, null), $$);
