-- The tables whose capture functions are what the older gdq makes, kept in setting gdq.sound_tables: the functions of
-- these tables become what the new gdq makes. Asked of the older gdq, before its functions go.

select pg_catalog.set_config('gdq.sound_tables', coalesce((
  select pg_catalog.array_agg(ct.table_id)::text from gdq.captured_table ct
   where gdq.capture_state(ct.queue_id, ct.relid) = 'armed'
     and not exists (select from gdq.function_faults(ct.table_id))), '{}'), true)
