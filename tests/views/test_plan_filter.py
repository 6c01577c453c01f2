"""Which rows of a table matter to a view, and what of a table a view reads, without a server."""

from __future__ import annotations

import pytest

from gdq.plan.postgres import plan_postgres
from gdq.plan.steps import ReplaceOutcome
from gdq.plan.table import TableColumn, TableSchema

ITEM = TableSchema(
    "s",
    "item",
    "full",
    (TableColumn("id", "integer", key=True), TableColumn("k", "integer"), TableColumn("note", "text")),
)
PART = TableSchema("s", "part", "full", ITEM.columns)
FROM_BOTH = "SELECT i.id, p.note FROM s.item i JOIN s.part p ON p.id = i.k"


def passing(query: str, table: str) -> str:
    (used,) = (used for used in plan_postgres(query, [ITEM, PART]).tables if used.name == f'"s"."{table}"')
    return used.passing.replace("gdq_row", "").replace('""."', "").replace('"', "").replace("(", "").replace(")", "")


@pytest.mark.parametrize(
    ("query", "item", "part"),
    [
        (f"{FROM_BOTH} WHERE i.k > 3 AND p.k = 1 AND i.id < p.k", "k > 3", "k = 1"),
        (f"{FROM_BOTH} AND p.note LIKE 'a%'::text", "", "note LIKE CAST'a%' AS TEXT"),
        # what may fail is not asked of a row that was there for a moment only
        (f"{FROM_BOTH} WHERE 1 / i.k > 0 AND p.note LIKE p.note", "", ""),
        (f"{FROM_BOTH} WHERE i.k = 1 AND p.k = 2 OR i.k = 3 AND p.k > 4", "k = 1 OR k = 3", "k = 2 OR k > 4"),
        (f"{FROM_BOTH} WHERE i.k = 1 AND p.k = 2 OR i.k = 3", "k = 1 OR k = 3", ""),
        # a row that is joined keeps another one from being padded
        ("SELECT i.id FROM s.item i LEFT JOIN s.part p ON p.id = i.k WHERE p.k IS NULL AND i.k > 1", "", ""),
        # every place in which the table stands counts
        ("SELECT a.id FROM s.item a JOIN s.item b ON a.id = b.k WHERE a.k = 1 AND b.k = 2", "k = 1 or k = 2", None),
        ("SELECT a.id FROM s.item a JOIN s.item b ON a.id = b.k WHERE a.k = 1", "", None),
        (
            "SELECT i.id FROM s.item i WHERE i.k = 1 AND NOT (EXISTS (SELECT 1 FROM s.part p WHERE p.k > 5))",
            "k = 1",
            "k > 5",
        ),
    ],
)
def test_rows_that_matter(query: str, item: str, part: str | None) -> None:
    assert passing(query, "item") == item
    if part is not None:
        assert passing(query, "part") == part


def test_exists_reads_no_more_than_its_conditions() -> None:
    inner = "SELECT p.id, p.k, p.note FROM s.part p WHERE p.id = i.k"
    for clause, read in (("", ("id",)), (" LIMIT 0", ("id", "k", "note"))):
        plan = plan_postgres(f"SELECT i.id FROM s.item i WHERE (EXISTS ({inner}{clause}))", [ITEM, PART])
        assert plan.tables[1].columns == read


def test_value_of_an_unchanged_table_is_computed_once() -> None:
    value = "(SELECT max(p.k) AS max FROM s.part p)"
    grouped = f"SELECT i.note, count(DISTINCT i.k) AS n FROM s.item i WHERE i.k > {value} GROUP BY i.note"
    joined = f"SELECT a.n FROM ({grouped}) a JOIN s.part p ON p.id = a.n"
    statements = [step.sql for step in plan_postgres(joined, [ITEM, PART]).plan_changes(['"s"."item"']).steps]
    assert sum("MAX(" in statement for statement in statements) == 1
    # rows that come in the place of others may be selected by sessions that have not computed it
    outcome = plan_postgres(grouped, [ITEM, PART]).plan_changes(['"s"."item"']).outcome
    assert isinstance(outcome, ReplaceOutcome)
    assert "pg_temp" not in outcome.sql
