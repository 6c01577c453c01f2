"""What an application relies on, as both catalogs define it: columns, constraints, indexes, triggers, sequences, views.

Each side is read by the same queries, under gdq's search_path, so that a definition has one text. What the target
lacks, or has otherwise, is an obstacle whose cure is mostly the DDL to run there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumers.switchover.obstacle import Obstacle, error, warning
from gdq.consumers.switchover.pair import Pair, named_rows
from gdq.sql_text import quote

# Schemas whose objects are nobody's of the application.
_OWN = "'^(pg_.*|information_schema|gdq|gdq_log|gdq_target)$'"
_EXTENSION = "select from pg_depend e where e.classid = '{}'::regclass and e.objid = {}.oid and e.deptype = 'e'"

_COLUMNS = """
select t.name as "table", a.attname::text as name, format_type(a.atttypid, a.atttypmod) as type,
       a.attnotnull as required, pg_get_expr(d.adbin, d.adrelid) as expression, a.attidentity::text as identity,
       a.attgenerated::text as generated
  from unnest(%s::text[]) t(name)
  join pg_attribute a on a.attrelid = to_regclass(t.name) and a.attnum > 0 and not a.attisdropped
  left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
 order by t.name, a.attnum"""

# NOT NULL is told of columns; up to PostgreSQL 17 it is no constraint of the catalog.
_CONSTRAINTS = """
select t.name as "table", c.conname::text as name, pg_get_constraintdef(c.oid) as definition
  from unnest(%s::text[]) t(name)
  join pg_constraint c on c.conrelid = to_regclass(t.name) and c.contype <> 'n'
 order by t.name, c.contype = 'f', c.conname"""

_INDEXES = """
select t.name as "table", i.indexrelid::regclass::text as name, pg_get_indexdef(i.indexrelid) as definition,
       i.indisunique as is_unique
  from unnest(%s::text[]) t(name)
  join pg_index i on i.indrelid = to_regclass(t.name) and i.indisvalid and i.indisready
 where not exists (select from pg_constraint c where c.conindid = i.indexrelid and c.contype <> 'f')
 order by 1, 2"""

_TRIGGERS = """
select t.name as "table", g.tgname::text as name, pg_get_triggerdef(g.oid) as definition, g.tgenabled::text as enabled
  from unnest(%s::text[]) t(name)
  join pg_trigger g on g.tgrelid = to_regclass(t.name) and not g.tgisinternal and g.tgname !~ '^!gdq_'
 order by 1, 2"""

SEQUENCES = f"""
select c.oid::regclass::text as name, format_type(s.seqtypid, null) as type, s.seqincrement as increment,
       s.seqmin as min, s.seqmax as max, s.seqstart as start, s.seqcycle as cycle,
       exists (select from pg_depend i where i.classid = 'pg_class'::regclass and i.objid = c.oid and i.deptype = 'i')
         as of_identity
  from pg_class c join pg_namespace n on n.oid = c.relnamespace join pg_sequence s on s.seqrelid = c.oid
 where c.relpersistence <> 't' and n.nspname !~ {_OWN}
   and not exists ({_EXTENSION.format("pg_class", "c")})
 order by 1"""

_VIEWS = f"""
select c.oid::regclass::text as name, case c.relkind when 'v' then 'view' when 'm' then 'materialized view'
       else 'foreign table' end as kind, c.relispopulated as filled
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relkind = any ('{{v,m,f}}') and c.relpersistence <> 't' and n.nspname !~ {_OWN}
   and not exists ({_EXTENSION.format("pg_class", "c")})
 order by 1"""

_FUNCTIONS = f"""
select p.oid::regprocedure::text as name
  from pg_proc p join pg_namespace n on n.oid = p.pronamespace
 where n.nspname !~ {_OWN} and not exists ({_EXTENSION.format("pg_proc", "p")})
 order by 1"""

_TYPES = f"""
select t.oid::regtype::text as name,
       coalesce((select string_agg(quote_literal(e.enumlabel), ', ' order by e.enumsortorder)
                   from pg_enum e where e.enumtypid = t.oid), '') as labels
  from pg_type t join pg_namespace n on n.oid = t.typnamespace
 where (t.typtype = any ('{{e,d,r}}')
        or (t.typtype = 'c' and exists (select from pg_class c where c.oid = t.typrelid and c.relkind = 'c')))
   and n.nspname !~ {_OWN} and not exists ({_EXTENSION.format("pg_type", "t")})
 order by 1"""

_EXTENSIONS = "select e.extname::text as name from pg_extension e order by 1"

_GRANTS = """
select c.oid::regclass::text as name, case when c.relkind = 'S' then 'sequence' else 'table' end as kind,
       pg_get_userbyid(c.relowner)::text as owner, g.role, g.rights
  from unnest(%s::text[]) t(name) join pg_class c on c.oid = to_regclass(t.name)
  left join lateral (select case a.grantee when 0 then 'public' else pg_get_userbyid(a.grantee)::text end as role,
                            array_agg(a.privilege_type order by a.privilege_type) as rights
                       from aclexplode(c.relacl) a where a.grantee <> c.relowner group by a.grantee) g on true
 order by 1, 4"""


@dataclass(frozen=True, slots=True)
class _Sides:
    """A query's rows of both sides."""

    here: list[Any]
    there: list[Any]


