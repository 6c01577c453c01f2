-- Retries, dead letters and members of consumers.

create table gdq.member (
  subscription_id  integer not null references gdq.subscription on delete cascade,
  member_name      text not null,
  registered_at    timestamptz not null default pg_catalog.clock_timestamp(),
  primary key (subscription_id, member_name),
  constraint member_name_length check (octet_length(member_name) between 1 and 63)
);
comment on table gdq.member is 'The members of cooperative consumers: each holds batches of its own.';

alter table gdq.batch_token add column member text;
comment on column gdq.batch_token.member is 'The member that the batch was handed to; NULL for a consumer without members.';

create table gdq.retry_limit (
  subscription_id  integer primary key references gdq.subscription on delete cascade,
  retries          integer not null,
  constraint retry_limit_retries check (retries >= 0)
);
comment on table gdq.retry_limit is 'How often an event may be retried before it becomes a dead letter, where that is not 10.';

-- Rows that come with every batch or retry are only ever inserted, and rotate as those of gdq.batch do.
create sequence gdq.batch_end_slot minvalue 0;
create sequence gdq.retry_event_slot minvalue 0;
create sequence gdq.retry_delivery_slot minvalue 0;

create table gdq.batch_end (
  subscription_id  integer not null references gdq.subscription on delete cascade,
  batch_no         bigint not null,
  batch_id         bigint not null,
  token            uuid not null,
  slot             bigint not null default coalesce(pg_catalog.pg_sequence_last_value('gdq.batch_end_slot'), 0) % 2,
  primary key (batch_id, slot)
) partition by list (slot);
create table gdq.batch_end_0 partition of gdq.batch_end for values in (0);
create table gdq.batch_end_1 partition of gdq.batch_end for values in (1);
comment on table gdq.batch_end is 'Finished batches, of those that had to do with retries or were finished before an older one, and the token under which they were.';

create sequence gdq.retry_id;
create table gdq.retry_event (
  retry_id         bigint not null default pg_catalog.nextval('gdq.retry_id'),
  subscription_id  integer not null references gdq.subscription on delete cascade,
  batch_id         bigint,
  token            uuid,
  ev_id            bigint not null,
  ev_txid          bigint not null,
  ev_time          timestamptz not null,
  op               text not null,
  tbl              text,
  key              jsonb,
  old              jsonb,
  new              jsonb,
  origin           text,
  retries          integer not null,
  due_at           timestamptz not null,
  dead             boolean not null,
  reason           text,
  slot             bigint not null default coalesce(pg_catalog.pg_sequence_last_value('gdq.retry_event_slot'), 0) % 2,
  primary key (retry_id, slot)
) partition by list (slot);
create table gdq.retry_event_0 partition of gdq.retry_event for values in (0);
create table gdq.retry_event_1 partition of gdq.retry_event for values in (1);
create index retry_event_due on gdq.retry_event (subscription_id, due_at, retry_id);
create index retry_event_batch on gdq.retry_event (batch_id, ev_id);
comment on table gdq.retry_event is 'Events that a batch put aside, as get_batch() gave them. They count once the batch is finished under the same token; batch_id NULL: at once. dead: for gdq.dead_letter. INSERT-only.';

create table gdq.retry_delivery (
  retry_id  bigint not null,
  batch_id  bigint not null,
  slot      bigint not null default coalesce(pg_catalog.pg_sequence_last_value('gdq.retry_delivery_slot'), 0) % 2,
  primary key (batch_id, retry_id, slot)
) partition by list (slot);
create table gdq.retry_delivery_0 partition of gdq.retry_delivery for values in (0);
create table gdq.retry_delivery_1 partition of gdq.retry_delivery for values in (1);
create index retry_delivery_retry on gdq.retry_delivery (retry_id);
comment on table gdq.retry_delivery is 'Which batch brings an event again. The event is settled once that batch is finished.';

create table gdq.dead_letter (
  dead_letter_id   bigint generated always as identity primary key,
  subscription_id  integer not null references gdq.subscription on delete cascade,
  ev_id            bigint not null,
  ev_txid          bigint not null,
  ev_time          timestamptz not null,
  op               text not null,
  tbl              text,
  key              jsonb,
  old              jsonb,
  new              jsonb,
  origin           text,
  retries          integer not null,
  reason           text,
  died_at          timestamptz not null default pg_catalog.clock_timestamp()
);
create index dead_letter_subscription on gdq.dead_letter (subscription_id, dead_letter_id);
comment on table gdq.dead_letter is 'Events that a consumer gave up, until somebody replays or purges them.';

revoke all on all tables in schema gdq from public;
