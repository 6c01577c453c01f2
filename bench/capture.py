"""What capture adds to a write: gdq's triggers beside the peers' and beside a slot, against a table without either."""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from bench.contenders import prepare
from bench.measure import Meter, Work
from bench.packages import Place
from bench.results import Results
from gdq.installer.install import install

SIZES = {
    "tiny": Work(100, 3, 1, 1, 1, (1,), ("off",), ("no trigger", "gdq full", "slot consumed")),
    "quick": Work(
        10_000, 50, 2, 1, 1, (1, 4), ("off",), ("no trigger", "gdq full", "gdq pk", "PgQ with backup", "Slony")
    ),
    "usual": Work(100_000, 100, 3, 1, 2, (1, 16), ("on", "off")),
    "long": Work(100_000, 200, 5, 3, 2, (1, 4, 16), ("on", "off")),
}


def run(place: Place, work: Work, results: Results, progress: Callable[[str], None]) -> None:
    """Set everything up and measure what is missing in `results`."""
    install(place.conninfo)
    with psycopg.connect(place.conninfo, autocommit=True) as connection:
        connection.execute("select gdq.create_event_triggers()")
        logs = prepare(connection, work.rows, work.wide_rows, place.missing)
        size = connection.execute("select round(avg(pg_column_size(f))) from app.feed f").fetchone()
        results.tell(row_bytes=int(size[0]) if size else 0, rows=work.rows, wide_rows=work.wide_rows)
    meter = Meter(place, logs, results, progress)
    meter.statements(work)
    meter.runs(work)
