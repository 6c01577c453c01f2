-- Options of capture: which rows and operations, by row or by statement, origin, unlogged logs. Control tables only.

alter table gdq.captured_table
  add column operations text[] not null default '{insert,update,delete,truncate}',
  add column granularity text not null default 'row',
  add column always boolean not null default false,
  add column origin boolean not null default false,
  add column pin_search_path boolean not null default false,
  add column row_filter jsonb,
  add constraint captured_table_operations check (operations <@ '{insert,update,delete,truncate}' and operations && '{insert,update,delete}'),
  add constraint captured_table_granularity check (granularity in ('row', 'statement'));
comment on column gdq.captured_table.row_filter is 'As parse_filter() gives it: its text, the SQL that it compiles to with columns by attribute number, and the types of these.';

alter table gdq.table_version add column filter_names jsonb;
comment on column gdq.table_version.filter_names is 'Names, by attribute number, of the columns of the row filter that the version''s capture functions were made with.';

alter table gdq.captured_leaf add column ready boolean not null default true;
comment on column gdq.captured_leaf.ready is 'False while its triggers are being made, which the DDL guard looks on.';

alter table gdq.queue add column unlogged boolean not null default false;

create unlogged table gdq.log_marker (
  queue_id    integer primary key references gdq.queue on delete cascade,
  created_at  timestamptz not null default pg_catalog.clock_timestamp()
);
comment on table gdq.log_marker is 'One row a queue with unlogged logs. A crash or promotion that empties the logs empties this too, and so can be told.';

create table gdq.log_loss (
  queue_id    integer not null references gdq.queue on delete cascade,
  txid        bigint not null default pg_catalog.txid_current(),
  created_at  timestamptz not null default pg_catalog.clock_timestamp(),
  primary key (queue_id, txid)
);
comment on table gdq.log_loss is 'When it was found that a crash had emptied the unlogged logs of a queue. Batches that end before may have lost rows.';

alter table gdq.subscription add column skip_origin text[];
comment on column gdq.subscription.skip_origin is 'Origins whose changes the subscription leaves out; NULL for none.';

revoke all on gdq.log_marker, gdq.log_loss from public;
