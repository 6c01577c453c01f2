"""Mirrors that are killed for good at random moments, while the source is written to: no change is lost or repeated."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable

import psycopg
import pytest

from gdq.consumers.mirror.mirror import Mirror
from gdq.consumers.mirror.state import History
from tests.mirror.conftest import Lake, plain_rows
from tests.mirror.test_history import Replay

TABLES = ("public.keyed", "public.bare", "public.parts")
_SCHEMA = (
    "create table keyed (id int primary key, name text, n int)",
    "create table bare (n int)",
    "create table parts (id int primary key, n int) partition by hash (id)",
    "create table parts_0 partition of parts for values with (modulus 2, remainder 0)",
    "create table parts_1 partition of parts for values with (modulus 2, remainder 1)",
)
_CHANGES = (
    "insert into keyed select i, 'x', 0 from generate_series({0}, {0} + 20) i on conflict (id) do update set n = 1",
    "update keyed set id = -id where id between {0} and {0} + 5 and -id not in (select id from keyed)",
    "delete from keyed where id % 7 = {0} % 7",
    "insert into bare values ({0} % 5), ({0} % 5), (null)",
    "delete from bare where ctid in (select ctid from bare order by n limit 2)",
    "insert into parts select i, {0} from generate_series({0}, {0} + 3) i on conflict do nothing",
    "update parts set id = id + 1000, n = n + 1 where id = {0} and {0} + 1000 not in (select id from parts)",
)
_RARE = ("truncate bare", "truncate keyed", "alter table keyed add column if not exists c{0} int default {0}")
FORKS = multiprocessing.get_context("forkserver")


def follow(dsn: str, target: str, history: History | None, env: dict[str, str]) -> None:
    """Be a mirror, in a process of its own, until it is killed."""
    os.environ.update(env)
    with Mirror(dsn, "shop", "copy", target, ["public"], history=history) as mirror:
        for _ in mirror.run(once=False):
            pass


def write(connection: psycopg.Connection[tuple[object, ...]], choice: random.Random, over: threading.Event) -> None:
    """Change the tables until it is over."""
    with connection:
        while not over.is_set():
            some = choice.sample(_CHANGES, 3) if choice.random() < 0.97 else [choice.choice(_RARE)]
            with connection.transaction():
                for change in some:
                    connection.execute(change.format(choice.randrange(1, 200)).encode())
            time.sleep(0.002)


def kill_often(
    lake: Lake, choice: random.Random, history: History | None, check: Callable[[], None], rounds: int = 5
) -> None:
    """Kill mirrors while the source is written to; `check` after each few, when all changes are there."""
    words = ["public", "--name", "copy", *(["--history", history] if history else [])]
    lake.run(*_SCHEMA)
    lake.capture(*TABLES)
    lake.mirror(*words)
    for _ in range(rounds):
        over = threading.Event()
        writer = threading.Thread(target=write, args=(lake.source.connect(), choice, over))
        writer.start()
        try:
            for _ in range(4):
                process = FORKS.Process(target=follow, args=(lake.source.dsn, lake.target, history, lake.env))
                process.start()
                process.join(choice.uniform(0.3, 2.5))
                assert process.exitcode is None
                process.kill()
                process.join()
        finally:
            over.set()
            writer.join()
        lake.mirror(*words)
        check()


@pytest.mark.long
def test_killed_at_random(each: Lake) -> None:
    kill_often(each, random.Random(1), None, lambda: each.same(*TABLES))


@pytest.mark.long
@pytest.mark.parametrize("history", ["feed", "scd2"])
def test_histories_killed_at_random(lake: Lake, history: History) -> None:
    replay = Replay(lake, list(TABLES), history)

    def check() -> None:
        for table in TABLES:
            assert replay.replayed(table, 2**62) == plain_rows(lake.ask(f"select * from {table}"))

    kill_often(lake, random.Random(2), history, check)
