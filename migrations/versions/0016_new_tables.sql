-- Tables to capture when they are made.

create table gdq.new_table_rule (
  rule_id   integer generated always as identity primary key,
  queue_id  integer not null references gdq.queue on delete cascade,
  pattern   text not null,
  excepted  text[] not null default '{}',
  options   jsonb not null default '{}',
  constraint new_table_rule_once unique (queue_id, pattern)
);
comment on table gdq.new_table_rule is 'Patterns of tables that a queue captures when they are made. excepted: patterns of tables that are left out; options: of add_table().';

create table gdq.passed_table (
  queue_id    integer not null references gdq.queue on delete cascade,
  relid       pg_catalog.regclass not null,
  reason      text,
  hint        text,
  tried_at    timestamptz not null default pg_catalog.clock_timestamp(),
  primary key (queue_id, relid)
);
comment on table gdq.passed_table is 'Tables that match a rule in new_table_rule and are not captured. reason and hint: why capturing failed at the time tried_at; it is tried again. reason NULL: the table is older than the rule, or was removed from the queue.';

revoke all on gdq.new_table_rule, gdq.passed_table from public;
