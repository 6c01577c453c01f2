"""Names of SQL that a session's search_path decides: of functions, operators, types, relations and collations.

PostgreSQL's own parser reads the SQL. What it finds beside written names are the operators that syntax stands for: IN,
BETWEEN, LIKE, NULLIF, IS DISTINCT FROM, CASE x WHEN and JOIN ... USING look up = and the like by the search_path.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

import pglast
import psycopg
import pytest
from pglast import ast
from pglast.enums import A_Expr_Kind, SubLinkType
from pglast.visitors import Visitor
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer

# The paths under which names without a schema are PostgreSQL's own: nobody else may create in pg_catalog.
PINNED_PATHS = ("pg_catalog, pg_temp", "pg_catalog")

# What looks up nothing, or a relation only.
_UTILITY = (ast.TransactionStmt, ast.VariableSetStmt, ast.VariableShowStmt, ast.NotifyStmt, ast.ListenStmt)

_KINDS = {
    A_Expr_Kind.AEXPR_IN: "in",
    A_Expr_Kind.AEXPR_NULLIF: "nullif",
    A_Expr_Kind.AEXPR_LIKE: "like",
    A_Expr_Kind.AEXPR_ILIKE: "ilike",
    A_Expr_Kind.AEXPR_SIMILAR: "similar",
    A_Expr_Kind.AEXPR_DISTINCT: "is distinct from",
    A_Expr_Kind.AEXPR_NOT_DISTINCT: "is not distinct from",
    A_Expr_Kind.AEXPR_BETWEEN: "between",
    A_Expr_Kind.AEXPR_NOT_BETWEEN: "between",
    A_Expr_Kind.AEXPR_BETWEEN_SYM: "between",
    A_Expr_Kind.AEXPR_NOT_BETWEEN_SYM: "between",
}


class _Names(Visitor):
    """Collects the names of a statement that have no schema: (kind, name) each."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self.ctes: set[str] = set()

    def visit_CommonTableExpr(self, _: Any, node: Any) -> None:  # noqa: N802 (pglast calls it so, as the others)
        self.ctes.add(node.ctename)

    def visit_RangeVar(self, _: Any, node: Any) -> None:  # noqa: N802
        if node.schemaname is None and node.relpersistence != "t":
            self.found.append(("relation", node.relname))

    def visit_FuncCall(self, _: Any, node: Any) -> None:  # noqa: N802
        self._name("function", node.funcname)

    def visit_TypeName(self, _: Any, node: Any) -> None:  # noqa: N802
        self._name("type", node.names)

    def visit_CollateClause(self, _: Any, node: Any) -> None:  # noqa: N802
        self._name("collation", node.collname)

    def visit_A_Expr(self, _: Any, node: Any) -> None:  # noqa: N802
        if node.kind in _KINDS:
            self.found.append(("operator", _KINDS[node.kind]))
        else:
            self._name("operator", node.name)

    def visit_SubLink(self, _: Any, node: Any) -> None:  # noqa: N802
        if node.subLinkType in (SubLinkType.ANY_SUBLINK, SubLinkType.ALL_SUBLINK):
            self._name("operator", node.operName or (ast.String(sval="in"),))  # type: ignore[no-untyped-call]

    def visit_CaseExpr(self, _: Any, node: Any) -> None:  # noqa: N802
        if node.arg is not None:
            self.found.append(("operator", "case"))

    def visit_JoinExpr(self, _: Any, node: Any) -> None:  # noqa: N802
        if node.usingClause or node.isNatural:
            self.found.append(("operator", "using"))

    def _name(self, kind: str, parts: Any) -> None:
        if parts is not None and len(parts) == 1:
            self.found.append((kind, parts[0].sval))


@cache
def names_without_schema(sql: str) -> tuple[tuple[str, str], ...]:
    """(kind, name) of what SQL looks up by the search_path, up to a statement that pins it."""
    names = _Names()
    pinned = False
    for statement in pglast.parse_sql(sql):
        node = statement.stmt
        if isinstance(node, ast.VariableSetStmt) and node.name == "search_path":
            path = [getattr(one.val, "sval", "") for one in node.args or ()]
            pinned = ", ".join(path) in PINNED_PATHS
        if not pinned and not isinstance(node, _UTILITY):
            names(node)
    return tuple(found for found in names.found if found[0] != "relation" or found[1] not in names.ctes)


def unqualified(sql: str) -> list[str]:
    """The names of a statement that the search_path decides."""
    return [name for _, name in names_without_schema(sql)]


def body_statements(definition: str) -> Iterator[str]:
    """The statements and expressions of a function in SQL or PL/pgSQL, from its CREATE FUNCTION."""
    (statement,) = pglast.parse_sql(definition)
    options = {option.defname: option.arg for option in statement.stmt.options or ()}
    if options["language"].sval == "sql":
        yield options["as"][0].sval
        return
    yield from _expressions(_parsed(definition))


