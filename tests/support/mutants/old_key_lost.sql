-- schedule: row_versions
-- An UPDATE of the key in pk mode comes as an update of the new key.
select pg_temp.mutate('gdq.key_changes_sql', 'pg_catalog.record_image_ne(row(%s), row(%s))', 'false and pg_catalog.record_image_ne(row(%s), row(%s))');
