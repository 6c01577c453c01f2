-- schedule: writers_of_a_quiet_log
-- The capture functions of a quiet log do not announce its changes.
select pg_temp.mutate('gdq.arm', 'case when r.activity <> ''busy'' then er.current_slot end as event_slot', 'null::integer as event_slot');