def differing_definitions(pair: Pair, tables: Sequence[str]) -> Iterator[Obstacle]:
    """What the target lacks of what an application relies on: of these tables, which it has, and of all the rest."""
    named = [list(tables)]
    yield from _extensions(_both(pair, _EXTENSIONS))
    yield from _types(_both(pair, _TYPES))
    yield from _columns(_both(pair, _COLUMNS, named))
    yield from _constraints(_both(pair, _CONSTRAINTS, named))
    yield from _indexes(_both(pair, _INDEXES, named))
    yield from _triggers(_both(pair, _TRIGGERS, named))
    yield from _views(_both(pair, _VIEWS))
    for name in _absent(_both(pair, _FUNCTIONS)):
        cure = f"Create it as the source has it: select pg_get_functiondef('{name}'::regprocedure)"
        yield error("function_missing", name, f"the target has no function {name}", cure)
    sequences = _both(pair, SEQUENCES)
    yield from _sequences(sequences)
    relations = [[*tables, *(row.name for row in sequences.here)]]
    yield from _grants(_both(pair, _GRANTS, relations), pair.target)


def _both(pair: Pair, query: str, values: Sequence[Any] | None = None) -> _Sides:
    return _Sides(*(named_rows(connection, query, values) for connection in (pair.source, pair.target)))


def _absent(sides: _Sides) -> list[str]:
    there = {row.name for row in sides.there}
    return [row.name for row in sides.here if row.name not in there]


def _columns(sides: _Sides) -> Iterator[Obstacle]:
    there = {(row.table, row.name): row for row in sides.there}
    for row in sides.here:
        name, other = f"{row.table}.{quote(row.name)}", there.get((row.table, row.name))
        alter = f"alter table {row.table} alter column {quote(row.name)}"
        if other is None:
            cure = f"alter table {row.table} add column {quote(row.name)} {row.type}{_column_clauses(row)}"
            yield error("column_missing", name, "the target lacks the column", cure)
            continue
        differs = []
        if other.type != row.type:
            differs.append((f"type {other.type}, not {row.type}", f"{alter} type {row.type}"))
        if row.required and not other.required:
            differs.append(("may be null", f"{alter} set not null"))
        if other.required and not row.required:
            differs.append(("is not null", f"{alter} drop not null"))
        if other.generated != row.generated or (row.generated and other.expression != row.expression):
            differs.append(("is not generated alike", f"Make it anew, as in the source: {row.expression or 'plain'}"))
        elif other.expression != row.expression:
            default = f"set default {row.expression}" if row.expression else "drop default"
            problem = f"default {other.expression or 'none'}, not {row.expression or 'none'}"
            differs.append((problem, f"{alter} {default}"))
        if other.identity != row.identity:
            differs.append(("is not an identity column alike", f"{alter} {_identity(row.identity, other.identity)}"))
        for problem, cure in differs:
            yield error("column_differs", name, f"in the target: {problem}", cure)


def _column_clauses(row: Any) -> str:
    if row.generated:
        return f" generated always as ({row.expression}) {'stored' if row.generated == 's' else 'virtual'}"
    default = f" default {row.expression}" if row.expression else ""
    identity = f" {_identity(row.identity, '').removeprefix('add ')}" if row.identity else ""
    return f"{default}{identity}{' not null' if row.required and not identity else ''}"


def _identity(wanted: str, there: str) -> str:
    if not wanted:
        return "drop identity"
    kind = "always" if wanted == "a" else "by default"
    return f"set generated {kind}" if there else f"add generated {kind} as identity"


def _constraints(sides: _Sides) -> Iterator[Obstacle]:
    there = {(row.table, row.definition) for row in sides.there}
    for row in sides.here:
        if (row.table, row.definition) not in there:
            cure = f"alter table {row.table} add constraint {quote(row.name)} {row.definition}"
            problem = f"the target lacks the constraint {row.definition}"
            yield error("constraint_missing", f"{row.table}.{quote(row.name)}", problem, cure)


