-- schedule: late_writer_of_a_quiet_log
-- A log becomes quiet although somebody may still be writing to it without announcing it.
select pg_temp.mutate('gdq.update_activity', 'not gdq.writes_unannounced(t.table_id)', 'true');
