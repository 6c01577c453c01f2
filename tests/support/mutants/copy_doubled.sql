-- schedule: table_copied_under_writers
-- What a copy holds already is delivered again.
select pg_temp.mutate('gdq.subscription_events_sql', 'gdq.snapshot_max(s0, c.snapshot)', 's0');
