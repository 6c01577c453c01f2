"""A partition that is captured by itself, and comes under a captured root and away again."""

from __future__ import annotations

import psycopg
import pytest

from tests.support.events import Tap, drain
from tests.support.guarded import maintain, state
from tests.support.waiting import until

SNAPSHOT = "select gdq.resynced('q', 'c', 'shop.leaf', pg_current_snapshot())"


@pytest.fixture
def parted(tap: Tap) -> Tap:
    tap.write(
        "create table root (id int) partition by list (id)",
        "create table r0 partition of root for values in (0)",
        "create table leaf (id int)",
    )
    tap.add("shop.root")
    tap.add("shop.leaf")
    return tap


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_detached_partition_is_captured_by_itself_again(parted: Tap, isolation: str) -> None:
    parted.write(
        f"set default_transaction_isolation = '{isolation}'",
        "alter table root attach partition leaf for values in (1)",
        "insert into root values (1)",
        "alter table root detach partition leaf",
    )
    if isolation == "repeatable read":
        maintain(parted)  # looks at partitions in its place
    else:
        with pytest.raises(psycopg.Error) as refused:
            parted.owner.execute(SNAPSHOT)
        assert refused.value.sqlstate in ("GDQ03", "GDQ02")
        maintain(parted)
    drain(parted.db)
    parted.owner.execute(SNAPSHOT)
    parted.write("insert into leaf values (1)", "truncate leaf")
    assert [(row[3], row[4]) for row in drain(parted.db)] == [("insert", "shop.leaf"), ("truncate", "shop.leaf")]
    assert state(parted, "shop.leaf") == ("ok", None)


def test_copy_is_refused_until_the_partition_is_captured_again(parted: Tap) -> None:
    parted.write("alter table root attach partition leaf for values in (1)", "alter table root detach partition leaf")
    drain(parted.db)
    with pytest.raises(psycopg.Error, match=r"capture of table shop\.leaf is off"):
        parted.owner.execute(SNAPSHOT)


def test_covered_partition_that_leaves_the_queue_is_told(parted: Tap) -> None:
    parted.write("alter table root attach partition leaf for values in (1)")
    drain(parted.db)
    gone = "select from gdq.captured_table where relid = 'shop.leaf'::regclass"

    def left() -> bool:
        maintain(parted)
        return parted.owner.execute(gone).rowcount == 0

    until(left)
    told = [row[7] for row in drain(parted.db) if row[3] == "ddl"]
    assert [(data["tag"], data["table"], data["dropped"]) for data in told] == [("remove_table", "shop.leaf", True)]
