"""Infers the number type of an expression, so that its sums can be kept by adding and subtracting.

The rules are those of PostgreSQL's numeric: + and - give the larger scale, * the sum of the scales. Other expressions
have no known number type, and their sums are recomputed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from sqlglot import exp

_INTEGER_DIGITS = {"smallint": 5, "integer": 10, "bigint": 19}
_NUMERIC = re.compile(r"numeric\((\d+),(-?\d+)\)")
_INT4_MAX, _INT8_MAX = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True, slots=True)
class Number:
    """Values of an exact number type: `type` is smallint, integer, bigint or numeric.

    `whole` and `scale`: the largest number of digits before and after the point. `fixed`: all values have that scale.
    """

    type: str
    whole: int
    scale: int = 0
    fixed: bool = True


def column_number(pg_type: str) -> Number | None:
    """The number type of a column's type; None if it is not an exact number with a limit."""
    if pg_type in _INTEGER_DIGITS:
        return Number(pg_type, _INTEGER_DIGITS[pg_type])
    match = _NUMERIC.fullmatch(pg_type)
    if match is None:
        return None
    precision, scale = int(match[1]), int(match[2])
    return Number("numeric", precision - scale if scale < precision else 0, max(scale, 0))


_Lookup = Callable[[exp.Column], Number | None]


def number_of(expression: exp.Expr, columns: _Lookup) -> Number | None:
    """The number type of `expression`, None if unknown. `columns` gives the number types of columns."""
    number: Number | None = None
    match expression:
        case exp.Column():
            number = columns(expression)
        case exp.Paren() | exp.Neg():
            number = number_of(expression.this, columns)
        case exp.Literal() if not expression.is_string:
            number = _literal(expression.name)
        case exp.Add() | exp.Sub() | exp.Mul():
            number = _arithmetic(expression, columns)
        case exp.Case():
            branches = [branch.args["true"] for branch in expression.args["ifs"]]
            default = expression.args.get("default")
            number = _common([*branches, default] if default is not None else branches, columns)
        case exp.Coalesce():
            number = _common([expression.this, *expression.expressions], columns)
        case exp.Cast():
            number = _cast(expression, columns)
    return number


def _cast(cast: exp.Cast, columns: _Lookup) -> Number | None:
    """The number type of a cast; a cast to numeric without precision keeps the argument's digits."""
    name = _type_name(cast.to)
    inner = cast.this.unnest()
    if inner.is_string:
        literal = _literal(inner.name.lstrip("-"))
        return column_number(name) or (literal if literal and name == "numeric" else None)
    number = number_of(inner, columns)
    if name != "numeric" or number is None:
        return column_number(name)
    return Number("numeric", number.whole, number.scale, number.fixed)


def _type_name(kind: exp.DataType) -> str:
    """A type as format_type() prints it, for exact number types; empty or wrong for others."""
    names = {
        exp.DType.SMALLINT: "smallint",
        exp.DType.INT: "integer",
        exp.DType.BIGINT: "bigint",
        exp.DType.DECIMAL: "numeric",
    }
    parameters = [parameter.name for parameter in kind.expressions]
    if len(parameters) == 1:
        parameters.append("0")
    return names.get(kind.this, "") + (f"({','.join(parameters)})" if parameters else "")


def _literal(text: str) -> Number | None:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        return None
    whole, _, fraction = text.partition(".")
    digits = len(whole.lstrip("0"))
    if fraction or int(whole) > _INT8_MAX:
        return Number("numeric", digits, len(fraction))
    return Number("integer" if int(whole) <= _INT4_MAX else "bigint", digits)


def _arithmetic(expression: exp.Binary, columns: _Lookup) -> Number | None:
    left, right = number_of(expression.this, columns), number_of(expression.expression, columns)
    if left is None or right is None:
        return None
    kind = _wider(left.type, right.type)
    if kind != "numeric":
        return Number(kind, _INTEGER_DIGITS[kind])
    fixed = left.fixed and right.fixed
    if isinstance(expression, exp.Mul):
        return Number(kind, left.whole + right.whole, left.scale + right.scale, fixed)
    # The larger scale wins: it is certain once that side always has it.
    fixed = fixed or any(side.fixed and side.scale == max(left.scale, right.scale) for side in (left, right))
    return Number(kind, max(left.whole, right.whole) + 1, max(left.scale, right.scale), fixed)


def _common(expressions: list[exp.Expr], columns: _Lookup) -> Number | None:
    numbers = [number_of(e, columns) for e in expressions if not isinstance(e, exp.Null)]
    known = [number for number in numbers if number is not None]
    if not known or len(known) != len(numbers):
        return None
    kind = known[0].type
    for number in known[1:]:
        kind = _wider(kind, number.type)
    scales = {number.scale for number in known}
    fixed = len(scales) == 1 and all(number.fixed for number in known)
    return Number(kind, max(number.whole for number in known), max(scales), fixed)


def _wider(left: str, right: str) -> str:
    order = ["smallint", "integer", "bigint", "numeric"]
    return max(left, right, key=order.index)
