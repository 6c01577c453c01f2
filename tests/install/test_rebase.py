"""What a rebase makes of members, retries and copies; the dumps and restores themselves are in test_era.py."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import errors

from gdq import dead_letters, replay_dead_letters
from gdq.era import rebase
from gdq.retry import retry_info
from gdq.table_copy import copy_table, resynced
from tests.support.retry_shop import RetryShop


@pytest.fixture
def shop(retry_shop: RetryShop) -> RetryShop:
    return retry_shop


def restore(shop: RetryShop, ahead: int = 0) -> None:
    """As after a restore: the row of the era is not of its transaction. `ahead`: how far the dump's numbers were."""
    shop.connection.execute("update gdq.era set started_at = started_at")
    for table in ("retry_event", "dead_letter"):
        shop.connection.execute(f"update gdq.{table} set ev_txid = ev_txid + {ahead}".encode())


def open_as(shop: RetryShop, member: str) -> tuple[int, str]:
    query = "select batch_id, token::text from gdq.next_batch('q', 'c', 1, member => %s)"
    batch: tuple[int, str] | None = shop.connection.execute(query, [member]).fetchone()
    assert batch
    return batch


def read_on(shop: RetryShop, member: str | None = None) -> list[tuple[str, Any]]:
    """All that comes from now on: op and key, or the message; and finish it."""
    shop.value("select gdq.force_tick('q')")
    query = "select batch_id, token from gdq.next_batch('q', 'c', member => %s)"
    seen = []
    while batch := shop.connection.execute(query, [member]).fetchone():
        rows = shop.connection.execute("select op, key->>'id', new->>'data' from gdq.get_batch(%s, %s)", batch)
        seen += [(op, key or data) for op, key, data in rows]
        shop.value("select gdq.finish_batch(%s, %s)", *batch)
    return seen


def copied(shop: RetryShop) -> None:
    with copy_table(shop.db.dsn, "orders") as copy:
        resynced(shop.connection, "q", "c", "orders", copy.snapshot)


def test_members_whose_batches_are_kept(crew: RetryShop) -> None:
    batches = [open_as(crew, member) for member in "ab"]
    restore(crew)
    assert {row.outcome for row in rebase(crew.connection, keep=True)} == {"kept"}
    for batch in batches:
        assert crew.refusal("select gdq.finish_batch(%s, %s)", *batch) == "GDQ01"
        assert crew.refusal("select * from gdq.get_batch(%s, %s)", *batch) == "GDQ01"
    crew.connection.execute("insert into orders values (3)")
    wanted = [("message", "m1"), ("insert", "1"), ("message", "m2"), ("insert", "2"), ("insert", "3")]
    assert read_on(crew, "a") == wanted
    assert read_on(crew, "b") == []


def test_members_that_finished_out_of_turn(crew: RetryShop) -> None:
    """Nothing is lost: what is kept of a batch that was finished before an older one comes again."""
    older, younger = [open_as(crew, member) for member in "ab"]
    assert crew.finish(younger)
    restore(crew)
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="finished batches before an older one"):
        rebase(crew.connection, keep=True)
    rebase(crew.connection)
    assert crew.refusal("select gdq.finish_batch(%s, %s)", *older) == "GDQ01"
    assert read_on(crew, "b") == [("message", "m1"), ("message", "m2"), ("resync", None)]


def put_all(shop: RetryShop, *keys: int, delay: str = "0") -> None:
    """Rows of which each waits to be retried."""
    shop.insert(*keys)
    batch = shop.opened()
    for key in keys:
        shop.put(batch, key, delay)
    shop.finish(batch)


def test_retries_that_are_kept_come_once(shop: RetryShop) -> None:
    put_all(shop, 1, 2)
    left = shop.opened()  # brings them
    restore(shop)
    rebase(shop.connection, keep=True)
    assert shop.refusal("select gdq.retry_event(%s, %s, 1)", *left) == "GDQ01"
    batch = shop.opened()
    assert [key for key, _, _ in shop.again(batch)] == [1, 2]
    shop.finish(batch)
    assert shop.open() is None


def test_retries_are_older_than_a_copy_of_the_new_era(shop: RetryShop) -> None:
    put_all(shop, 1, 2, delay="1 hour")
    shop.insert(3)
    batch = shop.opened()
    shop.connection.execute("select gdq.dead_letter(%s, %s, %s)", [*batch, shop.fresh(batch)[0][0]])
    shop.finish(batch)
    restore(shop, ahead=1_000_000)
    rebase(shop.connection)
    assert [info.key for info in retry_info(shop.connection, "q")] == [{"id": 1}, {"id": 2}]
    copied(shop)
    assert retry_info(shop.connection, "q") == []
    assert len(dead_letters(shop.connection, "q")) == 1
    replay_dead_letters(shop.connection, "q", "c")
    assert retry_info(shop.connection, "q") == []
    shop.connection.execute("insert into orders values (4)")
    assert read_on(shop) == [("insert", "4")]


def test_retries_that_a_copy_held_do_not_come_back(shop: RetryShop) -> None:
    put_all(shop, 1, 2, delay="1 hour")
    copied(shop)
    assert read_on(shop) == []
    restore(shop)
    rebase(shop.connection, keep=True)
    assert retry_info(shop.connection, "q") == []
    assert shop.open() is None
