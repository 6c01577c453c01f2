-- schedule: table_copied_under_writers
-- A copy counts as having seen every transaction that began before it.
select pg_temp.mutate('gdq.resynced', $$'copied', snapshot)$$, $$'copied', format('%s:%s:', pg_snapshot_xmax(snapshot), pg_snapshot_xmax(snapshot))::pg_snapshot)$$);
