"""The canonical SQL of a view, as PostgreSQL prints it: every name resolved and every star spelled out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import Connection
from sqlglot import exp
from sqlglot.errors import SqlglotError

from gdq.call import scalar
from gdq.errors import PlanError
from gdq.owner_sql import OwnerSql
from gdq.plan.dialect import parse_statement, render_sql
from gdq.plan.query_tree import TreeNode, parse_tree, walk_tree
from gdq.plan.table import TableSchema
from gdq.plan.tree_meaning import meaning
from gdq.plan.whitelist import (
    ServerFunction,
    argument_types,
    called_function,
    compared_operators,
    equality_operators,
    is_fixed,
)
from gdq.sql_text import pin_transaction, quote, raw
from gdq.typed.pgtypes import READ_SETTINGS

# Names of system columns, which a view may have and a table may not.
_SYSTEM_NAMES = {"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}
# Nodes without a function that depend on the moment or the session.
_MOMENT = {"SQLVALUEFUNCTION", "NEXTVALUEEXPR", "CURRENTOFEXPR"}
_CREATE_VIEW = "create temp view gdq_check as "
# How often a text is printed again until it stays as it is.
_PRINTS_MAX = 3
# SQL is printed in a form that all sessions with these settings read alike; names follow search_path.
_READ_SETTINGS = "; ".join(
    f"set local {name} = '{value}'" for name, value in READ_SETTINGS.items() if name not in ("search_path", "timezone")
)
_PRINT_SETTINGS = f"{_READ_SETTINGS}; set local search_path = pg_catalog, pg_temp"


# Of types, those whose text is the name of an object, which another session may change, with their output function:
# also in what the type consists of. Other text depends on settings alone, which a refresh pins.
_NAMING = """
    with recursive part (whole, oid) as (
      select o, o from pg_catalog.unnest(%s::pg_catalog.oid[]) o
       union
      select part.whole, p.oid
        from part
        join pg_catalog.pg_type t on t.oid = part.oid
        cross join lateral (select t.typelem union all select t.typbasetype union all
                            select a.atttypid from pg_catalog.pg_attribute a
                             where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped) p (oid))
    select part.whole::bigint, pg_catalog.format('%%s', p.oid::pg_catalog.regprocedure)
      from part
      join pg_catalog.pg_type t on t.oid = part.oid
      join pg_catalog.pg_proc p on p.oid = t.typoutput
     where p.provolatile <> 'i' and p.proname ~ '^(reg|acl)'"""

# Functions by their numbers. What PostgreSQL calls STABLE depends on the moment, on catalogs or on settings. Of its own
# functions, those of times and money depend on settings alone, unless their SQL asks for the moment; and those of
# values of any type that give text or JSON write these values. The names of those that tell of the server begin with
# pg_.
_FUNCTIONS = """
    select p.oid::bigint, pg_catalog.format('%%s', p.oid::pg_catalog.regprocedure), n.nspname, p.proname,
           p.provolatile::text,
           p.proargtypes::pg_catalog.oid[] operator(pg_catalog.&&)
             '{date,time,timetz,timestamp,timestamptz,interval,money}'::pg_catalog.regtype[]::pg_catalog.oid[]
             and pg_catalog.strpos(coalesce(p.prosqlbody::text, ''), 'SQLVALUEFUNCTION') = 0,
           p.prorettype in ('text'::pg_catalog.regtype, 'json'::pg_catalog.regtype, 'jsonb'::pg_catalog.regtype)
             and p.proname !~ '^pg_'
             and exists (select from pg_catalog.pg_type t
                          where t.typtype = 'p' and t.oid = any (p.proargtypes::pg_catalog.oid[]))
      from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
     where p.oid = any (%s::pg_catalog.oid[])"""


def canonical_sql(connection: Connection[Any], query: str) -> str:
    """The canonical SQL of `query`, checked; writes nothing that stays.

    PlanError if `query` is not a single SELECT, uses a function that is not immutable, or is parsed differently by the
    planner than by PostgreSQL; psycopg.Error for wrong SQL.
    """
    with connection.transaction(force_rollback=True):
        try:
            printed = _printed(connection, query.rstrip().rstrip(";"))
        except psycopg.errors.SyntaxError as error:
            raise _wrong_syntax(query, error) from error
        connection.execute(raw(_READ_SETTINGS))
        pin_transaction(connection)  # the session's search_path was for the user's text alone
        try:
            text, tree = _settled_print(connection, *_without_views(connection, *printed))
        except psycopg.errors.SyntaxError as error:
            raise PlanError("expression", "the server cannot read the view's SQL as it prints it") from error
        if all(entry.flag("resjunk") for entry in tree.nodes("targetList")):
            raise PlanError("no-column", "the view has no column")
        _refuse_system_names(tree)
        _refuse_catalogs(connection, tree)
        _refuse_volatile(connection, tree)
        try:
            read = parse_statement(text)
            if read.find(exp.Lock):
                raise PlanError("locking", "a view locks no rows", hint="Leave FOR UPDATE or FOR SHARE out.")
            rendered = render_sql(read)
            again, read_again = _printed(connection, rendered)
            alike = meaning(read_again) == meaning(tree)
        except (SqlglotError, psycopg.Error) as error:
            raise PlanError("expression", f"the planner cannot read the view's SQL: {_first_line(error)}") from error
        except (LookupError, ValueError) as error:  # a tree that is not understood
            raise PlanError("expression", f"the planner cannot read the view's SQL: {error}") from error
        if again != text or not alike:
            raise PlanError(
                "expression",
                "an expression of the view is not read as PostgreSQL reads it",
                hint=f"PostgreSQL: {' '.join(text.split())} planner: {' '.join(again.split())}",
            )
    return " ".join(text.split()) if "'" not in text and '"' not in text else text


def written_sql(connection: Connection[Any], query: str) -> str | None:
    """`query` as the server prints it, with every name qualified, if it reads ordinary views; None if it does not.

    canonical_sql() of that text has the queries that these views have by then. Errors as for canonical_sql().
    """
    with connection.transaction(force_rollback=True):
        text, tree = _printed(connection, query.rstrip().rstrip(";"))
        return text if _views(connection, {node.text("relid") for node in walk_tree(tree)}) else None


def canonical_tables(text: str) -> list[str]:
    """The tables that canonical SQL reads, quoted and qualified, each once."""
    found = [table for table in parse_statement(text).find_all(exp.Table) if isinstance(table.this, exp.Identifier)]
    return list(dict.fromkeys(f"{quote(table.db)}.{quote(table.name)}" for table in found if table.db))


def read_tree(connection: Connection[Any], query: str, role: str | None = None) -> TreeNode:
    """The server's tree of a query; makes a temporary view and rolls it back. psycopg.Error for wrong SQL.

    `role`: as for OwnerSql.
    """
    with connection.transaction(force_rollback=True):
        OwnerSql(connection, role).run(f"create temp view gdq_check as {query}")
        return _tree(connection)


def load_functions(connection: Connection[Any], tree: TreeNode) -> dict[int, ServerFunction]:
    """The functions that a tree calls, by their numbers."""
    numbers = {called_function(node) for node in walk_tree(tree)} - {0}
    rows = connection.execute(_FUNCTIONS, [list(numbers)]).fetchall()
    return {number: ServerFunction(*values) for number, *values in rows}


def naming_types(connection: Connection[Any], tree: TreeNode) -> dict[int, str]:
    """Of the types that a tree writes as text, those whose text is the name of an object, with the function for it."""
    written = {kind for node in walk_tree(tree) for kind in argument_types(node)} - {0}
    return dict(connection.execute(_NAMING, [list(written)]).fetchall())


def refuse_inheritance(text: str, tables: Sequence[TableSchema]) -> None:
    """PlanError for canonical SQL over a table with inheritance children, or over ONLY a partitioned table.

    The log of a table holds the table's own rows and those of its partitions: a query of the table gives other rows.
    """
    only = _read_only(text)
    for table in tables:
        if table.has_children:
            raise PlanError(
                "inheritance",
                f"{table.qualified} has inheritance children, and its log holds none of their rows",
                hint="Make it a partitioned table, or let the view read the children.",
            )
        if table.partitioned and (table.schema, table.name) in only:
            raise PlanError(
                "inheritance", f"ONLY {table.qualified} has no rows: it is partitioned", hint="Leave ONLY out."
            )


# cached for a process that refreshes again and again
@lru_cache(maxsize=256)
def _read_only(text: str) -> frozenset[tuple[str, str]]:
    """Schema and name of the tables after ONLY."""
    return frozenset(
        (table.db, table.name) for table in parse_statement(text).find_all(exp.Table) if table.args.get("only")
    )


def strange_operators(connection: Connection[Any], tree: TreeNode) -> dict[int, str]:
    """Operators of a tree by which rows cannot be found again, by their numbers.

    That is = of a type whose values cannot be grouped by it, such as box, and an equality outside of pg_catalog, such
    as that of citext, where values are grouped.
    """
    query = """
        select o.oid::bigint, pg_catalog.format('%%s', o.oid::pg_catalog.regoperator)
          from pg_catalog.pg_operator o
         where o.oid = any (%s::pg_catalog.oid[]) and o.oprnamespace <> 'pg_catalog'::pg_catalog.regnamespace
            or o.oid = any (%s::pg_catalog.oid[]) and o.oprname = '='
               and not exists (select from pg_catalog.pg_amop a join pg_catalog.pg_am m on m.oid = a.amopmethod
                                where a.amopopr = o.oid
                                  and (m.amname, a.amopstrategy) in (('btree', 3), ('hash', 1)))"""
    numbers = [list(equality_operators(tree)), list(compared_operators(tree))]
    return dict(connection.execute(query, numbers).fetchall())


def _wrong_syntax(query: str, error: psycopg.errors.SyntaxError) -> PlanError:
    """What the server says of the user's text, with its line there."""
    place = int(error.diag.statement_position or 0) - len(_CREATE_VIEW)
    where = f", line {query.count(chr(10), 0, place) + 1}" if place > 0 else ""
    return PlanError("syntax", f"the view's SQL{where}: {error.diag.message_primary}", hint="A view is one SELECT.")


