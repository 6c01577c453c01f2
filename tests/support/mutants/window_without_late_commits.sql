-- schedule: long_writer
-- A batch leaves out transactions that were open at its start.
select pg_temp.mutate('gdq.changes_sql', 'where pg_visible_in_snapshot(x, s1)', 'where false');
