"""docs/types.md says what gdq.typed.pgtypes does, and gdq.typed.pgtypes what its functions do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdq.errors import UnsupportedValue
from gdq.typed.pgtypes import TYPES, base_type_name, column_type, types_markdown

DOC = Path(__file__).parent.parent.parent / "docs" / "types.md"


@pytest.mark.skipif(not DOC.exists(), reason="docs/ is not part of an sdist")
def test_table_in_docs_is_the_table_in_code() -> None:
    assert types_markdown() in DOC.read_text(encoding="utf-8")


def test_one_arrow_type_has_one_spark_type() -> None:
    pairs = {(row.column.arrow, row.column.spark) for row in TYPES}
    assert len({arrow for arrow, _ in pairs}) == len(pairs)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("integer", "integer"),
        ("character varying(20)", "character varying"),
        ("timestamp(3) without time zone", "timestamp without time zone"),
        ("numeric(10,-2)", "numeric"),
        ("bpchar", "character"),
        ('public."odd(1)"', 'public."odd"'),
        ("integer[]", "integer[]"),
    ],
)
def test_base_name_drops_the_typmod(name: str, base: str) -> None:
    assert base_type_name(name) == base


@pytest.mark.parametrize(
    ("pg_type", "arrow", "spark"),
    [
        ("numeric(10,2)", "decimal128(10, 2)", "decimal(10,2)"),
        ("numeric(38,0)", "decimal128(38, 0)", "decimal(38,0)"),
        ("numeric(3,5)", "decimal128(5, 5)", "decimal(5,5)"),
        ("numeric(5,-2)", "decimal128(7, 0)", "decimal(7,0)"),
        ("numeric(5)", "decimal128(5, 0)", "decimal(5,0)"),
        ("timestamp(0) with time zone", "timestamp[us, tz=UTC]", "timestamp"),
        ("integer[]", "string", "string"),
        ("numeric(10,2)[]", "string", "string"),
        ("tsvector", "string", "string"),
    ],
)
def test_types_with_a_home(pg_type: str, arrow: str, spark: str) -> None:
    column = column_type(pg_type)
    assert (column.arrow, column.spark) == (arrow, spark)


@pytest.mark.parametrize("pg_type", ["numeric", "numeric(39,0)", "numeric(5,-34)", "interval", "time with time zone"])
def test_types_without_a_home_are_refused_by_name_or_text(pg_type: str) -> None:
    with pytest.raises(UnsupportedValue, match='"amount"'):
        column_type(pg_type, column="amount")
    assert column_type(pg_type, column="amount", unsupported="text").arrow == "string"


def test_domain_is_its_base_type() -> None:
    assert column_type("public.positive", log_type="integer").arrow == "int32"


def test_user_type_is_text_already() -> None:
    assert column_type("public.mood", as_text=True).read_sql == "{c}"
