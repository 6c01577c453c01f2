"""Commands of gdq take the table before capture's own lock: DDL holds the table when it comes to ask for that."""

from __future__ import annotations

import threading

import psycopg
import pytest

from tests.support.events import Tap
from tests.support.guarded import state
from tests.support.waiting import SECONDS, until

COMMANDS = {
    "alter options": "select gdq.alter_table_options('q', 'shop.t', '{\"mode\": \"pk\"}')",
    "add to another queue": "select gdq.add_table('second', 'shop.t')",
    "remove": "select gdq.remove_table('q', 'shop.t')",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_ddl_is_followed_while_a_command_waits_for_the_table(tap: Tap, command: str) -> None:
    """Were it the other way round, the DDL would find the lock taken, and capture would be switched off."""
    tap.write("create table t (id int primary key, a int)")
    tap.add("shop.t")
    tap.owner.execute("select gdq.create_queue('second')")
    errors: list[psycopg.Error] = []

    def wait_for_the_table() -> None:
        with tap.db.connect() as waiting:
            try:
                waiting.execute(COMMANDS[command].encode())
            except psycopg.Error as error:
                errors.append(error)

    thread = threading.Thread(target=wait_for_the_table)
    with tap.app.transaction():
        tap.write("lock table t in access exclusive mode")
        thread.start()
        waits = "select from pg_locks where relation = 'shop.t'::regclass and not granted"
        until(lambda: not thread.is_alive() or tap.owner.execute(waits.encode()).rowcount, pause=0)
        tap.write("alter table t rename a to b")
        thread.join(SECONDS)
    assert [error.sqlstate for error in errors] in ([], ["55P03"])
    tap.write("insert into t (id, b) values (1, 2)")
    assert state(tap) == ("ok", None)
    assert [e.op for e in tap.events() if e.op != "resync"] == ["ddl", "insert"]
