-- test: capture.test_row_filter::test_update_moves_a_row_in_and_out
-- An UPDATE that brings a row into the filter comes as an update.
select pg_temp.mutate('gdq.row_inserts', $$gdq.log_insert(t, v, slot, 'I', number, null))$$, $$gdq.log_insert(t, v, slot, 'U', number, null))$$);
