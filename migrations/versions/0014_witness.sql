-- The alarm and the witness of the DDL guard.

create sequence gdq.alarm;
comment on sequence gdq.alarm is 'Advanced by the DDL guard before it does anything: a value survives the rollback of what drew it.';

create table gdq.alarm_answer (
  value  bigint primary key
);
comment on table gdq.alarm_answer is 'Values of the sequence alarm after which the guard has recorded everything. INSERT-only.';

create table gdq.alarm_check (
  check_id  bigint generated always as identity primary key,
  settled   bigint not null,
  seen      bigint not null,
  open      text[] not null
);
comment on table gdq.alarm_check is 'When the witness was last compared because of an alarm: nothing is open up to the value settled; seen: the value then; open: the transactions that were altering tables.';
insert into gdq.alarm_check (settled, seen, open) values (0, 0, '{}');

drop table gdq.table_check;
create table gdq.witness (
  table_id  integer not null references gdq.captured_table on delete cascade,
  relid     pg_catalog.oid not null,
  file      pg_catalog.oid not null,
  basis     text not null,
  seen      text[] not null,
  primary key (table_id, relid)
);
create index witness_relid on gdq.witness (relid);
comment on table gdq.witness is 'What the catalogs held of a captured table, of each partition and of each inheritance child, when gdq saw them last. basis: the server and the files of the catalogs; file: of the relation.';

alter table gdq.log_ring add column functions text[];
comment on column gdq.log_ring.functions is 'What the catalog held of the capture functions when gdq made them.';

alter table gdq.table_rename
  add column ev_id bigint not null default 0,
  add column txid bigint not null default 0;
comment on column gdq.table_rename.ev_id is 'Events with a greater number bear this name.';
comment on column gdq.table_rename.txid is 'The transaction that renamed the table.';

revoke all on gdq.alarm, gdq.alarm_answer, gdq.alarm_check, gdq.witness from public;
