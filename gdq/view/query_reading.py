"""A view's query as the server reads it: is all of it on the list, and does the planner read it in the same way?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection
from sqlglot.errors import SqlglotError

from gdq.call import call, scalar
from gdq.errors import PlanError
from gdq.plan.canonical import load_functions, naming_types, read_tree, strange_operators
from gdq.plan.dialect import render_sql
from gdq.plan.query import parse_query
from gdq.plan.query_tree import TreeNode, walk_tree
from gdq.plan.select_facts import planner_facts, server_facts
from gdq.plan.settled import settled_rows
from gdq.plan.table import TableSchema
from gdq.plan.tree_meaning import meaning
from gdq.plan.whitelist import QueryReading, called_function, why_not_listed
from gdq.qualified_sql import qualified
from gdq.sql_text import PINNED_SETTINGS
from gdq.typed.pgtypes import FIRST_USER_OID
from gdq.view.table_schema import apply_view_settings

_KNOWN_MAX = 1000

# A field of a node that has a type.
_TYPE_FIELD = re.compile(r"type(?:id)?$", re.IGNORECASE)

# A name in the body of a function.
_WORD = re.compile(r'"[^"]+"|\w+')


@dataclass(frozen=True, slots=True)
class _Known:
    """A reading, and user_definitions() then: `stamp`, None if the query names nothing that a user can define."""

    reading: QueryReading
    stamp: str | None


# for a process that refreshes again and again
_known: dict[tuple[object, ...], _Known] = {}


def read_query(
    connection: Connection[Any], text: str, schemas: Sequence[TableSchema], settings: Mapping[str, str]
) -> QueryReading:
    """The reading of canonical SQL over `schemas` under `settings`; makes temporary views and rolls them back."""
    key = (connection.info.dsn, text, tuple(schemas), tuple(settings.items()))
    known = _known.get(key)
    if known is not None and known.stamp is None:
        return known.reading
    stamp = str(call(connection, "user_definitions"))
    if known is not None and known.stamp == stamp:
        return known.reading
    with connection.transaction(force_rollback=True):
        # the text is canonical: names outside of pg_catalog have their schema
        apply_view_settings(connection, dict(settings) | PINNED_SETTINGS)
        reading = _read(connection, text, schemas, settings.get("role"))
    if len(_known) >= _KNOWN_MAX:
        _known.clear()
    _known[key] = _Known(reading, None if reading.is_own else stamp)
    return reading


def _read(connection: Connection[Any], text: str, schemas: Sequence[TableSchema], role: str | None) -> QueryReading:
    tree = read_tree(connection, text, role)
    functions = load_functions(connection, tree)
    refused = why_not_listed(tree, functions, strange_operators(connection, tree), naming_types(connection, tree))
    if refused is not None:
        refused += " [not-listed]"
    elif not _is_read_alike(connection, text, schemas, tree, role):
        refused = "the planner does not read the query as the server does [read-otherwise]"
    casts = _json_casts(connection, tree)
    names = _called(connection, {(one.schema, one.name) for one in functions.values() if not one.own} | casts)
    settled = settled_rows(tree, functions, _keys(connection, schemas))
    is_own = not any(map(_names_others, walk_tree(tree)))
    # an operator or cast of a user may call a function of PostgreSQL
    signatures = [] if is_own else sorted(one.signature for one in functions.values())
    used = [_definitions(connection, names), *signatures, _labels(connection, tree)]
    return QueryReading(refused, " ".join(used).strip(), settled, is_own)


def _names_others(node: TreeNode) -> bool:
    """True if a node has a function, an operator or a type that a user defined."""
    numbers = [called_function(node), *(int(node.text(name) or 0) for name in ("opno", "eqop", "sortop"))]
    return max([*numbers, *_types(node)]) >= FIRST_USER_OID


def _types(node: TreeNode) -> list[int]:
    """The types that stand in a node's fields."""
    return [int(text) for name in node.fields if _TYPE_FIELD.search(name) and (text := node.text(name)).isdigit()]


def _user_types(tree: TreeNode) -> list[int]:
    return sorted({kind for node in walk_tree(tree) for kind in _types(node) if kind >= FIRST_USER_OID})


def _json_casts(connection: Connection[Any], tree: TreeNode) -> set[tuple[str, str]]:
    """Schema and name of the functions by which PostgreSQL writes values of users' types as JSON."""
    query = qualified("""
        select n.nspname::text, p.proname::text
          from pg_catalog.pg_cast c
          join pg_catalog.pg_proc p on p.oid = c.castfunc
          join pg_catalog.pg_namespace n on n.oid = p.pronamespace
         where c.castsource >= %s and c.casttarget = 'json'::pg_catalog.regtype""")
    return set(connection.execute(query, [FIRST_USER_OID]).fetchall()) if _user_types(tree) else set()


