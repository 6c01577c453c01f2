-- schedule: member_taken_over
-- A member that was given up for dead may finish.
select pg_temp.mutate('gdq.holds_batch', 'newest is distinct from token', 'false');
