-- A time in the past plus an interval of a queue must be a time, or the ticker fails: at most a thousand years.

update gdq.queue
   set ticker_max_lag = least(ticker_max_lag, interval '1000 years'),
       ticker_idle_period = least(ticker_idle_period, interval '1000 years'),
       rotation_period = least(rotation_period, interval '1000 years'),
       retention = least(retention, interval '1000 years')
 where greatest(ticker_max_lag, ticker_idle_period, rotation_period, retention) > interval '1000 years';

alter table gdq.queue
  drop constraint queue_ticker_max_lag,
  drop constraint queue_ticker_idle_period,
  drop constraint queue_rotation_period,
  drop constraint queue_retention,
  add constraint queue_ticker_max_lag check (ticker_max_lag between interval '0' and interval '1000 years'),
  add constraint queue_ticker_idle_period
    check (ticker_idle_period > interval '0' and ticker_idle_period <= interval '1000 years'),
  add constraint queue_rotation_period
    check (rotation_period > interval '0' and rotation_period <= interval '1000 years'),
  add constraint queue_retention check (retention between interval '0' and interval '1000 years');
