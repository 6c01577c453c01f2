-- test: batch.test_guards::test_json_rows_are_read_as_what_they_were
-- The text of a row is read with the types that the table has now.
select pg_temp.mutate('gdq.json_images_sql', 'gdq.row_type(v.version_id),', 'gdq.row_type(gdq.current_version(v.table_id)),');
