"""What a copy has to have brought: the rows of tables at its consumer's position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gdq import Consumer
from gdq.call import call
from tests.support.server import Database

Rows = Counter[tuple[Any, ...]]


def check_arrival(source: Database, target: Database, consumer: str, tables: Mapping[str, Sequence[str]]) -> None:
    """The target has the rows of tables, given with their columns, as of the consumer's position, each as often."""
    expected = _rows_at_position(source, consumer, tables)
    found = _rows(target, tables)
    for table, rows in expected.items():
        assert (found[table] - rows, rows - found[table]) == (Counter(), Counter()), table


def _rows_at_position(db: Database, consumer: str, tables: Mapping[str, Sequence[str]]) -> dict[str, Rows]:
    """The rows when the consumer's next changes begin: those of now, without these changes."""
    with db.connect("su") as su:
        su.execute("select gdq.force_tick('q')")
    found = _rows(db, tables)
    with Consumer(db.dsn, "q", consumer) as reading:
        for batch in reading.batches(once=True):
            for table in tables:
                images = ", ".join(f"case when w < 0 then old_{n} else new_{n} end::text" for n in tables[table])
                log_rows = call(batch.connection, "batch_sql", batch.id, batch.token, table)
                query = f"""select {images}, w from ({log_rows}) d, (values (-1), (1)) s(w)
                             where case when w < 0 then ev_op in ('D', 'U', 'o') else ev_op in ('I', 'U', 'n') end"""
                for *row, weight in batch.connection.execute(query.encode()).fetchall():
                    found[table][tuple(row)] -= weight
    for rows in found.values():
        assert min(rows.values(), default=0) >= 0
    return {table: +rows for table, rows in found.items()}


def _rows(db: Database, tables: Mapping[str, Sequence[str]]) -> dict[str, Rows]:
    with db.connect("su") as su:
        return {
            table: Counter(su.execute(f"select {', '.join(f't.{n}::text' for n in names)} from {table} t".encode()))
            for table, names in tables.items()
        }
