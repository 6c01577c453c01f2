"""Handlers for `gdq consume`: each change goes to the consumer's own table, as a version that was born or died."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from psycopg import Connection, sql

from gdq.retry import Retry, RetryOutcome
from gdq.source import Event

_ROWS = 5000
_RETRY_EVERY = 200

Row = tuple[str | None, int | None, int | None]


def versions_of(event: Event) -> Row:
    """Table, label of the version that a change made, label of the version that it ended."""
    born = None if event.new is None else event.new["label"]
    died = None if event.old is None else event.old["label"]
    return event.table, born, died


def beat_of(event: Event) -> int | None:
    """The number of a beat: rows with a region below zero."""
    region = (event.new or {}).get("region")
    return -region if region is not None and region < 0 else None


def store(connection: Connection[Any], consumer: str, rows: list[Row], beats: list[int]) -> None:
    """Add to the tables of a consumer, and forget what was added."""
    if rows:
        into = sql.SQL("copy {} (tbl, born, died) from stdin").format(sql.Identifier("seen", consumer))
        with connection.cursor().copy(into) as copy:
            for row in rows:
                copy.write_row(row)
    for beat in beats:
        connection.execute("insert into seen.beat (consumer, beat) values (%s, %s)", [consumer, beat])
    rows.clear()
    beats.clear()


def _take(connection: Connection[Any], consumer: str, events: Iterable[Event]) -> None:
    rows: list[Row] = []
    beats: list[int] = []
    for event in events:
        if event.op not in ("insert", "update", "delete"):
            continue
        rows.append(versions_of(event))
        beat = beat_of(event)
        if beat is not None:
            beats.append(beat)
        if len(rows) >= _ROWS:
            store(connection, consumer, rows, beats)
    store(connection, consumer, rows, beats)


def same(connection: Connection[Any], events: Iterator[Event]) -> None:
    """The consumer in the same database."""
    _take(connection, "same", events)


def slot(connection: Connection[Any], events: Iterator[Event]) -> None:
    """The reader of a logical slot."""
    _take(connection, "slot", events)


def crew(connection: Connection[Any], events: Iterator[Event]) -> list[RetryOutcome]:
    """The members: some changes are put aside when they come for the first time."""
    aside: list[RetryOutcome] = []

    def kept() -> Iterator[Event]:
        for event in events:
            _, born, died = versions_of(event)
            if not event.retries and (born or died or 0) % _RETRY_EVERY == 0 and beat_of(event) is None:
                aside.append(Retry("later", delay=timedelta(seconds=1), event=event))
            else:
                yield event

    _take(connection, "crew", kept())
    return aside
