-- Sequences, and messages for consumers of certain tables.

create table gdq.subscription_messages (
  subscription_id  integer primary key references gdq.subscription on delete cascade
);
comment on table gdq.subscription_messages is 'Subscriptions to certain tables that take the queue''s messages too; those that take all tables always do.';

create table gdq.published_sequence (
  sequence_id    integer generated always as identity primary key,
  queue_id       integer not null references gdq.queue on delete cascade,
  relid          pg_catalog.regclass not null,
  sequence_name  text not null,
  created_at     timestamptz not null default pg_catalog.now(),
  constraint published_sequence_once unique (queue_id, relid)
);
comment on table gdq.published_sequence is 'Sequences whose values are published with the ticks of a queue.';

-- One row holds the values of all sequences of a queue, so that a batch needs the last row up to its tick and no other.
create sequence gdq.sequence_tick_slot minvalue 0 start 1;
create table gdq.sequence_tick (
  tick_id       bigint not null,
  queue_id      integer not null references gdq.queue on delete cascade,
  sequence_ids  integer[] not null,
  last_values   bigint[] not null,
  called        boolean[] not null,
  slot          bigint not null default coalesce(pg_catalog.pg_sequence_last_value('gdq.sequence_tick_slot'), 0) % 2,
  primary key (queue_id, tick_id, slot)
) partition by list (slot);
create table gdq.sequence_tick_0 partition of gdq.sequence_tick for values in (0);
create table gdq.sequence_tick_1 partition of gdq.sequence_tick for values in (1);
comment on table gdq.sequence_tick is 'The values of a queue''s sequences at a tick, for ticks at which one had changed; NULL where one could not be read. INSERT-only and rotated like the ticks.';

revoke all on table gdq.subscription_messages, gdq.published_sequence, gdq.sequence_tick, gdq.sequence_tick_0, gdq.sequence_tick_1 from public;
