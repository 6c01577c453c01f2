-- schedule: worker_taken_over
-- No worker keeps another one out, and whoever has read a batch may finish it.
select pg_temp.mutate('gdq.lock_subscription', 'perform from gdq.subscription s where s.subscription_id = id for no key update;', '');
select pg_temp.mutate('gdq.holds_batch', 'newest is distinct from token', 'false');
select pg_temp.mutate('gdq.holds_batch', 'not finished', 'true');
select pg_temp.mutate('gdq.finish_batch', 'b.snapshot_to, b.event_seq);', 'b.snapshot_to, b.event_seq) on conflict do nothing;');
