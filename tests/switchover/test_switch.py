"""`gdq switchover` moves the application's writes to the target and back, and the other side follows each time."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from gdq.consumers.switchover.switch import SwitchOptions, switch_steps
from gdq.errors import GdqError
from tests.support.programs import start_gdq
from tests.support.server import Database
from tests.support.waiting import until
from tests.switchover.conftest import Pair

pytestmark = pytest.mark.server


def switch(pair: Pair, *options: str, back: bool = False) -> dict[str, Any]:
    """Switch, with success; what the command tells."""
    [told] = json.loads(pair.done("switchover", "--json", *(["--back"] if back else []), *options).stdout)
    return dict(told)


def refused(pair: Pair, place: Database, statement: str) -> psycopg.Error:
    """The error of a statement that the fence refuses."""
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction) as caught:
        pair.run(place, statement)
    return caught.value


def equal(pair: Pair) -> None:
    for table in ("orders", "lines"):
        query = f"select t::text from {table} t order by 1"
        assert pair.rows(pair.old, query) == pair.rows(pair.new, query)


def test_there_and_back(pair: Pair) -> None:
    pair.open_shop()
    unprepared = pair.gdq("switchover")
    assert unprepared.stderr.startswith("Error: the databases are not prepared for the switchover")
    pair.done("switchover", "--prepare")
    assert pair.obstacles() == []

    # the replica passes the fence, its writes are no changes of the target's queue, and the application does not pass
    pair.run(pair.old, "update orders set n = n + 1", "truncate lines", "insert into lines values (1, 1, 'x')")
    pair.done("replicate")
    equal(pair)
    echo = "select sum(events) from gdq.table_info('shop')"
    assert pair.rows(pair.new, echo) == [(0,)]
    error = refused(pair, pair.new, "delete from lines")
    assert "table public.lines takes no writes here: the application writes to" in str(error)

    pair.run(pair.old, "select nextval('orders_id_seq') from generate_series(1, 50)", "update orders set n = n + 1")
    told = switch(pair, "--compare")
    assert (told["tables"], told["writes_at"].rpartition("/")[2]) == (2, pair.new.name)
    assert told["pause_seconds"] > 0
    print(f"pause: {told['pause_seconds']} s")
    equal(pair)
    for statement in ("insert into orders (n) values (1)", "update lines set note = 'y'", "truncate lines"):
        assert f"{pair.new.name}" in str(refused(pair, pair.old, statement))
    assert pair.rows(pair.new, "insert into orders (n) values (1) returning id") == [(151,)]
    pair.run(pair.new, "delete from lines", "alter table lines add flag boolean")
    assert pair.gdq("replicate").stderr.startswith("Error: the application writes to this target (since the switch of")
    captured = pair.rows(pair.old, echo)
    pair.done("replicate", back=True)
    equal(pair)
    assert pair.rows(pair.old, echo) == captured, "what the replica writes back is no change of the old queue"
    # again: it is done
    assert switch(pair)["pause_seconds"] is None

    assert switch(pair, back=True)["writes_at"].rpartition("/")[2] == pair.old.name
    assert pair.rows(pair.old, "insert into orders (n) values (2) returning id") == [(152,)]
    refused(pair, pair.new, "delete from orders")
    pair.done("replicate")
    equal(pair)
    assert switch(pair)["writes_at"].rpartition("/")[2] == pair.new.name

    pair.done("switchover", "--end", "--back")
    pair.run(pair.old, "delete from orders where id = 1")
    assert pair.rows(pair.old, "select from pg_trigger where tgname = '!gdq_fence'") == []


def test_a_sequence_with_a_percent_sign(pair: Pair) -> None:
    pair.open_shop()
    for place in (pair.old, pair.new):
        pair.run(place, 'create sequence "disc%_s"')
    pair.run(pair.old, "select gdq.add_sequence('shop', '\"disc%_s\"')", "select nextval('\"disc%_s\"')")
    pair.done("switchover", "--prepare")
    switch(pair, "--max-pause", "3000000")  # longer than the server's timeouts
    assert pair.rows(pair.new, "select nextval('\"disc%_s\"')") == [(2,)]


def test_a_table_that_is_made_while_writers_wait(pair: Pair) -> None:
    pair.open_shop()
    pair.run(pair.old, "select gdq.add_new_tables('shop', '{public.*}')")
    pair.done("switchover", "--prepare")
    steps = switch_steps(pair.old.su_dsn, pair.new.su_dsn, "shop", "mirror", SwitchOptions())
    while next(steps) != "reverse registered":
        pass
    pair.run(pair.old, "create table late (id int primary key)", "insert into late values (1)")
    with pytest.raises(GdqError, match="takes other tables than before: nothing was changed"):
        next(steps)
    # writers go on where they were, and the next switch brings the table
    pair.run(pair.old, "insert into late values (2)", "insert into orders (n) values (7)")
    pair.done("replicate", "--create")
    pair.done("switchover", "--prepare")
    switch(pair)
    assert pair.rows(pair.new, "select id from late order by 1") == [(1,), (2,)]


def test_what_keeps_from_switching(pair: Pair) -> None:
    pair.open_shop()
    pair.done("switchover", "--prepare")
    pair.run(pair.old, "create table log (id int primary key)")
    found = pair.gdq("switchover")
    assert (found.returncode, "public.log" in found.stdout) == (3, True)
    pair.run(pair.old, "drop table log")

    with pair.old.connect() as writer:
        writer.execute("begin")
        writer.execute("insert into orders (n) values (1)")
        held = pair.gdq("switchover", "--wait", "0.5")
        assert f"writers hold the tables: pid {writer.info.backend_pid}" in held.stderr
        writer.execute("commit")

    follower = start_gdq("replicate", "shop", "mirror", "--to", pair.new.su_dsn, "--follow", dsn=pair.old.su_dsn)
    try:
        until(lambda: "replica_running" in {code for code, _ in pair.codes()}, "the follower")
        assert "a program applies changes" in pair.gdq("switchover").stderr
    finally:
        follower.terminate()
        follower.communicate()

    with pair.new.connect("su") as su:
        su.execute("set session_replication_role = replica")
        su.execute("delete from lines where id = 1")
    assert "Error: tables differ: public.lines; nothing was changed" in pair.gdq("switchover", "--compare").stderr
    # the old database takes writes after each of these, and the new one none
    pair.run(pair.old, "insert into orders (n) values (1)")
    refused(pair, pair.new, "delete from orders")
    pair.done("repair-tables")
    switch(pair, "--compare", "--no-fence")
    pair.run(pair.old, "insert into orders (n) values (1)")
