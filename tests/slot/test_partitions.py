"""Views over partitioned tables from a slot: rows come as the root's, and what else was done to a partition is seen."""

from __future__ import annotations

import re
import threading
from collections import Counter
from contextlib import suppress

import psycopg
import pytest

from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.consumers.slot.views.tables import published_tables
from gdq.errors import GdqError
from tests.support.slot import Scene, writing
from tests.support.waiting import until

pytestmark = pytest.mark.server

TABLES = ("item", "part", "dim")
VIEWS = {
    "regions": 'select k, region, count(*) as n, sum(n) as s, min("Name") as l from part group by k, region',
    "placed": "select p.id, p.region, p.code, i.note from part p left join item i on i.k = p.k",
}


@pytest.fixture
def parted(scene: Scene) -> Scene:
    """Views that have been loaded, one of them by the queue, too."""
    scene.published = TABLES
    # a partition whose columns are in another order
    scene.write(
        """create table part_2 (code char(3), mood mood, gone int, "Name" text, n bigint, k int, region int not null,
                                id int not null)""",
        "alter table part_2 drop column gone",
        "alter table part_2 replica identity full",
        "alter table part attach partition part_2 for values in (3, 4)",
    )
    for name, query in VIEWS.items():
        scene.make(name, query)
        assert scene.both(name).action == "full"
    return scene


@pytest.mark.long
def test_random_work_at_the_same_time(parted: Scene) -> None:
    """Rows that move from partition to partition among it."""
    moving = """update part p set region = 4 - region
                 where id % 4 = {} and (id, 4 - region) not in (select id, region from part)"""
    parted.write("set lock_timeout = '200ms'")
    with writing(parted.db, TABLES):
        actions = Counter[str]()
        for n in range(3):
            with suppress(psycopg.Error):
                parted.write(moving.format(n))
            actions.update(parted.both(name).action for name in VIEWS)
    parted.write("reset lock_timeout")
    actions.update(parted.both(name).action for name in VIEWS)
    assert actions["delta"] > 4, actions
    assert {parted.both(name).action for name in VIEWS} == {"none"}


@pytest.mark.long
def test_rows_that_move_and_rows_of_a_partition(parted: Scene) -> None:
    parted.write(
        'alter table part_2 alter "Name" set storage external',
        "insert into part (id, region, k, n, \"Name\") values (101, 0, 1, 5, 'a'), (102, 3, 1, 6, repeat('long', 900))",
        "update part set region = 4 where id = 101",
        "insert into part_2 (id, region, k, n) values (103, 3, 2, 7)",
        "update part_2 set k = 8 where id = 102",
        "delete from only part_1 where k = 3",
    )
    for name in VIEWS:
        assert parted.both(name).action == "delta"
    assert parted.su.execute("select n from out_regions where k = 8 and region = 3").fetchone() == (1,)


ALONE = "create table part_9 (like part including indexes); alter table part_9 replica identity full"
FULL: dict[str, tuple[str, ...]] = {
    "a partition is emptied": ("truncate part_1",),
    "all are emptied": ("truncate part", "insert into part (id, region) values (1, 1)"),
    "emptied within": ("begin", "insert into part values (200, 1, 4)", "truncate part_1", "commit"),
    "attached with rows": (
        ALONE,
        "insert into part_9 values (1, 9, 5)",
        "alter table part attach partition part_9 for values in (9)",
    ),
    "there and back": (
        "alter table part detach partition part_9",
        "insert into part_9 values (2, 9, 6)",
        "alter table part attach partition part_9 for values in (9)",
    ),
    "detached": ("alter table part detach partition part_9",),
    "identity there and back": (
        "alter table part_2 replica identity default",
        "update part set k = 7 where region > 2",
        "alter table part_2 replica identity full",
    ),
    "published as partitions": (
        "alter publication gdq_q set (publish_via_partition_root = false)",
        "insert into part values (201, 1, 4)",
        "alter publication gdq_q set (publish_via_partition_root = true)",
    ),
}


