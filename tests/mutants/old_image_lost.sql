-- schedule: row_versions
-- An UPDATE logs its new image in the place of the old one.
select pg_temp.mutate('gdq.log_insert', $$gdq.image_values(v.columns, 'OLD') || gdq.image_values(v.columns, 'NEW')$$,
  $$gdq.image_values(v.columns, 'NEW') || gdq.image_values(v.columns, 'NEW')$$);
