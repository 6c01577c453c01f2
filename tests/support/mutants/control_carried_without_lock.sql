-- schedule: finish_before_control_rotation
-- What is carried forward is read before the slot is locked.
select pg_temp.mutate('gdq.clear_control', 'execute format(''lock table', 'perform format(''lock table');
