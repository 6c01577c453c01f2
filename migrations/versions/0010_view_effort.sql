-- What a refresh of a view cost.

alter table gdq.view_run
  add column kind text,
  add column delta_rows bigint,
  add column rows_read bigint,
  add column work_seconds double precision,
  add column choice text;
comment on column gdq.view_run.kind is 'What was computed: none, incremental, by-key (rows of the keys that changed) or full.';
comment on column gdq.view_run.delta_rows is 'Changed rows of the tables, netted, that the refresh worked on.';
comment on column gdq.view_run.rows_read is 'Rows of the tables that its transaction read.';
comment on column gdq.view_run.work_seconds is 'What computing and writing took, without waiting and what was tried before.';
comment on column gdq.view_run.choice is 'Why changes or a full load were expected to cost less.';
create index view_run_view on gdq.view_run (view_id, run_id);
