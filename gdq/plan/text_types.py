"""Types that Spark may compare by PostgreSQL's text, and expressions that give the same in any database."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.dialect import render_sql
from gdq.plan.number import column_number, number_of
from gdq.plan.query import Query

_KINDS = {
    r"smallint|integer|bigint|oid": "integer",
    r"numeric(\(.*\))?": "numeric",
    r"text|character varying(\(\d+\))?": "text",
    r"boolean": "boolean",
    r"uuid": "uuid",
    r"date": "date",
    r"bytea": "bytea",
    r"timestamp(\(\d\))? with time zone": "timestamptz",
    r"timestamp(\(\d\))? without time zone": "timestamp",
}
_CAST_KINDS = {
    exp.DType.SMALLINT: "integer",
    exp.DType.INT: "integer",
    exp.DType.BIGINT: "integer",
    exp.DType.DECIMAL: "numeric",
    exp.DType.TEXT: "text",
    exp.DType.VARCHAR: "text",
    exp.DType.BOOLEAN: "boolean",
    exp.DType.UUID: "uuid",
    exp.DType.DATE: "date",
}
_PLAIN = ("integer", "numeric", "boolean", "date", "timestamptz", "timestamp", "double precision", "real")

# Expressions that need no collation, so that they give the same for texts in any database.
_BY_BYTES: tuple[type[exp.Expr], ...] = (
    exp.Paren, exp.Coalesce, exp.DPipe, exp.Literal, exp.Null, exp.Boolean, exp.Is, exp.Not, exp.And, exp.Or, exp.Case,
    exp.If, exp.EQ, exp.NEQ, exp.NullSafeEQ, exp.NullSafeNEQ,
)  # fmt: skip
# Expressions that PostgreSQL may compute over several tables after the join, if all types are plain.
_AFTER: tuple[type[exp.Expr], ...] = (
    *_BY_BYTES, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Neg, exp.Abs, exp.Round, exp.GT, exp.GTE, exp.LT,
    exp.LTE, exp.Between, exp.In, exp.Tuple, exp.Greatest, exp.Least, exp.Nullif, exp.Cast, exp.DataType,
    exp.DataTypeParam,
)  # fmt: skip


def text_kind(side: exp.Expr, type_of: Callable[[exp.Column], str]) -> str:
    """The kind of an expression's type, empty for types that Spark cannot compare. `type_of`: a column's type."""
    if isinstance(side, exp.Column):
        found = type_of(side)
        return next((kind for pattern, kind in _KINDS.items() if re.fullmatch(pattern, found)), "")
    if isinstance(side, exp.Cast):
        inner = text_kind(side.this.unnest(), type_of)
        return _CAST_KINDS.get(side.to.this, "") if inner else ""
    number = number_of(side, lambda column: column_number(type_of(column)))
    if number is None:
        return ""
    return "numeric" if number.type == "numeric" else "integer"


def text_form(side: exp.Expr, type_of: Callable[[exp.Column], str]) -> str:
    """The kind of an expression's type, with numeric's scale; empty if equal values may have different texts."""
    kind = text_kind(side, type_of)
    if kind != "numeric":
        return kind
    number = number_of(side, lambda column: column_number(type_of(column)))
    return f"numeric({number.scale})" if number is not None and number.fixed else ""


def query_column_types(query: Query) -> Callable[[exp.Column], str]:
    """The types of a query's columns; empty for columns of no table, or if a collation treats texts as equal."""

    def type_of(column: exp.Column) -> str:
        table = query.leaves[column.table].table
        found = table.column(column.name) if table is not None else None
        return "" if found is None or found.folded else found.type

    return type_of


def check_after_join(node: exp.Expr, kinds: Sequence[str]) -> None:
    """PlanError unless an expression gives the same in the target's database as in the tables' database."""
    bare = [one for one in node.walk() if not isinstance(one, exp.Var | exp.Identifier)]
    if all(isinstance(one, _BY_BYTES) for one in bare):
        return
    if all(isinstance(one, _AFTER) for one in bare) and all(kind in _PLAIN for kind in kinds):
        casts = [one.to.this for one in bare if isinstance(one, exp.Cast)]
        if all(kind in _CAST_KINDS or kind in (exp.DType.DOUBLE, exp.DType.FLOAT) for kind in casts):
            return
    raise PlanError("spark-expression", f"Spark takes no expression over several tables like {render_sql(node)}")
