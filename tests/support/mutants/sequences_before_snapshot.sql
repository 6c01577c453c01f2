-- schedule: sequence_beside_tick
-- Sequences are read before the tick's snapshot: a writer may take a value and commit in between.
select pg_temp.mutate('gdq.make_tick', 'perform gdq.publish_sequences(queue_id, id);', 'null;');
select pg_temp.mutate('gdq.make_tick', 'events := gdq.last_event(queue_id);',
  'perform gdq.publish_sequences(queue_id, (select t.last_value + 1 from gdq.tick_id t)); events := gdq.last_event(queue_id);');
