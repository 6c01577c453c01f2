"""A replica is equal to its source whatever was killed meanwhile: the program, or its sessions on either side."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.replica.conftest import Pair
from tests.support.programs import start_gdq
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = pytest.mark.server

_CHANGE = """
insert into item select 100 + i, i, i from generate_series(%(n)s, %(n)s + 4) i
    on conflict (id) do update set n = item.n + 1;
update item set n = n + 1, place = -place - 1 where id %% 7 = %(n)s %% 7;
delete from item where id %% 11 = %(n)s %% 11;
update detail set n = n + 1 where id %% %(part)s = %(n)s %% %(part)s"""

_SESSIONS = """
select pid from pg_stat_activity
 where datname = current_database() and application_name like any ('{gdq:shop/mirror%,gdq:slot gdq_shop_mirror%}')"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fed", "seed", "options"),
    [
        ("queue", 1, ()),
        ("queue", 2, ()),
        ("slot", 3, ()),
        ("queue", 4, ("--apply-workers", "2")),
        ("queue", 5, ("--apply-workers", "3")),
    ],
    indirect=["fed"],
)
def test_killed_at_random(fed: Pair, seed: int, options: tuple[str, ...]) -> None:
    pair, chance = fed, random.Random(seed)
    pair.make("create table item (id int primary key, place int, n int)")
    pair.make("create table detail (id int primary key, n int)")
    pair.run("insert into item select i, i, i from generate_series(1, 500) i")
    pair.run("insert into detail select i, i from generate_series(1, 20000) i")
    pair.capture("item", "detail")
    done = threading.Event()
    # a slot's reader is slower than a writer without triggers
    part = 3 if pair.fed_by == "queue" else 200

    def write() -> None:
        number = 0
        with pair.source.connect() as connection:
            while not done.is_set():
                number += 1
                if number % 40 == 0:
                    connection.execute("truncate item")
                for statement in (_CHANGE % {"n": number, "part": part}).split(";"):
                    connection.execute(statement.encode())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            given = ("replicate", "shop", "mirror", "--to", pair.target.su_dsn, "--source", pair.fed_by, "--follow")
            follower = start_gdq(*given, *options, dsn=pair.reader_dsn)
            try:
                for victim in chance.choices([pair.source, pair.target], k=4):
                    stood = _position(pair)
                    until(lambda: follower.poll() is not None or _position(pair) != stood, "a batch")  # noqa: B023
                    time.sleep(chance.uniform(0, 0.3))  # any moment of the batches after it
                    _end_sessions(victim, chance)
            finally:
                follower.kill()
                told = [line for line in follower.communicate()[1].splitlines() if line.startswith("Error")]
            assert [line for line in told if "connection" not in line] == []
    finally:
        done.set()
        writer.join()
    pair.apply()
    pair.same("item", "detail")


def _position(pair: Pair) -> object:
    """Where the replica stands; None before it has begun."""
    with pair.target.connect("su") as su:
        if su.execute("select from pg_class where relname = 'replica_table'").rowcount == 0:
            return None
        return su.execute("select position from gdq_target.replica").fetchone()


def _end_sessions(victim: Database, chance: random.Random) -> None:
    """End the replica's sessions in a database: all of them, or any one."""
    with victim.connect("su") as su:
        sessions = [pid for (pid,) in su.execute(_SESSIONS).fetchall()]
        for pid in sessions if not sessions or chance.random() < 0.5 else [chance.choice(sessions)]:
            su.execute("select pg_terminate_backend(%s)", [pid])
