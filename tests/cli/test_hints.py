"""What a command says beside its error: the name or the command that was meant, and the way on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import gdq
from tests.support.server import Database


@pytest.fixture
def shop(db: Database) -> Database:
    """A queue q that captures two tables, with the consumer c."""
    with db.connect() as connection:
        connection.execute(
            """create table orders (id int primary key, status text not null, total numeric(10,2));
               create table log (line text)"""
        )
        connection.execute("select gdq.create_queue('q')")
        connection.execute("select gdq.add_table('q', 'orders'), gdq.add_table('q', 'log')")
        connection.execute("select gdq.register_consumer('q', 'c')")
    return db


MISSPELT = [
    (["tick", "Q1"], "queue q"),
    (["add-table", "q", "ordres"], "table orders"),
    (["consume", "q", "cc", "--once"], "consumer c"),
    (["seek", "q", "cc", "--now"], "consumer c"),
    (["view-history", "totl"], "view total"),
    (["refresh", "total", "totla"], "view total"),
    (["verify-view", "totalls"], "view total"),
    (["alter-group", "alls", "--add", "total"], "group all"),
    (["add-sequence", "q", "public.numbr"], "sequence public.number"),
    (["add-table", "q", "film"], "table store.film"),
    (["add-table", "q", "public.flim"], "table store.film"),
    (["add-table", "q", "store.Order Line"], 'table store."Order Line"'),
]


@pytest.mark.long
def test_misspelt_names_are_put_right(shop: Database) -> None:
    """Where the server says that something is missing, the hint ends with the name that is nearest."""
    with shop.connect() as connection:
        connection.execute("create sequence number; create schema store; create table store.film (id int)")
        connection.execute('create table store."Order Line" (id int)')
    query = "select id, count(*) from orders group by id"
    made = ["create-view", "total", "--queue", "q", "--sql", "-", "--target", "public.total"]
    assert gdq(*made, dsn=shop.dsn, stdin=query).returncode == 0
    assert gdq("create-group", "all", "total", dsn=shop.dsn).returncode == 0
    for arguments, meant in MISSPELT:
        done = gdq(*arguments, dsn=shop.dsn)
        assert (done.returncode, done.stdout) == (1, ""), arguments
        assert done.stderr.splitlines()[-1].endswith(f"Did you mean the {meant}?"), done.stderr
        assert done.stderr.splitlines()[-1].startswith("Hint: ")


def test_hints_name_commands(shop: Database) -> None:
    done = gdq("consume", "q", "nobody", "--once", dsn=shop.dsn)
    assert done.stderr.splitlines()[1] == "Hint: Register it with gdq register-consumer."
    done = gdq("tick", "nothing-like-it", dsn=shop.dsn)
    assert done.stderr.splitlines()[1] == "Hint: List the queues with gdq queues, make one with gdq create-queue."


def test_what_was_given_in_place_of_the_queue_is_told(shop: Database) -> None:
    for arguments, told in ((["add-table", "orders", "log"], "orders is a table"), (["peek", "c"], "c is a consumer")):
        done = gdq(*arguments, dsn=shop.dsn)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].endswith(f"{told}: give the queue first, or by -q.")


def test_a_name_that_needs_quotes(shop: Database) -> None:
    done = gdq("add-table", "q", "My Table", dsn=shop.dsn)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Hint: Put names with spaces or capitals in double quotes")


def test_hints_name_the_way_on(shop: Database, tmp_path: Path) -> None:
    query = tmp_path / "v.sql"
    query.write_text("select id from orders")
    for target in ("deltaa:/x", "orders_copy"):
        done = gdq("create-view", "v", "--queue", "q", "--sql", str(query), "--target", target, dsn=shop.dsn)
        first, hint = done.stderr.splitlines()
        assert first.startswith(f"Error: target '{target}'")
        assert hint.startswith("Hint: Write schema.table, delta:/folder")
    assert "gdq alter-table" in gdq("add-table", "q", "orders", "--mode", "pk", dsn=shop.dsn).stderr