def _printed(connection: Connection[Any], query: str) -> tuple[str, TreeNode]:
    """A query's text by pg_get_viewdef(), with all names qualified, and its tree."""
    with connection.transaction(force_rollback=True):
        try:
            # binary: by the protocol that takes a single statement
            connection.execute(raw(f"{_CREATE_VIEW}{query}"), binary=True)
        except psycopg.errors.DuplicateColumn as error:
            raise PlanError(
                "duplicate-column", f"the view has two columns of one name: {_first_line(error)}"
            ) from error
        connection.execute(raw(_PRINT_SETTINGS))
        text = scalar(connection, "select pg_catalog.pg_get_viewdef('pg_temp.gdq_check'::regclass)")
        return str(text).strip().rstrip(";"), _tree(connection)


def _settled_print(connection: Connection[Any], text: str, tree: TreeNode) -> tuple[str, TreeNode]:
    """PostgreSQL's text in a form that it prints again in the same way, and its tree.

    Example: x in ('a', 'b') over varchar is printed as a cast of an array, and that again as an array of casts. Both
    mean the same, as for pg_dump.
    """
    for _ in range(_PRINTS_MAX):
        again, tree_again = _printed(connection, text)
        if again == text:
            break
        text, tree = again, tree_again
    return text, tree


def _without_views(connection: Connection[Any], text: str, tree: TreeNode) -> tuple[str, TreeNode]:
    """Text and tree of a query with the queries of ordinary views in the views' places, as the views are now.

    PlanError if the query would not mean the same.
    """
    views: dict[str, TreeNode] = {}
    texts: dict[tuple[str, str], str] = {}
    waiting = [tree]
    while waiting:
        read = {node.text("relid") for node in walk_tree(waiting.pop()) if node.kind == "RANGETBLENTRY"}
        for number, schema, name, query, action in _views(connection, read - views.keys()):
            views[number] = parse_tree(action)
            texts[schema, name] = query.strip().rstrip(";")
            waiting.append(views[number])
    if not views:
        return text, tree
    try:
        text, found = _printed(connection, render_sql(_expanded(parse_statement(text), texts)))
    except (SqlglotError, psycopg.Error) as error:
        raise PlanError("expression", f"the planner cannot read a view's SQL: {_first_line(error)}") from error
    if meaning(found) != meaning(tree, views):
        raise PlanError("expression", "a view in the query is not read as PostgreSQL reads it")
    return text, found


