-- schedule: seek_and_truncation
-- A seek goes to any tick that there is, whatever was truncated.
select pg_temp.mutate('gdq.start_tick', 'not gdq.snapshot_le((select h.snapshot from gdq.horizon h where h.queue_id = queue_of), t.snapshot)', 'false');
