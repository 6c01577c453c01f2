"""A database in SQL_ASCII may hold text that is no UTF-8, which the server sends nobody: the cure of the docs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.programs import gdq
from tests.support.server import Database

pytestmark = pytest.mark.server


@pytest.fixture
def untold(db: Database) -> Iterator[Database]:
    """A database whose encoding says nothing."""
    name = f"{db.name}_ascii"
    with db.connect("su") as su:
        made = f"create database {name} owner gdq_owner encoding 'SQL_ASCII' locale 'C' template template0"
        su.execute(made.encode())
        try:
            yield replace(db, name=name)
        finally:
            su.execute(f"drop database {name} with (force)".encode())


@pytest.mark.long
def test_bytes_that_are_no_utf8(untold: Database) -> None:
    assert gdq("install", dsn=untold.su_dsn).returncode == 0
    with untold.connect("su") as su:
        su.execute("select gdq.create_queue('q'); create table t (id int primary key, v text, w text)")
        su.execute("select gdq.add_table('q', 't')")
        su.execute("select gdq.register_consumer('q', 'c')")
        su.execute("set client_encoding = 'SQL_ASCII'")
        su.execute(b"insert into t values (1, 'good'), (2, E'\\xe9')")
        refused = gdq("consume", "q", "c", "--once", dsn=untold.su_dsn)
        assert refused.stderr.startswith("Error: invalid byte sequence for encoding")
        assert "`gdq docs guarantees` says under Encoding" in refused.stderr
        su.execute("update t set v = convert_from(convert(v::bytea, 'LATIN1', 'UTF8'), 'SQL_ASCII') where id = 2")
        assert gdq("seek", "q", "c", "--now", dsn=untold.su_dsn).returncode == 0
        assert gdq("alter-table", "q", "public.t", "--exclude", "w", dsn=untold.su_dsn).returncode == 0
        su.execute(b"insert into t values (3, 'new', E'\\xe9')")
        read = gdq("consume", "q", "c", "--once", dsn=untold.su_dsn)
        assert read.returncode == 0, read.stderr
        events = [json.loads(line) for line in read.stdout.splitlines()]
        assert [event["new"] for event in events if event["op"] == "insert"] == [{"id": 3, "v": "new"}]
        assert su.execute("select count(*) from t where v = convert_from('\\xc3a9', 'SQL_ASCII')").fetchone() == (1,)
