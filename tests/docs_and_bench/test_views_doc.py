"""The examples of docs/views.md: their rule is as written, and a refresh from changes gives what the query gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.plan.postgres import PostgresPlan
from gdq.view.view import create_view, explain_view
from tests.support.server import Database
from tests.support.whitelist_table import with_whitelist_table

PAGE = Path(__file__).parent.parent.parent / "docs" / "views.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no documentation")

ROWS = [
    "insert into customer select i, 'c' || i, (array['DE', 'NL'])[1 + i % 2] from generate_series(1, 9) i",
    """insert into orders select i, 1 + i % 7, (array['new', 'DE'])[1 + i % 2], date '2026-01-01' + i
         from generate_series(1, 20) i""",
    """insert into item select o, l, (array['pen', 'cup', 'ink'])[1 + (o + l) % 3], o * l / 4.0
         from generate_series(1, 20) o, generate_series(1, 3) l""",
    "insert into person select i, 'p' || i, case when i > 5 then 'NL' end from generate_series(1, 9) i",
]

CHANGES = [
    "insert into orders values (100, 3, 'new', '2026-02-01'), (101, null, 'sent', null)",
    "insert into item values (100, 1, 'pen', 9.50), (100, 2, null, 3), (1, 9, 'ink', 0.5)",
    "update customer set country = 'NL' where id = 2",
    "update item set price = price + 1, product = 'ink' where orders in (2, 3)",
    "delete from orders where id = 4; delete from item where orders = 4",
    "update orders set customer = 5, status = 'sent' where id = 5",
    "delete from customer where id = 6; delete from orders where customer = 3",
    "update customer set country = 'XX' where id in (7, 8)",
    "update person set country = 'DE' where id > 3; update person set name = 'new' where id = 4",
    "delete from person where id = 5",
]


def blocks() -> tuple[str, list[tuple[str, str]]]:
    """The schema, and each view with the rule that the page names."""
    found = re.findall(r"```sql (schema|view (\w+))\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (schema,) = (text for kind, _, text in found if kind == "schema")
    return schema, [(rule, text.strip()) for kind, rule, text in found if kind != "schema"]


@pytest.mark.long
def test_examples(db: Database) -> None:
    schema, views = blocks()
    assert len(views) > 12
    with db.connect(autocommit=True) as connection:
        connection.execute(schema)
        connection.execute("select gdq.create_queue('q')")
        for table in ("customer", "orders", "item"):
            connection.execute("select gdq.add_table('q', %s::regclass)", [table])
        connection.execute("select gdq.add_table('q', 'person', mode => 'pk')")
        for rows in ROWS:
            connection.execute(rows)
        for number, (rule, query) in enumerate(views):
            plan = create_view(connection, f"v{number}", "q", query, f"public.v{number}", engine="postgres")
            assert isinstance(plan, PostgresPlan)
            rules = {found.partition(":")[0] for found in plan.alone().values()}
            assert rule in rules, (query, rules)
            assert (plan.strategy == "full") == (rule == "full"), query
        with Refresher(db.dsn) as refresher:
            for number in range(len(views)):
                refresher.refresh(f"v{number}")
            changed = set()
            for change in CHANGES:
                connection.execute(change)
                for number, (rule, query) in enumerate(views):
                    result = refresher.refresh(f"v{number}")
                    assert result.action != "full" or rule == "full", (query, result.reason)
                    changed |= {number} if result.rows_changed else set()
                    assert difference(db, query, f"v{number}") == [], (query, change)
            assert changed == set(range(len(views)))


def difference(db: Database, query: str, table: str) -> list[tuple[object, ...]]:
    with db.connect() as connection:
        statement = f"(({query}) except all table {table}) union all (table {table} except all ({query}))"
        found: list[tuple[object, ...]] = connection.execute(statement).fetchall()
        return found


def test_list_is_that_of_the_planner() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_whitelist_table(page), "run python -m tests.support.whitelist_table"


def test_codes_are_explained() -> None:
    page = PAGE.read_text(encoding="utf-8")
    codes = set()
    for name in (
        "query",
        "leaf",
        "graph",
        "shape",
        "whole",
        "delta",
        "postgres",
    ):
        text = (Path(__file__).parent.parent.parent / "gdq" / "plan" / f"{name}.py").read_text(encoding="utf-8")
        codes |= set(re.findall(r'PlanError\(\s*"([a-z-]+)"', text))
    assert {code for code in codes if f"`{code}`" not in page} == {"not-a-select", "duplicate-column"}


def test_full_views_say_so(db: Database) -> None:
    schema, _ = blocks()
    with db.connect(autocommit=True) as connection:
        connection.execute(schema)
        connection.execute("select gdq.create_queue('q'); ")
        connection.execute("select gdq.add_table('q', 'item')")
        plan = explain_view(connection, "q", "select string_agg(product, ',') from item", engine="postgres")
        assert plan.strategy == "full"
        assert "[no-group-by]" in str(plan)
