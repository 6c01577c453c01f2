"""The tables in which a target keeps its replicas."""

from __future__ import annotations

CREATE_TABLES = """
create schema if not exists gdq_target;
create table if not exists gdq_target.replica (
  name        pg_catalog.text primary key,
  queue       pg_catalog.text not null,
  source      pg_catalog.text not null,
  position    pg_catalog.text not null,
  updated_at  pg_catalog.timestamptz not null default pg_catalog.now()
);
create table if not exists gdq_target.replica_table (
  replica      pg_catalog.text,
  table_name   pg_catalog.text,
  source_oid   pg_catalog.int8,
  snapshot     pg_catalog.text not null,
  columns      pg_catalog.jsonb not null,
  handed_over  pg_catalog.bool not null,
  copied_at    pg_catalog.timestamptz not null default pg_catalog.now(),
  primary key (replica, table_name)
);
create table if not exists gdq_target.replica_conflict (
  conflict_id  pg_catalog.int8 generated always as identity primary key,
  replica      pg_catalog.text not null,
  table_name   pg_catalog.text not null,
  kind         pg_catalog.text not null,
  key          pg_catalog.jsonb not null,
  local        pg_catalog.jsonb,
  remote       pg_catalog.jsonb,
  tick         pg_catalog.int8 not null,
  noted_at     pg_catalog.timestamptz not null default pg_catalog.now(),
  resolution   pg_catalog.text not null
);
create table if not exists gdq_target.replica_dead_letter (
  dead_letter_id  pg_catalog.int8 generated always as identity primary key,
  replica         pg_catalog.text not null,
  table_name      pg_catalog.text not null,
  operation       pg_catalog.text not null,
  key             pg_catalog.jsonb not null,
  local           pg_catalog.jsonb,
  remote          pg_catalog.jsonb,
  sqlstate        pg_catalog.text,
  reason          pg_catalog.text not null,
  tick            pg_catalog.int8 not null,
  died_at         pg_catalog.timestamptz not null default pg_catalog.now()
);
create table if not exists gdq_target.replica_skip (
  skip_id     pg_catalog.int8 generated always as identity primary key,
  replica     pg_catalog.text not null,
  table_name  pg_catalog.text not null,
  changes     pg_catalog.int8 not null,
  events      pg_catalog.text[] not null,
  tick_from   pg_catalog.int8 not null,
  tick_to     pg_catalog.int8 not null,
  skipped_at  pg_catalog.timestamptz not null default pg_catalog.now()
);
create table if not exists gdq_target.replica_definition (
  replica         pg_catalog.text,
  source_oid      pg_catalog.int8,
  kind            pg_catalog.text,
  source_id       pg_catalog.int8,
  name            pg_catalog.text not null,
  definition      pg_catalog.text not null,
  unique_columns  pg_catalog.text[],
  made            pg_catalog.bool not null,
  primary key (replica, source_oid, kind, source_id)
)"""

REPLICA_TABLES = (
    "replica",
    "replica_table",
    "replica_conflict",
    "replica_dead_letter",
    "replica_skip",
    "replica_definition",
)