def _views(connection: Connection[Any], numbers: Collection[str]) -> list[tuple[str, str, str, str, str]]:
    """The ordinary views among relations: number, schema, name, SQL and tree."""
    query = """
        select c.oid::text, n.nspname, c.relname, pg_catalog.pg_get_viewdef(c.oid), r.ev_action::text
          from pg_catalog.pg_class c
          join pg_catalog.pg_namespace n on n.oid = c.relnamespace
          join pg_catalog.pg_rewrite r on r.ev_class = c.oid and r.rulename = '_RETURN'
         where c.relkind = 'v' and c.oid = any (%s::pg_catalog.oid[]) and c.oid >= 16384"""
    with connection.transaction(force_rollback=True):
        connection.execute(raw(_PRINT_SETTINGS))
        return connection.execute(query, [[number for number in numbers if number]]).fetchall()


def _expanded(node: exp.Expr, views: Mapping[tuple[str, str], str]) -> exp.Expr:
    """A query with the queries of views, by schema and name, in their places."""
    for table in list(node.find_all(exp.Table)):
        query = views.get((table.db, table.name))
        if query is None or not isinstance(table.this, exp.Identifier):
            continue
        own = table.args.get("alias") or exp.TableAlias(this=exp.to_identifier(table.name, quoted=True))
        inner = _expanded(parse_statement(query), views)
        table.replace(exp.Subquery(this=inner, alias=own.copy(), joins=table.args.get("joins")))
    return node