def _labels(connection: Connection[Any], tree: TreeNode) -> str:
    """The labels of the enums of a query, which are their text; empty without enums.

    Also of domains over enums, arrays of them and composite types with them.
    """
    query = """
        with recursive part (oid) as (
          select pg_catalog.unnest(%s::pg_catalog.oid[])
           union
          select p.oid
            from part
            join pg_catalog.pg_type t on t.oid = part.oid
            cross join lateral (select t.typelem union all select t.typbasetype union all
                                select a.atttypid from pg_catalog.pg_attribute a
                                 where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped) p (oid))
        select pg_catalog.string_agg(pg_catalog.format('%%s %%L', e.oid, e.enumlabel), ',' order by e.oid)
          from part join pg_catalog.pg_enum e on e.enumtypid = part.oid"""
    return str(scalar(connection, query, _user_types(tree)) or "")


def _keys(connection: Connection[Any], schemas: Sequence[TableSchema]) -> dict[str, list[int]]:
    """The numbers of the key columns of tables, by the tables' numbers."""
    query = qualified("select n::pg_catalog.regclass::pg_catalog.oid::text from pg_catalog.unnest(%s::text[]) n")
    found = connection.execute(query, [[schema.qualified for schema in schemas]]).fetchall()
    return {
        number: [column.number for column in schema.columns if column.key]
        for (number,), schema in zip(found, schemas, strict=True)
    }


def _is_read_alike(
    connection: Connection[Any], text: str, schemas: Sequence[TableSchema], tree: TreeNode, role: str | None
) -> bool:
    """True if the query that the planner works with means the same to the server, in whole and in each SELECT."""
    try:
        query = parse_query(text, schemas)
    except PlanError:
        return True  # the planner says itself why it does not take the query apart
    try:
        again = read_tree(connection, render_sql(query.root), role)
        return meaning(again) == meaning(tree) and planner_facts(query) == server_facts(again)
    except psycopg.errors.OperationalError:
        raise
    except (psycopg.Error, SqlglotError, LookupError, ValueError):
        return False


def _called(connection: Connection[Any], names: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Schema and name of these functions and of those that they may call: in bodies, defaults, and as an aggregate.

    Bodies are not parsed: a word of a body counts as a call of every function of that name. One too many costs a full
    load when it is replaced, one too few leaves wrong rows.
    """
    bodies = qualified("""
        select pg_catalog.concat_ws(' ', p.prosrc, pg_catalog.pg_get_function_sqlbody(p.oid),
                 pg_catalog.pg_get_function_arguments(p.oid),
                 (select pg_catalog.string_agg(pg_catalog.quote_ident(f.proname), ' ')
                    from pg_catalog.pg_aggregate a
                    join pg_catalog.pg_proc f
                      on f.oid = any (array[a.aggtransfn, a.aggfinalfn, a.aggcombinefn, a.aggmtransfn, a.aggminvtransfn,
                                            a.aggmfinalfn]::oid[])
                   where a.aggfnoid = p.oid))
          from rows from (pg_catalog.unnest(%s::text[]), pg_catalog.unnest(%s::text[])) as t(nspname, proname)
          join pg_catalog.pg_namespace n on n.nspname = t.nspname
          join pg_catalog.pg_proc p on p.pronamespace = n.oid and p.proname = t.proname""")
    named = qualified("""
        select distinct n.nspname::text, p.proname::text
          from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
         where p.proname = any (%s::name[]) and p.oid >= %s""")
    found, waiting = set(names), names
    while waiting:
        schemas, functions = zip(*waiting, strict=True)
        texts = [text for (text,) in connection.execute(bodies, [list(schemas), list(functions)])]
        words = {word.strip('"') for text in texts for word in _WORD.findall(text)}
        words |= {word.lower() for word in words}
        waiting = {(schema, name) for schema, name in connection.execute(named, [list(words), FIRST_USER_OID])} - found
        found |= waiting
    return sorted(found)


def _definitions(connection: Connection[Any], names: Sequence[tuple[str, str]]) -> str:
    """Hash of the definitions of all functions with these schemas and names; empty without names."""
    if not names:
        return ""
    query = qualified("""
        select pg_catalog.md5(pg_catalog.string_agg(f::text, ',' order by f::text collate pg_catalog."C"))
          from (select n.nspname, p.proname, p.prosrc, p.probin, p.prosqlbody::text, p.provolatile, p.proisstrict,
                       p.proretset, p.proconfig, p.prokind, p.prolang, p.prorettype, p.proargtypes, p.proallargtypes,
                       p.proargmodes, p.proargnames, p.proargdefaults::text,
                       a.aggtransfn::oid, a.aggfinalfn::oid, a.aggcombinefn::oid, a.aggmtransfn::oid,
                       a.aggminvtransfn::oid, a.aggmfinalfn::oid, a.aggfinalextra, a.aggtranstype, a.agginitval,
                       a.aggminitval
                  from rows from (pg_catalog.unnest(%s::text[]), pg_catalog.unnest(%s::text[])) as t(nspname, proname)
                  join pg_catalog.pg_namespace n on n.nspname = t.nspname
                  join pg_catalog.pg_proc p on p.pronamespace = n.oid and p.proname = t.proname
                  left join pg_catalog.pg_aggregate a on a.aggfnoid = p.oid) as f""")
    schemas, functions = zip(*names, strict=True)
    return str(scalar(connection, query, list(schemas), list(functions)))
