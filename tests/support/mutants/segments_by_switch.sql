-- schedule: late_writer
-- A batch reads only the segment that is written now and the one before it.
select pg_temp.mutate('gdq.version_segments', 'and gdq.holds_rows(s.segment)', 'and gdq.holds_rows(s.segment)
  and exists (select from gdq.log_ring r where r.version_id = s.version_id and s.slot in (r.current_slot, (r.current_slot + 2) % 3))');
