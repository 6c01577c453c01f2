-- Compiled views: refreshes by CALL gdq.refresh().

create table gdq.compiled_view (
  view_id     integer primary key references gdq.view on delete cascade,
  stamp       text not null,
  definitions text,
  auditable   boolean not null,
  plan        text not null,
  target      text not null,
  state       text not null,
  comment     text not null,
  locks       text not null,
  changes     text,
  load        text not null
);
comment on table gdq.compiled_view is 'Views with functions in schema gdq_target that refresh them.';
comment on column gdq.compiled_view.stamp is 'view_stamp() when the functions were made: with another one they do not run.';
comment on column gdq.compiled_view.definitions is 'user_definitions() then; NULL where the query names nothing that users define.';
comment on column gdq.compiled_view.auditable is 'Whether audits can compare the view.';
comment on column gdq.compiled_view.plan is 'Fingerprint of the plan, as the target''s position has it.';
comment on column gdq.compiled_view.target is 'The target, quoted and with its schema.';
comment on column gdq.compiled_view.state is 'The table of counts and sums beside the target, which not every view has.';
comment on column gdq.compiled_view.comment is 'The comment that marks the target.';
comment on column gdq.compiled_view.locks is 'LOCK TABLE statements of all that a refresh reads and writes.';
comment on column gdq.compiled_view.changes is 'Name of the function that adds changes; NULL where the view has none.';
comment on column gdq.compiled_view.load is 'Name of the function that loads the target in full.';
