"""Checks of capture that run while DDL commits: what event triggers have followed is no fault."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.events import Tap

pytestmark = [pytest.mark.server, pytest.mark.long]

ROUNDS = 150


def test_ddl_beside_checks_leaves_capture_on(tap: Tap) -> None:
    ended = threading.Event()

    def check() -> int:
        found = 0
        with tap.db.connect(autocommit=True) as connection:
            while not ended.is_set():
                found += connection.execute("select gdq.check_tables('q')").fetchone() != (0,)
        return found

    def alter(table: str) -> None:
        with tap.db.connect(autocommit=True) as connection:
            for number in range(ROUNDS):
                for statement in (
                    f"alter table {table} add column c{number} int",
                    f"create table {table}_x partition of {table} for values from (200) to (300)",
                    f"alter table {table} detach partition {table}_x",
                    f"drop table {table}_x",
                    f"alter table {table} drop column c{number}",
                ):
                    connection.execute(statement.encode())

    tables = ["public.one", "public.two"]
    for table in tables:
        tap.owner.execute(f"create table {table} (id int primary key) partition by range (id)".encode())
        tap.add(table)
    with ThreadPoolExecutor() as pool:
        checks = [pool.submit(check) for _ in range(2)]
        for done in [pool.submit(alter, table) for table in tables]:
            done.result()
        ended.set()
        assert [one.result() for one in checks] == [0, 0]
    assert tap.owner.execute("select count(*) from gdq.resync where kind = 'disarmed'").fetchone() == (0,)