def _tree(connection: Connection[Any]) -> TreeNode:
    rule = "select ev_action::text from pg_catalog.pg_rewrite where ev_class = 'pg_temp.gdq_check'::regclass"
    return parse_tree(str(scalar(connection, rule)))


def _refuse_system_names(tree: TreeNode) -> None:
    """PlanError for a column whose name no column of a table, and so of a target, may have."""
    for entry in tree.nodes("targetList"):
        name = entry.text("resname")
        if name in _SYSTEM_NAMES and entry.text("resjunk") != "true":
            hint = "Give the column another name with AS."
            raise PlanError("system-column-name", f"a table cannot have a column {name}", hint=hint)


def _refuse_catalogs(connection: Connection[Any], tree: TreeNode) -> None:
    """PlanError if the tree reads a system table, which no queue captures."""
    query = """select c.oid::regclass::text from pg_catalog.pg_class c
                where c.oid = any (%s::oid[]) and c.oid < 16384 limit 1"""
    found = connection.execute(
        query, [[int(number) for node in walk_tree(tree) if (number := node.text("relid"))]]
    ).fetchone()
    if found is not None:
        raise PlanError("unknown-table", f"table {found[0]} cannot be captured")


def _refuse_volatile(connection: Connection[Any], tree: TreeNode) -> None:
    """PlanError if the tree holds a function that may give another result for the same arguments."""
    nodes = list(walk_tree(tree))
    if any(node.kind in _MOMENT for node in nodes):
        raise PlanError("nondeterministic", "the view depends on the moment or the session", hint="Write the value.")
    if any(node.kind == "TABLESAMPLECLAUSE" and node.get("repeatable") is None for node in nodes):
        raise PlanError("nondeterministic", "TABLESAMPLE takes other rows each time", hint="Write REPEATABLE.")
    functions, naming = load_functions(connection, tree), naming_types(connection, tree)
    called = [(node, functions[called_function(node)]) for node in nodes if called_function(node) in functions]
    found = [one.signature for node, one in called if not is_fixed(node, one, naming)]
    casts = [node for node in nodes if node.kind == "COERCEVIAIO"]
    query = """select pg_catalog.format('%%s', p.oid::pg_catalog.regprocedure)
                 from pg_catalog.pg_type t join pg_catalog.pg_proc p on p.oid = t.typinput
                where p.provolatile <> 'i' and t.oid = any (%s::pg_catalog.oid[])"""
    found += [one for (one,) in connection.execute(query, [[int(node.text("resulttype")) for node in casts]])]
    found += [naming[kind] for node in casts for kind in argument_types(node) if kind in naming]
    if found:
        raise PlanError(
            "nondeterministic",
            f"{found[0]} is not immutable: it may give another value each time",
            hint="Use functions of their arguments alone. to_date() and to_timestamp() read text by a format.",
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
