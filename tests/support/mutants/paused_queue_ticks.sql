-- test: consumer.test_pause::test_what_is_paused_gets_nothing_and_is_held
-- A ticker takes the ticks of a paused queue.
select pg_temp.mutate('gdq.tick_due', 'if q.paused then', 'if false then');
