"""Which types Spark may compare by PostgreSQL's text, and what PostgreSQL may compute of joined rows anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.number import column_number, number_of
from gdq.plan.query import Query, render

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

# What a text means is the same for these wherever they are computed: no collation plays a part.
_BY_BYTES: tuple[type[exp.Expr], ...] = (
    exp.Paren, exp.Coalesce, exp.DPipe, exp.Literal, exp.Null, exp.Boolean, exp.Is, exp.Not, exp.And, exp.Or, exp.Case,
    exp.If, exp.EQ, exp.NEQ, exp.NullSafeEQ, exp.NullSafeNEQ,
)  # fmt: skip
# What is computed of several tables after the join, by operators of PostgreSQL itself.
_AFTER: tuple[type[exp.Expr], ...] = (
    *_BY_BYTES, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Neg, exp.Abs, exp.Round, exp.GT, exp.GTE, exp.LT,
    exp.LTE, exp.Between, exp.In, exp.Tuple, exp.Greatest, exp.Least, exp.Nullif, exp.Cast, exp.DataType,
    exp.DataTypeParam,
)  # fmt: skip


def kind_of(side: exp.Expr, type_of: Callable[[exp.Column], str]) -> str:
    """The kind of type of an expression, empty when its values have no one text. `type_of`: the type of a column."""
    if isinstance(side, exp.Column):
        found = type_of(side)
        return next((kind for pattern, kind in _KINDS.items() if re.fullmatch(pattern, found)), "")
    if isinstance(side, exp.Cast):
        inner = kind_of(side.this.unnest(), type_of)
        return _CAST_KINDS.get(side.to.this, "") if inner else ""
    number = number_of(side, lambda column: column_number(type_of(column)))
    if number is None:
        return ""
    return "numeric" if number.type == "numeric" else "integer"


def text_form(side: exp.Expr, type_of: Callable[[exp.Column], str]) -> str:
    """The kind of type of an expression, with numeric's scale; empty when equal values may have different texts."""
    kind = kind_of(side, type_of)
    if kind != "numeric":
        return kind
    number = number_of(side, lambda column: column_number(type_of(column)))
    return f"numeric({number.scale})" if number is not None and number.fixed else ""


def query_types(query: Query) -> Callable[[exp.Column], str]:
    """The types of a query's columns; empty for those of no table, and where a collation takes texts for equal."""

    def type_of(column: exp.Column) -> str:
        table = query.leaves[column.table].table
        found = table.column(column.name) if table is not None else None
        return "" if found is None or found.folded else found.type

    return type_of


def check_after(node: exp.Expr, kinds: Sequence[str]) -> None:
    """PlanError unless an expression gives the same in the database of the target as in that of the tables."""
    bare = [one for one in node.walk() if not isinstance(one, exp.Var | exp.Identifier)]
    if all(isinstance(one, _BY_BYTES) for one in bare):
        return
    if all(isinstance(one, _AFTER) for one in bare) and all(kind in _PLAIN for kind in kinds):
        casts = [one.to.this for one in bare if isinstance(one, exp.Cast)]
        if all(kind in _CAST_KINDS or kind in (exp.DType.DOUBLE, exp.DType.FLOAT) for kind in casts):
            return
    raise PlanError("spark-expression", f"Spark takes no expression over several tables like {render(node)}")
