-- schedule: long_writer
-- A batch takes rows of transactions that were open at its end, when they have committed since.
select pg_temp.mutate('gdq.changes_sql', 'from pg_snapshot_xip(s1) x having', 'from pg_snapshot_xip(s1) x where false having');
