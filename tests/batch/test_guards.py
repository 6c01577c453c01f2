"""What each guard refuses, in little time: named by tests/support/mutants where no other fails without the guard."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import errors

from gdq.era import check_position, position
from gdq.errors import DivergedPosition
from tests.support.events import Tap
from tests.support.retry_shop import open_shop
from tests.support.server import Database

GET = "select count(*) from gdq.get_batch(%s, %s)"
FINISH = "select gdq.finish_batch(%s, %s)"


def passed(connection: psycopg.Connection[Any], sqlstate: str, calls: dict[str, Any]) -> list[str]:
    """The calls, with their values, that are not refused with this SQLSTATE."""
    through = []
    for call, values in calls.items():
        try:
            with connection.transaction(force_rollback=True):
                connection.execute(call.encode(), values)
        except psycopg.Error as error:
            if error.sqlstate != sqlstate:
                raise
        else:
            through.append(call)
    return through


def test_queue_of_another_cluster_stands_still(db: Database) -> None:
    with open_shop(db) as shop:
        shop.insert(1)
        batch = shop.opened()
        # as in a dump that was restored: the row is not of the transaction that it names
        shop.connection.execute("update gdq.era set started_at = started_at")
        calls = ["select gdq.force_tick('q')", "select gdq.ticker()", "select gdq.ticker('q')", "select gdq.maintain()"]
        calls += ["select gdq.next_batch('q', 'c')", "select gdq.seek('q', 'c', to_now => true)"]
        assert passed(shop.connection, "GDQ07", dict.fromkeys(calls) | dict.fromkeys((GET, FINISH), batch)) == []


def test_position_is_known_by_its_nonce(db: Database) -> None:
    """A server that lost its tail gives the number of a lost tick again."""
    with open_shop(db) as shop:
        shop.insert(1)
        kind, era, tick, nonce, snapshot = position(shop.connection, "q", "c").split("/")
        check_position(shop.connection, "q", f"{kind}/{era}/{tick}/{nonce}/{snapshot}")
        with pytest.raises(DivergedPosition):
            check_position(shop.connection, "q", f"{kind}/{era}/{tick}/{era}/{snapshot}")


def test_nobody_else_gets_a_batch(db: Database) -> None:
    """Neither by the consumer's name nor by a token from somebody's log."""
    with open_shop(db) as shop, db.connect("app") as app:
        shop.insert(1)
        shop.connection.execute("grant usage on schema gdq to app; grant execute on all functions in schema gdq to app")
        batch = shop.opened()
        calls = {"select gdq.next_batch('q', 'c')": None, GET: batch, FINISH: batch}
        assert passed(app, "42501", calls) == []
        assert shop.fresh(batch) != []


def test_rows_that_nobody_has_read_are_not_dropped_silently(tap: Tap) -> None:
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    tap.write("insert into t values (1)")
    with pytest.raises(errors.ObjectInUse, match='have not been read by "c"'):
        tap.owner.execute("select gdq.remove_table('q', 'shop.t')")
    tap.owner.execute("select gdq.remove_table('q', 'shop.t', force => true)")
    assert [(event.op, event.tbl) for event in tap.events()] == [("resync", "shop.t")]


def test_json_rows_are_read_as_what_they_were(tap: Tap) -> None:
    """Their text has no types: those of the version count."""
    tap.write("create table t (id int primary key, a int, b int)")
    tap.add("shop.t", format="json")
    tap.write("insert into t values (1, 2, 3)", "alter table t alter a type text", "insert into t values (4, '5', 6)")
    images = [event.new for event in tap.events() if event.op == "insert"]
    assert images == [{"id": 1, "a": 2, "b": 3}, {"id": 4, "a": "5", "b": 6}]
