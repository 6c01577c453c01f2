-- schedule: retry_against_finish
-- A batch may be finished while one of its events is being put aside.
select pg_temp.mutate('gdq.finish_batch', 'perform pg_advisory_xact_lock(gdq.token_key(token));', '');
