-- Consumers that need a batch only now and then, for whom ticks need not come more often.

create table gdq.subscription_pace (
  subscription_id  integer primary key references gdq.subscription on delete cascade,
  pace             interval not null constraint subscription_pace_pace check (pace > interval '0')
);
comment on table gdq.subscription_pace is 'The subscriptions that need a batch no more often than once in pace.';

revoke all on gdq.subscription_pace from public;
