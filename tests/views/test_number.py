"""Which numbers an expression can give: what decides whether its sums are kept."""

from __future__ import annotations

import pytest
from sqlglot import exp

from gdq.plan.dialect import parse_statement
from gdq.plan.number import Number, column_number, number_of

COLUMNS = {
    "status": "text",
    "amount": "numeric(12,2)",
    "loose": "numeric",
    "ratio": "double precision",
    "n": "integer",
    "big": "bigint",
}


def known(expression: str) -> Number | None:
    select = parse_statement(f"select {expression} as x from orders")
    assert isinstance(select, exp.Select)
    return number_of(select.expressions[0].this, lambda column: column_number(COLUMNS[column.name]))


@pytest.mark.parametrize(
    ("expression", "kind", "scale", "fixed"),
    [
        ("amount", "numeric", 2, True),
        ("n", "integer", 0, True),
        ("n + big", "bigint", 0, True),
        ("amount * (1 - 0.125)", "numeric", 5, True),
        ("-amount + n", "numeric", 2, True),
        ("case when n > 0 then amount else 0 end", "numeric", 2, False),
        ("coalesce(amount, 0.00)", "numeric", 2, True),
        ("loose::numeric(10, 4)", "numeric", 4, True),
        ("9999999999", "bigint", 0, True),
    ],
)
def test_known_numbers(expression: str, kind: str, scale: int, fixed: bool) -> None:
    number = known(expression)
    assert number is not None
    assert (number.type, number.scale, number.fixed) == (kind, scale, fixed)


@pytest.mark.parametrize("expression", ["loose", "ratio", "amount / 2", "round(amount, 1)", "'1'", "1e3"])
def test_numbers_without_a_bound(expression: str) -> None:
    assert known(expression) is None


def test_negative_scale_has_no_digits_after_the_point() -> None:
    number = column_number("numeric(3,-2)")
    assert number is not None
    assert (number.whole, number.scale) == (5, 0)
