-- schedule: writers_of_a_quiet_log
-- The capture functions of a quiet log do not announce its changes.
select pg_temp.mutate('gdq.arm', 'r.activity <> ''busy'' as announces', 'false as announces');
