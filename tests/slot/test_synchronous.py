"""A server that takes the reader of a slot for a synchronous standby: its commits wait for nobody for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import psycopg
import pytest

from gdq.consumers.slot.source import SlotSource
from gdq.errors import GdqError
from tests.support.server import Database
from tests.support.waiting import until


@contextmanager
def standbys(server: psycopg.Connection[Any], names: str) -> Iterator[None]:
    """The setting, until the end of the block."""

    def reload(*expected: str) -> None:
        server.execute("select pg_reload_conf()")
        until(lambda: server.execute("show synchronous_standby_names").fetchone() == expected)

    server.execute(f"alter system set synchronous_standby_names = '{names}'".encode())
    try:
        reload(names)
        yield
    finally:
        server.execute("alter system reset synchronous_standby_names")
        reload("")


def test_a_reader_at_work(db: Database, su: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and writers that waited for it go on once others are asked for."""
    monkeypatch.setattr("gdq.consumers.slot.source._PUBLICATION_SECONDS", 0.2)
    ended: list[BaseException] = []
    seen: list[int] = []

    def read() -> None:
        try:
            with SlotSource(db.su_dsn, "q", "c") as source:
                for batch in source.batches():
                    for event in batch.events():
                        assert event.new
                        source.connection.execute("insert into copied values ('slot', %s)", [event.new["id"]])
                        seen.append(event.new["id"])
        except GdqError as error:
            ended.append(error)

    reader = Thread(target=read)
    reader.start()
    su.execute("insert into item (id) values (1)")
    until(lambda: seen == [1])
    with db.connect("su") as control:
        # at the moment of its own commit, too
        writer = Thread(target=lambda: su.execute("insert into item (id) values (2)"))
        with standbys(control, "*"):
            writer.start()
            reader.join(60)
            assert not reader.is_alive()
            assert "takes the reader of slot gdq_q_c for a synchronous standby" in str(ended[0])
        writer.join()
    with SlotSource(db.su_dsn, "q", "c") as source:
        rest = [event.new["id"] for batch in source.batches(once=True) for event in batch.events() if event.new]
    assert seen + rest == [1, 2]


def test_a_batch_that_is_open_when_the_setting_comes(db: Database, su: psycopg.Connection[Any]) -> None:
    """Its commit does not wait for the reader itself."""
    su.execute("insert into item (id) values (1)")
    with SlotSource(db.su_dsn, "q", "c") as source, db.connect("su") as control:
        batches = source.batches()
        batch = next(batches)
        with standbys(control, "*"):
            source.connection.execute("set statement_timeout = '30s'")
            batch.commit()
            assert batch.finished
        batches.close()


@pytest.mark.parametrize("names", ["*", "FIRST 1 (a, *)", 'ANY 2 ("*", b)'])
def test_no_reader_begins(db: Database, su: psycopg.Connection[Any], names: str) -> None:
    with (
        db.connect("su") as control,
        standbys(control, names),
        db.connect("su", options="-c synchronous_commit=local") as own,
        pytest.raises(GdqError, match="synchronous_standby_names has"),
    ):
        SlotSource(own, "q", "c")


def test_named_standbys(db: Database, su: psycopg.Connection[Any]) -> None:
    """A name is no reader's."""
    su.execute("insert into item (id) values (1)")
    with (
        db.connect("su") as control,
        standbys(control, "FIRST 1 (a)"),
        db.connect("su", options="-c synchronous_commit=local") as own,
        SlotSource(own, "q", "c") as source,
    ):
        ids = [event.new["id"] for batch in source.batches(once=True) for event in batch.events() if event.new]
    assert ids == [1]