@pytest.mark.long
def test_loaded_in_full(parted: Scene) -> None:
    """What is done to a partition and not to its rows; then changes do again."""
    for number, statements in enumerate(FULL.values()):
        parted.write(*statements)
        result = parted.refresh("regions")
        assert result.action == "full", statements
        assert re.search("changed|truncate", result.reason or ""), result.reason
        parted.write(f"insert into part (id, region, k) values ({300 + number}, 1, 1)")
        assert parted.refresh("regions").action == "delta"


@pytest.mark.long
def test_refused(parted: Scene) -> None:
    for statement, message, back in (
        (
            "alter table part_2 replica identity default",
            "changes of table public.part_2 come through a slot without old rows",
            "alter table part_2 replica identity full",
        ),
        (
            "alter publication gdq_q set (publish_via_partition_root = false)",
            "sends the changes of public.part as those of its partitions",
            "alter publication gdq_q set (publish_via_partition_root = true)",
        ),
    ):
        parted.write(statement)
        with pytest.raises(GdqError, match=message):
            parted.refresh("regions")
        parted.write(back)
        assert parted.refresh("regions").action == "full"


@pytest.mark.long
def test_partitions_of_other_kinds_are_refused(parted: Scene) -> None:
    """Tables that the queue does not capture, or not with these: asked without a view."""
    parted.write(
        "create foreign data wrapper far; create server far foreign data wrapper far",
        "create table loose (r int) partition by list (r); alter table loose replica identity full",
        "create table loose_1 partition of loose for values in (1); alter table loose_1 replica identity full",
        "create table parent (id int); create table child () inherits (parent)",
        "alter publication gdq_q add table loose, parent",
        "create foreign table loose_2 partition of loose for values in (2) server far",
    )

    def look(table: str) -> None:
        (now,) = parted.su.execute("select pg_current_snapshot()::text").fetchone() or ("",)
        published_tables(parted.su, "q", [table], PgSnapshot.parse(now))

    with pytest.raises(GdqError, match=r"loose has a foreign partition"):
        look("public.loose")
    parted.write("drop foreign table loose_2")
    look("public.loose")
    parted.write("create unlogged table loose_3 partition of loose for values in (3)")
    with pytest.raises(GdqError, match="table loose_3 is unlogged"):
        look("public.loose")
    for table in ("public.parent", "public.part_0"):
        with pytest.raises(GdqError, match="is a partition, or has children"):
            look(table)


@pytest.mark.long
def test_writer_open_while_a_partition_is_being_detached(parted: Scene) -> None:
    """What it wrote before is sent as the root's when it commits, and is not the root's any more."""
    pending = "select count(*) from pg_inherits where inhdetachpending"

    def detach() -> None:
        with parted.db.connect("su") as su:
            try:
                su.execute("alter table part detach partition part_2 concurrently")
            except psycopg.errors.QueryCanceled:
                cancelled.append(True)

    cancelled: list[bool] = []
    with parted.db.connect("su") as other:
        other.execute("insert into part_2 (id, region, k) values (400, 3, 1)")  # so that the server knows its bounds
        other.execute("begin; insert into part_2 (id, region, k) values (401, 3, 1)")
        thread = threading.Thread(target=detach)
        thread.start()
        until(lambda: parted.su.execute(pending.encode()).fetchone() == (1,))
        parted.write(
            "select pg_cancel_backend(pid) from pg_stat_activity"
            " where query ~ 'detach partition part_2' and pid <> pg_backend_pid()"
        )
        thread.join()
        assert cancelled
        assert parted.refresh("regions").action == "full"
        other.execute("commit")
    assert parted.refresh("regions").reason == "a transaction was open that is older than what is published"
    parted.write("insert into part (id, region, k) values (402, 1, 1)")
    assert parted.refresh("regions").action == "delta"
    parted.write("alter table part detach partition part_2 finalize")
    assert parted.refresh("regions").action == "full"
