-- DDL events and logs in JSON.

create table gdq.table_rename (
  rename_id   bigint generated always as identity primary key,
  table_id    integer not null references gdq.captured_table on delete cascade,
  table_name  text not null
);
create index table_rename_table on gdq.table_rename (table_id, rename_id);
comment on table gdq.table_rename is 'The names that a captured table was given after it was added. INSERT-only, since DDL in the application''s transaction adds to it.';

alter table gdq.captured_table add column format text not null default 'typed',
  add constraint captured_table_format check (format in ('typed', 'json'));
comment on column gdq.captured_table.format is 'How the log holds rows. typed: a column for each, of its own type. json: the whole row in one value, whatever its columns.';

alter table gdq.table_version add column shape jsonb;
comment on column gdq.table_version.shape is 'Format json: attribute number and type of every column of the row, which tells its values apart. NULL: a typed log.';

revoke all on gdq.table_rename from public;

create table gdq.table_check (
  table_id  integer primary key references gdq.captured_table on delete cascade,
  catalog   text not null,
  files     text not null
);
comment on table gdq.table_check is 'What the catalog held of each captured table when capture was last seen to fit it. Updated when DDL has changed it.';

revoke all on gdq.table_check from public;
