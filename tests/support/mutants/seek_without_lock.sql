-- schedule: seek_and_truncation
-- A seek does not exclude truncation.
select pg_temp.mutate('gdq.seek', $$perform pg_advisory_xact_lock(gdq.lock_key('position', queue_of));$$, '');
