-- Eras.

create table gdq.era (
  era_no      bigint generated always as identity primary key,
  queue_id    integer not null references gdq.queue on delete cascade,
  era         uuid not null default pg_catalog.gen_random_uuid(),
  written_by  xid not null,
  written_in  oid not null,
  started_at  timestamptz not null default pg_catalog.clock_timestamp()
);
create index era_queue on gdq.era (queue_id, era_no);
comment on table gdq.era is 'The eras of a queue, each with a mark: written_by is the row''s own xmin, written_in the table''s own oid. Both are kept by VACUUM FULL, pg_upgrade, standbys and template databases, and lost by dump and restore. Never rewrite a row.';
revoke all on gdq.era from public;

do $$
begin
  insert into gdq.era (queue_id, written_by, written_in)
    select q.queue_id, '0', 'gdq.era'::pg_catalog.regclass from gdq.queue q;
  update gdq.era set written_by = xmin;
end
$$;
