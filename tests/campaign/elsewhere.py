"""Consumers that are programs of their own: one with its position in another server, one that mirrors a table.

    python -m tests.campaign.elsewhere far SOURCE TARGET
    python -m tests.campaign.elsewhere mirror SOURCE

Both end at any error: the supervisor starts them again, and they go on.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import Connection

import gdq
from gdq.source import Position
from tests.campaign.handlers import Row, store

_TABLES = ("app.acct", "app.item", "app.part")


def _stop(*_: object) -> None:
    raise SystemExit(0)


def far(source: str, target: str) -> None:
    """Typed rows to another server, in one transaction with the position."""
    with (
        psycopg.connect(target, autocommit=True) as there,
        gdq.Consumer(source, "q", "far", max_events=10_000) as consumer,
    ):
        stored = _stored(there)
        if stored is None:
            stored = gdq.position(consumer.connection, "q", "far")
            there.execute("insert into seen.position values (%s)", [stored])
        gdq.check_position(consumer.connection, "q", stored)
        if Position.parse(stored).tick > Position.parse(gdq.position(consumer.connection, "q", "far")).tick:
            # the last batch was stored, and not finished
            gdq.seek(consumer.connection, "q", "far", tick=Position.parse(stored).tick)
        for batch in consumer.batches():
            later = str(batch.position)
            with there.transaction():
                for table in batch.tables():
                    _copy(there, batch, table)
                moved = there.execute(
                    "update seen.position set position = %s where position = %s", [later, stored]
                ).rowcount
                if moved != 1:
                    raise SystemExit("another process has moved the position")
            stored = later
            batch.commit()


def _stored(there: Connection[Any]) -> str | None:
    row = there.execute("select position from seen.position").fetchone()
    return row and row[0]


def _copy(there: Connection[Any], batch: gdq.Batch, table: str) -> None:
    rows: list[Row] = []
    beats: list[int] = []
    for part in batch.arrow_batches(table):
        names = set(part.schema.names)
        born, died = part.column("new_label").to_pylist(), part.column("old_label").to_pylist()
        rows += [(table, one, other) for one, other in zip(born, died, strict=True)]
        if "new_region" in names:
            beats += [-region for region in part.column("new_region").to_pylist() if region is not None and region < 0]
        store(there, "far", rows, beats)


def mirror(source: str) -> None:
    """A copy of app.part in the same database, which is copied anew where changes were cut off."""
    with gdq.Consumer(source, "small", "mirror", max_events=10_000) as consumer:
        while True:
            try:
                for batch in consumer.batches():
                    _apply(consumer.connection, batch.events())
            except gdq.ResyncRequired as error:
                print(f"resync: {error}", flush=True)
            with contextlib.suppress(gdq.ResyncRequired), consumer.resync("app.part") as copy:
                consumer.connection.execute("truncate seen.part")
                _insert(consumer.connection, copy.rows())


def _apply(connection: Connection[Any], events: Iterator[gdq.Event]) -> None:
    rows: dict[tuple[int, int], dict[str, Any] | None] = {}
    for event in events:
        if event.old is not None:
            rows[event.old["id"], event.old["region"]] = None
        if event.new is not None:
            rows[event.new["id"], event.new["region"]] = event.new
    keys = list(rows)
    query = "delete from seen.part where (id, region) in (select * from unnest(%s::bigint[], %s::int[]))"
    connection.execute(query, [[key[0] for key in keys], [key[1] for key in keys]])
    _insert(connection, (row for row in rows.values() if row is not None))


def _insert(connection: Connection[Any], rows: Iterator[dict[str, Any]]) -> None:
    with connection.cursor().copy("copy seen.part (id, region, label, prev) from stdin") as copy:
        for row in rows:
            copy.write_row((row["id"], row["region"], row["label"], row["prev"]))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    if sys.argv[1] == "far":
        far(sys.argv[2], sys.argv[3])
    else:
        mirror(sys.argv[2])
