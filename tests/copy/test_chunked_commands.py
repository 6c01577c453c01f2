"""Copies in chunks by commands: `gdq add-table --backfill` and `gdq snapshot --chunked`."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from gdq import check_position, connect
from tests.copy import test_chunked_copy
from tests.copy.test_chunked_copy import TABLES, Places
from tests.support.programs import gdq, start_gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server

places = test_chunked_copy.places


def test_backfill_that_is_killed_goes_on(places: Places) -> None:
    places.tap.write("insert into shop.t select i, 'k', 0, 0 from generate_series(2000, 90000) i", "analyze shop.t")
    command = ["add-table", "q", *TABLES, "--backfill", places.target.su_dsn, "--register", "mirror"]
    kept = "select sum(row_count), bool_and(arrived) from gdq_target.chunked_copy"
    reached = 0
    with places.target.connect("su") as su:
        for _ in range(2):
            running = start_gdq(*command, dsn=places.tap.db.dsn)

            def came_on(reached: int = reached) -> bool:
                places.write()
                there = su.execute("select to_regclass('gdq_target.chunked_copy')").fetchone() != (None,)
                rows, arrived = su.execute(kept).fetchone() or (0, False) if there else (0, False)
                return bool(arrived or (rows or 0) > reached)

            until(came_on, "a chunk")
            running.kill()
            running.communicate()
            [(rows, _)] = su.execute(kept).fetchall()
            assert rows > reached
            reached = rows

        def again() -> bool:
            done = gdq(*command, dsn=places.tap.db.dsn)
            if "another session is at work" in done.stderr:  # the server has not yet noticed the end of the killed one
                return False
            assert done.returncode == 0, done.stderr
            assert "mirror of q gets every change after snapshot" in done.stderr
            return True

        until(again, "the end of the copy")
    assert "copied before: " in gdq(*command, dsn=places.tap.db.dsn).stderr
    places.check()


def test_snapshot_in_chunks(places: Places) -> None:
    """Tables are made, a finished copy is left alone, and --anew copies again."""
    with places.target.connect("su") as su:
        su.execute("drop schema shop cascade")
    command = ["snapshot", *TABLES, "--to", places.target.su_dsn, "--create", "-q", "q", "--register", "mirror"]
    command += ["--chunked", "--json"]
    copied = {}
    for run, more in (("first", []), ("again", []), ("anew", ["--anew"])):
        done = gdq(*command, *more, dsn=places.tap.db.dsn)
        assert done.returncode == 0, done.stderr
        copied[run] = json.loads(done.stdout)
        places.write()
    assert [one["done_before"] for one in copied.values()] == [False, True, False]
    assert {table["table_name"]: table["rows"] for table in copied["first"]["tables"]} == {"shop.t": 50, "shop.u": 20}
    assert copied["first"]["position"] == copied["again"]["position"] != copied["anew"]["position"]
    with connect(places.tap.db.dsn) as connection:
        check_position(connection, "q", copied["anew"]["position"])
    places.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--truncate", "--as-text", "b"], "--truncate, --as-text cannot go with --chunked"),
        (["--where", "true", "--register", "c"], "--where cannot go with --chunked"),
        ([], "--chunked needs -q QUEUE and --register CONSUMER"),
        (["--to", "parquet:copy"], "--chunked needs a database"),
    ],
)
def test_options_of_snapshot_in_chunks(places: Places, options: list[str], message: str) -> None:
    command = ["snapshot", "shop.t", "--to", places.target.su_dsn, "-q", "q", "--chunked"]
    done = gdq(*command, *options, dsn=places.tap.db.dsn)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def _begun(su: psycopg.Connection[Any]) -> bool:
    """True if a part of the copy is in the target."""
    if su.execute("select to_regclass('gdq_target.chunked_copy')").fetchone() == (None,):
        return False
    return su.execute("select from gdq_target.chunked_copy where row_count > 0").rowcount > 0


def test_a_column_that_comes_while_a_copy_is_interrupted(places: Places) -> None:
    """The copy starts again, and the error has the statement that the target's table lacks."""
    places.tap.write("insert into shop.t select i, 'k', 0, 0 from generate_series(2000, 90000) i", "analyze shop.t")
    with places.target.connect("su") as su:
        su.execute("drop schema shop cascade")
    command = ["snapshot", *TABLES, "--to", places.target.su_dsn, "--create", "-q", "q", "--register", "mirror"]
    running = start_gdq(*command, "--chunked", dsn=places.tap.db.dsn)
    with places.target.connect("su") as su:
        until(lambda: running.poll() is not None or _begun(su), "a chunk")
        running.kill()
        running.communicate()
        places.tap.write('alter table shop.t add column "More" int default 5')
        told = ""

        def again() -> bool:
            nonlocal told
            told = gdq(*command, "--chunked", dsn=places.tap.db.dsn).stderr
            return "another session is at work" not in told  # the server notices the end of the killed one

        until(again, "the end of the killed one")
        assert "Error: target table shop.t lacks column More of table shop.t" in told
        added = 'alter table shop.t add column "More" integer'
        assert f"Hint: Say there: {added}; then run the copy again: it goes on." in told
        su.execute(added.encode())
    assert gdq(*command, "--chunked", dsn=places.tap.db.dsn).returncode == 0
    places.check()


def test_backfill_options(places: Places) -> None:
    for given in (["--backfill", places.target.su_dsn], ["--register", "mirror"]):
        done = gdq("add-table", "q", "shop.t", *given, dsn=places.tap.db.dsn)
        assert done.returncode == 2
        assert "--backfill CONNINFO and --register CONSUMER go together" in done.stderr
