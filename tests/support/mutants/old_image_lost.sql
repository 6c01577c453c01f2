-- schedule: row_versions
-- An UPDATE logs its new image in the place of the old one.
select pg_temp.mutate('gdq.log_insert', $$gdq.log_values(v, 'OLD', true)$$, $$gdq.log_values(v, 'NEW')$$);
