"""What a copy has to have brought: the rows of a table at its consumer's position."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gdq import Consumer
from gdq.call import call
from tests.support.server import Database


def rows_at_position(db: Database, consumer: str, table: str, *columns: str) -> Counter[tuple[Any, ...]]:
    """The rows of a table of queue q when the consumer's next changes begin: those of now, without these changes."""
    texts = ", ".join(f"t.{name}::text" for name in columns)
    images = ", ".join(f"case when w < 0 then old_{name} else new_{name} end::text" for name in columns)
    with db.connect("su") as su:
        su.execute("select gdq.force_tick('q')")
        rows = Counter(su.execute(f"select {texts} from {table} t".encode()).fetchall())
    with Consumer(db.dsn, "q", consumer) as reading:
        for batch in reading.batches(once=True):
            log_rows = call(batch.connection, "batch_sql", batch.id, batch.token, table)
            query = f"""select {images}, w from ({log_rows}) d, (values (-1), (1)) s(w)
                         where case when w < 0 then ev_op in ('D', 'U', 'o') else ev_op in ('I', 'U', 'n') end"""
            for *row, weight in batch.connection.execute(query.encode()).fetchall():
                rows[tuple(row)] -= weight
    assert min(rows.values(), default=0) >= 0
    return +rows
