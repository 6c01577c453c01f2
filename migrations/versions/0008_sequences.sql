-- Messages for consumers of certain tables; sequences.

create table gdq.subscription_messages (
  subscription_id  integer primary key references gdq.subscription on delete cascade
);
comment on table gdq.subscription_messages is 'Subscriptions to certain tables that take the queue''s messages too; those that take all tables always do.';
revoke all on table gdq.subscription_messages from public;
