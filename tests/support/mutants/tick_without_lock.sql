-- schedule: tick_overtaken
-- Two tickers may be between their snapshot and their tick at once.
select pg_temp.mutate('gdq.make_tick', $$perform pg_advisory_xact_lock(gdq.lock_key('tick', queue_id));$$, '');
