-- Refresh groups.

create table gdq.view_group (
  group_id    integer generated always as identity primary key,
  group_name  text not null unique,
  created_at  timestamptz not null default pg_catalog.now()
);
comment on table gdq.view_group is 'Groups of views that are refreshed at one snapshot, and whose targets move in one transaction.';
revoke all on gdq.view_group from public;

alter table gdq.view add column group_id integer references gdq.view_group;
comment on column gdq.view.group_id is 'The group that the view is refreshed with.';
alter table gdq.view_run add column group_name text;
comment on column gdq.view_run.group_name is 'The group that the view was refreshed with.';
