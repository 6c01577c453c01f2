-- schedule: commit_before_truncation
-- A segment is looked at before it is locked, and not again under the lock.
select pg_temp.mutate('gdq.truncate_segment', 'not gdq.segment_is_consumed(segment, held)', 'false');
