-- schedule: serializable_before_rotation
-- Rows are held until the last tick, not until every consumer has read them.
select pg_temp.mutate('gdq.held_snapshot', 'where s.queue_id = held_snapshot.queue_id', 'where false');
