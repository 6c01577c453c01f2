"""A source whose tables are mirrored to a lake, and what other readers find there."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gdq.consumers.mirror.mirror import Mirror
from gdq.consumers.mirror.state import History
from tests.support.programs import gdq
from tests.support.server import Database

KINDS = ("delta", "iceberg", "parquet")


@dataclass(frozen=True, slots=True)
class Lake:
    """A source with the queue shop, and the folder of a lake of one kind, whose mirror has the folder's name."""

    source: Database
    folder: Path
    kind: str = "delta"

    @property
    def target(self) -> str:
        return f"{self.kind}:{self.folder}"

    @property
    def env(self) -> dict[str, str]:
        """What a mirror needs in its environment."""
        return {}

    def run(self, *statements: str) -> None:
        """Run statements in the source, each a transaction."""
        with self.source.connect() as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        with self.source.connect("su") as connection:
            return connection.execute(query.encode()).fetchall()

    def capture(self, *tables: str) -> None:
        for table in tables:
            self.run(f"select gdq.add_table('shop', '{table}')")

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `gdq mirror` up to now."""
        return gdq("mirror", "shop", *words, "--target", self.target, dsn=self.source.dsn, env=self.env or None)

    def mirror(self, *words: str) -> str:
        """As command(), which must succeed; returns what it says."""
        done = self.command(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def bring_up(self, *words: str, history: History | None = None, columns: Sequence[str] = ()) -> list[str]:
        """As mirror(), in this process, which is quicker; returns the lines that it says."""
        said: list[str] = []
        with Mirror(
            self.source.dsn, "shop", "copy", self.target, words, history=history, columns=columns, tell=said.append
        ) as mirror:
            list(mirror.run())
        return said

    def read(self, table: str) -> pa.Table:
        """The rows of a lake table, as a reader finds them that knows nothing of gdq."""
        if self.kind == "parquet":
            return pq.read_table(self.folder / table / "current")
        if self.kind == "delta":
            from deltalake import DeltaTable, QueryBuilder

            # not to_pyarrow_table(): with this pyarrow a process that called it may abort at its exit
            query = QueryBuilder().register("lake", DeltaTable(str(self.folder / table)))
            return plain_strings(pa.table(query.execute("select * from lake").read_all()))
        from pyiceberg.catalog import load_catalog

        place = f"sqlite:///{self.folder / 'catalog.db'}"
        with load_catalog("gdq", type="sql", uri=place, warehouse=self.folder.as_uri()) as catalog:
            return catalog.load_table(table).scan().to_arrow()

    def same(self, *tables: str) -> None:
        """The lake has the rows that the source has now; nobody writes meanwhile."""
        for table in tables:
            names = [name for _, name in self.columns(table)]
            rows = self.read(table)
            assert sorted(rows.schema.names) == sorted(names)
            found = plain_rows([*row.values()] for row in rows.select(names).to_pylist())
            assert found == plain_rows(self.ask(f"select * from {table}")), table

    def columns(self, table: str) -> list[tuple[int, str]]:
        """The columns of a table in the source, with their numbers."""
        query = f"""select attnum, attname from pg_attribute where attrelid = '{table}'::regclass and attnum > 0
                       and not attisdropped order by attnum"""
        return [(number, name) for number, name in self.ask(query)]

    def commits(self, table: str) -> int:
        """The number of versions that a Delta table has had."""
        from deltalake import DeltaTable

        return int(DeltaTable(str(self.folder / table)).version()) + 1


def plain_strings(rows: pa.Table) -> pa.Table:
    """Rows with strings and bytes in Arrow's usual types, in place of views of them."""
    usual = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    return rows.cast(pa.schema([field.with_type(usual.get(field.type, field.type)) for field in rows.schema]))


def plain(value: Any) -> Any:
    """A value in a form that is the same from the lake and from the source."""
    if isinstance(value, list):
        return f"{{{','.join(value)}}}"
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    return value.timestamp() if isinstance(value, datetime) and value.tzinfo is not None else str(value)


def plain_rows(rows: Iterable[Sequence[Any]]) -> Counter[tuple[str, ...]]:
    """How often each row is there, with its values in that form."""
    return Counter(tuple(map(plain, row)) for row in rows)


@pytest.fixture
def lake(db: Database, tmp_path: Path) -> Lake:
    lake = Lake(db, tmp_path / "copy")
    lake.run("select gdq.create_queue('shop')")
    return lake


@pytest.fixture(params=KINDS)
def each(request: pytest.FixtureRequest, lake: Lake) -> Lake:
    """A lake of each kind."""
    return replace(lake, kind=request.param)