def _indexes(sides: _Sides) -> Iterator[Obstacle]:
    there = {(row.table, row.is_unique, _index_text(row)) for row in sides.there}
    for row in sides.here:
        if (row.table, row.is_unique, _index_text(row)) not in there:
            yield error("index_missing", row.name, f"the target lacks the index on {row.table}", row.definition)


def _index_text(row: Any) -> str:
    """What an index is, without its name and its table's."""
    return str(row.definition[row.definition.index(" USING ") :])


def _triggers(sides: _Sides) -> Iterator[Obstacle]:
    there = {(row.table, row.name): row for row in sides.there}
    for row in sides.here:
        other = there.get((row.table, row.name))
        if row.enabled != "D" and (other is None or other.enabled == "D" or other.definition != row.definition):
            name = f"{row.table}.{quote(row.name)}"
            yield error("trigger_missing", name, "the target lacks the trigger", row.definition)
    for row in sides.there:
        if row.enabled in ("A", "R"):
            cure = f"alter table {row.table} enable trigger {quote(row.name)}"
            problem = "the trigger fires for what the replica writes"
            yield error("trigger_fires", f"{row.table}.{quote(row.name)}", problem, cure)


def _sequences(sides: _Sides) -> Iterator[Obstacle]:
    there = {row.name: row for row in sides.there}
    for row in sides.here:
        other = there.get(row.name)
        options = (
            f"as {row.type} increment by {row.increment} minvalue {row.min} maxvalue {row.max} start with {row.start}"
            f"{' cycle' if row.cycle else ' no cycle'}"
        )
        if other is None:
            cure = "Add the identity to its column." if row.of_identity else f"create sequence {row.name} {options}"
            yield error("sequence_missing", row.name, f"the target has no sequence {row.name}", cure)
        elif (other.type, other.increment, other.min, other.max, other.cycle) != (
            *(row.type, row.increment, row.min, row.max, row.cycle),
        ):
            cure = f"alter sequence {row.name} {options}"
            yield error("sequence_differs", row.name, "the target's sequence has other options", cure)


def _views(sides: _Sides) -> Iterator[Obstacle]:
    there = {row.name: row for row in sides.there}
    for row in sides.here:
        other = there.get(row.name)
        if other is None or other.kind != row.kind:
            cure = f"pg_dump --schema-only --table='{row.name}' of the source, into the target"
            yield error("view_missing", row.name, f"the target has no {row.kind} {row.name}", cure)
        elif row.filled and not other.filled:
            cure = f"refresh materialized view {row.name}"
            yield error("view_not_filled", row.name, "the target's materialized view is empty", cure)
        elif row.kind == "materialized view":
            cure = f"refresh materialized view {row.name}, after the switch"
            yield warning("view_not_filled", row.name, "it has the rows of its last refresh there", cure)


def _types(sides: _Sides) -> Iterator[Obstacle]:
    there = {row.name: row.labels for row in sides.there}
    for row in sides.here:
        if there.get(row.name) != row.labels:
            labels = f" with the labels {row.labels}" if row.labels else ""
            cure = f"Create or alter it as the source has it{labels}."
            yield error("type_missing", row.name, f"the target lacks the type {row.name}{labels}", cure)


def _extensions(sides: _Sides) -> Iterator[Obstacle]:
    for name in _absent(sides):
        problem = f"the target lacks the extension {name}"
        yield error("extension_missing", name, problem, f"create extension {quote(name)}")


def _grants(sides: _Sides, target: Connection[Any]) -> Iterator[Obstacle]:
    roles = {role for (role,) in target.execute("select rolname::text from pg_roles").fetchall()} | {"public"}
    present = {row.name for row in sides.there}
    there = {(row.name, row.role): set(row.rights or ()) for row in sides.there}
    owners = {row.name: row.owner for row in sides.there}
    wanted = {role for row in sides.here if row.name in present for role in (row.role, row.owner) if role is not None}
    for role in sorted(wanted - roles):
        yield error("role_missing", role, f"the target has no role {role}", f"create role {quote(role)}")
    for row in sides.here:
        if row.name not in present:
            continue
        owner = owners[row.name]
        if owner != row.owner:
            cure = f"alter {row.kind} {row.name} owner to {quote(row.owner)}"
            yield warning("owner_differs", row.name, f"it belongs to {owner} in the target", cure)
        lacking = sorted(set(row.rights or ()) - there.get((row.name, row.role), set()))
        if lacking and row.role not in (None, owner):
            grantee = "public" if row.role == "public" else quote(row.role)
            cure = f"grant {', '.join(lacking).lower()} on {row.kind} {row.name} to {grantee}"
            problem = f"{row.role} lacks {', '.join(lacking)} in the target"
            yield error("grant_missing", row.name, problem, cure)
