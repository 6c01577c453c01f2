-- schedule: old_snapshot_maintains
-- Maintenance does not look at the isolation level: an old snapshot does not show the rows that came since.
select pg_temp.mutate('gdq.maintain', $$perform gdq.require_read_committed('maintain');$$, '');
select pg_temp.mutate('gdq.truncate_segment', $$perform gdq.require_read_committed('truncation');$$, '');
