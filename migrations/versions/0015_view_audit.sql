-- Audits of views.

alter table gdq.view
  add column audit_share double precision check (audit_share between 0 and 1),
  add column audit_keys integer not null default 20 check (audit_keys between 1 and 1000),
  add column audit_credit double precision not null default 0.01,
  add column audit_need double precision not null default 0.01,
  add column last_audit timestamptz,
  add column audits bigint not null default 0,
  add column audits_skipped bigint not null default 0,
  add column audits_failed bigint not null default 0,
  add column last_divergence timestamptz,
  add column diverged text;
comment on column gdq.view.audit_share is 'The share of refreshes that are audited; 0: none, NULL: as many as a hundredth of their work allows.';
comment on column gdq.view.audit_keys is 'How many keys an audit compares.';
comment on column gdq.view.audit_credit is 'The seconds that audits may take by now.';
comment on column gdq.view.audit_need is 'The seconds that the next audit is expected to take.';
comment on column gdq.view.last_audit is 'When an audit last compared rows.';
comment on column gdq.view.audits is 'Audits that compared rows.';
comment on column gdq.view.audits_skipped is 'Audits that were given up because they were too dear.';
comment on column gdq.view.audits_failed is 'Audits that found the target different from the query.';
comment on column gdq.view.last_divergence is 'When an audit last found the target different from the query.';
comment on column gdq.view.diverged is 'What an audit found different; NULL again after a full load.';

alter table gdq.view_run
  add column audit text,
  add column audit_keys integer,
  add column audit_seconds double precision,
  add column audit_reason text;
comment on column gdq.view_run.audit is 'How the audit of the refresh ended: passed, failed or skipped; NULL without an audit.';
comment on column gdq.view_run.audit_keys is 'How many keys the audit compared.';
comment on column gdq.view_run.audit_seconds is 'What the audit took.';
comment on column gdq.view_run.audit_reason is 'Why the audit was skipped, or what it found.';