def _parsed(definition: str) -> Any:
    """The tree of a PL/pgSQL function. The parser knows no fields of composite variables: FOUND stands for them."""
    while True:
        try:
            return json.loads(pglast.parser.parse_plpgsql_json(definition))
        except pglast.parser.ParseError as error:
            unknown = re.search(r'"([a-z_]+\.[a-z_]+)" is not a known variable', str(error))
            if unknown is None:
                raise
            definition = re.sub(rf"\b{re.escape(unknown[1])}\b(?!\()", "found", definition)


def _expressions(node: Any) -> Iterator[str]:
    """The SQL of a parsed PL/pgSQL function: whole statements, expressions as SELECTs, the source of an assignment."""
    if isinstance(node, list):
        for part in node:
            yield from _expressions(part)
    elif isinstance(node, dict):
        found = node.get("PLpgSQL_expr")
        if found is not None:
            yield _as_statement(found["query"])
        declared = node.get("PLpgSQL_var")
        if declared is not None and "lineno" in declared:  # not an argument, whose type is known by its number
            yield from _type(declared["datatype"]["PLpgSQL_type"]["typname"])
        for part in node.values():
            yield from _expressions(part)


def _type(name: str) -> Iterator[str]:
    if name.endswith(("%type", "%TYPE", "%rowtype", "%ROWTYPE")):
        return
    if name.strip('"') not in ("record", "RECORD", "trigger", "event_trigger"):
        yield f"select null::{name}"


def _as_statement(text: str) -> str:
    for candidate in (text, f"select {text}", re.sub(r"^[^=]*?:?=", "select ", text, count=1)):
        try:
            pglast.parse_sql(candidate)
        except pglast.parser.ParseError:
            continue
        return candidate
    raise ValueError(f"neither a statement nor an expression: {text}")


@dataclass
class Sent:
    """Statements that gdq has sent: how many, and those whose names a search_path decides that nobody has pinned."""

    seen: int = 0
    loose: dict[str, list[str]] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)


def _is_gdqs() -> bool:
    """True if the statement that is being executed comes from gdq, not from a test or an application."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(("psycopg", "contextlib", "tests.support.qualified", "adbc_driver")):
            return name.startswith("gdq.")
        frame = frame.f_back
    return False


class _Watch:
    """Looks at statements before they are sent."""

    def __init__(self) -> None:
        self.sent = Sent()

    def look(self, text: str, path: Callable[[], str]) -> None:
        self.sent.seen += 1
        names = unqualified(text)
        if names and (found := path()) not in PINNED_PATHS:
            self.sent.loose[text] = names
            self.sent.paths.add(found)

    def of_psycopg(self, original: Any) -> Any:
        """The method execute(), executemany() or copy() of a cursor of psycopg, watched."""

        def method(cursor: Any, query: Any, *args: Any, **kw: Any) -> Any:
            if _is_gdqs():
                converted = PostgresQuery(Transformer(cursor))
                values = args[0] if args else kw.get("params")
                if original.__name__ == "executemany":
                    values = next(iter(values or ()), None)
                converted.convert(query, values)
                self.look(converted.query.decode(), lambda: _path_of(cursor.connection))
            return original(cursor, query, *args, **kw)

        return method

    def of_arrow(self, original: Any) -> Any:
        """The method execute() of a cursor of the Arrow driver, watched."""

        def method(cursor: Any, operation: Any, *args: Any, **kw: Any) -> Any:
            def path() -> str:
                original(cursor, "select pg_catalog.current_setting('search_path')")
                return str(cursor.fetchone()[0])

            if isinstance(operation, str) and _is_gdqs():
                self.look(operation, path)
            return original(cursor, operation, *args, **kw)

        return method


def _path_of(connection: psycopg.Connection[Any]) -> str:
    wire = connection.pgconn
    if wire.pipeline_status or connection.info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
        return "unknown"
    return (wire.exec_(b"show search_path").get_value(0, 0) or b"").decode()


@contextmanager
def watched_statements() -> Iterator[Sent]:
    """Look at every statement that gdq sends in this process during the block, by psycopg or by the Arrow driver.

    Its names must have a schema unless the session's path is pinned at that moment.
    """
    from adbc_driver_manager import dbapi

    watch = _Watch()
    with pytest.MonkeyPatch.context() as patch:
        for kind in (psycopg.Cursor, psycopg.ServerCursor):
            for name in ("execute", "executemany", "copy"):
                if name in vars(kind):
                    patch.setattr(kind, name, watch.of_psycopg(getattr(kind, name)))
        patch.setattr(dbapi.Cursor, "execute", watch.of_arrow(dbapi.Cursor.execute))
        yield watch.sent
