-- Pause, size limits and resynchronised tables.

alter table gdq.queue
  add column max_bytes    bigint constraint queue_max_bytes check (max_bytes > 0),
  add column retain_after bigint,
  add column paused       boolean not null default false;
comment on column gdq.queue.max_bytes is 'Once the logs are larger than this, the slowest consumer is cut off instead of filling the disk; NULL: no limit.';
comment on column gdq.queue.retain_after is 'Retention keeps nothing from before this tick: max_bytes was passed.';
comment on table gdq.subscription is 'A consumer of a queue. Its row is the lock that lets one worker at a time move the position; only set_tables() updates it.';

create table gdq.subscription_pause (
  subscription_id  integer primary key references gdq.subscription on delete cascade,
  paused_at        timestamptz not null default pg_catalog.clock_timestamp()
);
comment on table gdq.subscription_pause is 'The subscriptions that get no batches for the time being.';

create table gdq.subscription_resync (
  state_id         bigint generated always as identity primary key,
  subscription_id  integer not null references gdq.subscription on delete cascade,
  relid            pg_catalog.regclass,
  kind             text not null,
  snapshot         pg_catalog.pg_snapshot not null,
  reason           text,
  txid             bigint not null default pg_catalog.txid_current(),
  created_at       timestamptz not null default pg_catalog.clock_timestamp(),
  constraint subscription_resync_kind check (kind in ('cut', 'copied', 'removed'))
);
create index subscription_resync_table on gdq.subscription_resync (subscription_id, relid, state_id);
comment on table gdq.subscription_resync is 'What became of a table for one subscription, INSERT-only, the newest row counts. cut: changes since snapshot were dropped unread, the table must be copied; copied: the consumer has the table as of snapshot, and gets what came after; removed: the table left the queue, and the event that says so is for this subscription too. relid NULL: messages.';

revoke all on gdq.subscription_pause, gdq.subscription_resync from public;
