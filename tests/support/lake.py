"""Views over lake tables, and what a reader finds in those."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gdq.consumers.lake.open import open_lake
from gdq.consumers.lake.table import LakeTable
from gdq.view.view import create_view, drop_view, view_info
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop
from tests.support.view_churn import fill
from tests.support.view_grammar import CAPTURE, SCHEMA

KINDS = ("delta", "parquet", "iceberg")


@dataclass(frozen=True, slots=True)
class Lakes:
    """The source, and a folder for the targets of one kind."""

    shop: Shop
    folder: Path
    kind: str

    def view(self, name: str, query: str) -> None:
        place = f"{self.folder}/w/ns.{name}" if self.kind == "iceberg" else f"{self.folder}/{name}"
        create_view(self.shop.connection, name, QUEUE, query, f"{self.kind}:{place}", audit_share=1.0)

    def open(self, name: str) -> LakeTable:
        (info,) = view_info(self.shop.connection, name)
        assert info.lake is not None
        return open_lake(info.lake, f"view {name}", info.source)

    def rows(self, name: str) -> Counter[str]:
        """What a reader of the lake table finds."""
        found: Counter[str] = Counter()
        for batch in self.open(name).scan():
            found.update(str(list(row.values())) for row in batch.to_pylist())
        return found

    def expected(self, query: str) -> Counter[str]:
        return Counter(str([as_in_lake(value) for value in row]) for row in self.shop.execute(query))

    def equal(self, name: str, query: str) -> bool:
        return self.rows(name) == self.expected(query)


def as_in_lake(value: Any) -> Any:
    """As the lake has it: numbers without a precision are text there, without trailing zeros."""
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    return value if value is None or isinstance(value, int | bool | float) else str(value)


@pytest.fixture(scope="module")
def module_shop(module_db: Database) -> Iterator[Shop]:
    yield from make_shop(module_db, [*SCHEMA, *CAPTURE])


@pytest.fixture(params=KINDS)
def lakes(module_shop: Shop, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lakes]:
    """Filled tables, without views."""
    module_shop.execute("; ".join(fill(random.Random(1))))
    yield Lakes(module_shop, tmp_path, request.param)
    for info in view_info(module_shop.connection):
        drop_view(module_shop.connection, info.view_name)
