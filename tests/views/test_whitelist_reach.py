"""The list of views that changes refresh: it covers the tests' grammars, and agrees with the planner and its SQL."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from gdq.plan import whitelist
from gdq.plan.dialect import parse_statement
from gdq.plan.postgres import PostgresPlan
from gdq.plan.shape import aggregates_of
from gdq.view.view import explain_view
from tests.support.server import Database
from tests.support.spark import QUEUE, make_shop
from tests.support.view_grammar import CAPTURE, SCHEMA, SHAPES
from tests.support.view_random import RandomView


@pytest.mark.long
def test_grammar_is_on_the_list(db: Database) -> None:
    """No view of the tests' grammars is loaded in full for what is not listed, or is read otherwise."""
    draw = random.Random("whitelist")
    queries = [shape.query for shape in SHAPES.values() if shape.base is None]
    queries += [RandomView(draw).query() for _ in range(60)]
    for shop in make_shop(db, [*SCHEMA, *CAPTURE]):
        for query in queries:
            plan = explain_view(shop.connection, QUEUE, query, engine="postgres")
            assert isinstance(plan, PostgresPlan)
            assert not re.search(r"\[(not-listed|read-otherwise)\]", plan.full or ""), query


def test_aggregates_of_the_list() -> None:
    """The planner takes each listed name for an aggregate, unless it has a schema."""
    for name in whitelist.AGGREGATES:
        pairs = name.startswith(("regr", "corr", "covar", "string", "json_object", "jsonb_object"))
        call = f"{name}(x, y)" if pairs else f"{name}(x)"
        assert aggregates_of(parse_statement(f"select {call} from t").expressions[0]), name
        assert not aggregates_of(parse_statement(f"select s.{call} from t").expressions[0]), name


def test_no_null_test_of_values_of_any_type() -> None:
    """Generated SQL asks by gdq.sql_text whether a value is NULL; Spark's SQL, and a count of rows, may use IS NULL."""
    allowed = (
        "sum(if({item} is null, 0L, w))",
        "if({name} is null, null",
        "{ROWS_READ_COLUMN} is null",
        "{read} is not",
    )
    root = Path(__file__).parent.parent.parent
    for folder in ("gdq/plan", "gdq/view", "consumers/views", "consumers/spark", "consumers/lake"):
        for path in (root / folder).rglob("*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                if re.search(r"(\}|\bk|\bx) is (not )?null", line):
                    assert any(part in line for part in allowed), (path, line)
