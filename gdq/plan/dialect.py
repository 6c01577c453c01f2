"""PostgreSQL's SQL to a tree of sqlglot and back, with every function under the name that PostgreSQL prints."""

from __future__ import annotations

from typing import Any

import sqlglot
from sqlglot import TokenType, exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.generators.postgres import PostgresGenerator
from sqlglot.parsers.postgres import PostgresParser

# The functions that the planner knows by a node of their own. All others are calls by name, as PostgreSQL prints them:
# sqlglot would write many of them under another name or as another expression.
_KNOWN_FUNCTIONS = (
    "ABS", "ARRAY", "AVG", "BOOL_AND", "BOOL_OR", "COALESCE", "COUNT", "EXISTS", "GREATEST", "LEAST", "MAX", "MIN",
    "NULLIF", "ROUND", "SUM", "UNNEST",
)  # fmt: skip
# Functions that PostgreSQL prints with words between their arguments.
_WORDED_FUNCTIONS = (
    "CAST", "EXTRACT", "JSON_OBJECT", "JSON_OBJECTAGG", "JSON_TABLE", "JSON_VALUE", "NORMALIZE", "OVERLAY", "POSITION",
    "STRING_AGG", "SUBSTRING", "TRIM", "XMLELEMENT", "XMLTABLE",
)  # fmt: skip


class QueryDialect(Postgres):
    """PostgreSQL's dialect, but without renaming functions that sqlglot knows under another name."""

    class Parser(PostgresParser):
        FUNCTIONS = {name: PostgresParser.FUNCTIONS[name] for name in _KNOWN_FUNCTIONS}  # noqa: RUF012
        FUNCTION_PARSERS = {name: PostgresParser.FUNCTION_PARSERS[name] for name in _WORDED_FUNCTIONS}  # noqa: RUF012

        def _parse_function_call(self, *args: Any, **options: Any) -> exp.Expr | None:
            # a quoted name is a plain call: PostgreSQL prints "substring"(a, 1) and SUBSTRING(a FROM 1) apart
            quoted = self._curr.token_type == TokenType.IDENTIFIER
            return super()._parse_function_call(*args, **options | ({"anonymous": True} if quoted else {}))

    class Generator(PostgresGenerator):
        # as functions of these names they would be others
        TRANSFORMS = PostgresGenerator.TRANSFORMS | {
            exp.Pow: lambda self, node: self.binary(node, "^"),
            exp.StartsWith: lambda self, node: self.binary(node, "^@"),
            exp.Sqrt: lambda self, node: f"|/ {self.sql(node, 'this')}",
            exp.Cbrt: lambda self, node: f"||/ {self.sql(node, 'this')}",
        }

        def windowspec_sql(self, node: exp.WindowSpec) -> str:
            # PostgreSQL prints a frame without its end as it was written
            if node.args.get("end") is not None:
                return super().windowspec_sql(node)
            parts = [self.sql(node, name) for name in ("kind", "start", "start_side", "exclude")]
            return " ".join([*filter(None, parts[:3]), *(f"exclude {part}" for part in parts[3:] if part)])


def parse_statement(sql: str) -> exp.Expr:
    """The tree of one statement; sqlglot.errors.SqlglotError if it cannot be parsed."""
    return sqlglot.parse_one(sql, dialect=QueryDialect)


def render_sql(node: exp.Expr) -> str:
    """A node as PostgreSQL's SQL on one line, with every name quoted."""
    return node.sql(dialect=QueryDialect, identify=True, comments=False, normalize_functions=False)


def literal_number(node: exp.Expr | None) -> int | None:
    """The constant of an expression, with or without casts, that is a number from 0 up; None if it is not plain."""
    node = node.unnest() if node is not None else None
    while isinstance(node, exp.Cast):
        node = node.this.unnest()
    return int(node.name) if isinstance(node, exp.Literal) and node.name.isdigit() else None
