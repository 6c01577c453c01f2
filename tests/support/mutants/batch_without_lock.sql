-- schedule: worker_taken_over
-- The token is checked, but two workers may hold a consumer at once.
select pg_temp.mutate('gdq.lock_subscription', 'perform from gdq.subscription s where s.subscription_id = id for no key update;', '');
