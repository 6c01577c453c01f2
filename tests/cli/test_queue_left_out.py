"""QUEUE may be left out where there is one queue, or be given by -q."""

from __future__ import annotations

import pytest

from tests.support.programs import gdq
from tests.support.server import Database

# For each command its arguments without QUEUE, and what it says.
COMMANDS = [
    (["add-table", "orders"], "added table public.orders to orders\n"),
    (["add-table", "--all"], "already captured: public.orders in orders\nadded table public.items to orders\n"),
    (["alter-table", "orders", "--exclude", "note"], "altered capture of orders in orders\n"),
    (["register-consumer", "c"], "registered consumer c on orders\n"),
    (["set-tables", "c", "items"], "changed tables of c on orders\n"),
    (["set-tables", "c", "--all"], "changed tables of c on orders\n"),
    (["pause"], "paused queue orders\n"),
    (["resume"], "resumed queue orders\n"),
    (["set-queue", "max_bytes=1000000000"], "changed queue orders\n"),
    (["tick"], ""),
    (["consume", "c", "--once"], ""),
    (["peek"], ""),
    (["set-retry-limit", "c", "3"], "events of c on orders are retried 3 times\n"),
    (["retries"], ""),
    (["dead-letters"], ""),
    (["purge-dead-letters", "c", "--all"], "purged 0 of c on orders\n"),
    (["position", "c"], ""),
    (["insert-event", "paid", "{}"], ""),
    (["add-sequence", "public.numbers"], "added sequence public.numbers to orders\n"),
    (["create-view", "v", "--sql", "-", "--target", "public.v"], "created view v: pushdown\n"),
    (["drop-view", "v"], "dropped view v\n"),
    (["unregister-consumer", "c"], "unregistered consumer c from orders\n"),
    (["remove-table", "orders"], "removed table orders from orders\n"),
]


@pytest.fixture
def shop(db: Database) -> Database:
    """A queue, a table and a consumer may have one name."""
    with db.connect() as connection:
        connection.execute(
            """create table orders (id int primary key, note text); create table items (id int primary key);
               create sequence numbers; select gdq.create_queue('orders')"""
        )
    return db


@pytest.mark.long
def test_the_only_queue(shop: Database) -> None:
    for arguments, says in COMMANDS:
        done = gdq(*arguments, dsn=shop.dsn, stdin="select id from items")
        assert done.returncode == 0, (arguments, done.stderr)
        assert done.stderr == says or "view" in arguments[0], arguments


@pytest.mark.long
def test_one_line_where_there_is_none_or_more_than_one(shop: Database) -> None:
    assert gdq("create-queue", "more", dsn=shop.dsn).returncode == 0
    for arguments in (["tick"], ["add-table", "items"], ["create-view", "v", "--sql", "-", "--target", "public.v"]):
        done = gdq(*arguments, dsn=shop.dsn, stdin="select id from items")
        said = "Error: name the queue: there are more, orders\nHint: Give it first, or by -q.\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    for queue in ("more", "orders"):
        assert gdq("drop-queue", queue, dsn=shop.dsn).returncode == 0
    done = gdq("tick", dsn=shop.dsn)
    assert (done.returncode, done.stderr) == (2, "Error: there is no queue\nHint: gdq create-queue makes one.\n")
    assert gdq("drop-queue", dsn=shop.dsn).returncode == 2


def test_a_queue_by_its_option(shop: Database) -> None:
    """Every argument is then one of those after QUEUE; the first argument is QUEUE where there are enough."""
    assert gdq("create-queue", "more", dsn=shop.dsn).returncode == 0
    done = gdq("add-table", "orders", "items", "-q", "more", dsn=shop.dsn)
    assert done.stderr == "added table public.orders to more\nadded table public.items to more\n"
    done = gdq("add-table", "orders", "items", dsn=shop.dsn)
    assert done.stderr == "added table public.items to orders\n"
    done = gdq("tick", "--queue", "mroe", dsn=shop.dsn)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == 'Error: queue "mroe" does not exist'
    assert done.stderr.splitlines()[1].endswith("Did you mean the queue more?")
