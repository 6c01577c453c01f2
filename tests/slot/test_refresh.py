"""Views that are refreshed from a logical slot: the rows of the query at the snapshot, as from the queue."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from click.testing import CliRunner

from gdq.cli import main
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.consumers.slot.slot import create_slot, drop_slot
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.consumers.slot.source import SlotSource
from gdq.errors import GdqError
from gdq.view.view import set_view_owner
from tests.support.endings import Deaths, Killed
from tests.support.slot import VIEWS, Scene, writing

pytestmark = pytest.mark.server


@pytest.fixture
def grouped(scene: Scene) -> Scene:
    """One view that has been loaded."""
    scene.make("grouped", VIEWS["grouped"])
    assert scene.both("grouped").action == "full"
    return scene


@pytest.mark.parametrize(
    ("names", "rounds"), [(("outer_joined", "grouped"), 2), pytest.param(tuple(VIEWS), 8, marks=pytest.mark.long)]
)
def test_random_work_at_the_same_time(scene: Scene, names: tuple[str, ...], rounds: int) -> None:
    """Every refresh of every shape, while writers commit, roll back and prepare, gives the query at its snapshot."""
    for name in names:
        scene.make(name, VIEWS[name])
        scene.both(name)
    with writing(scene.db):
        actions = Counter(scene.both(name).action for _ in range(rounds) for name in names)
    actions += Counter(scene.both(name).action for name in names)
    assert actions["delta"] > rounds * len(names) // 2, actions
    assert scene.compared == 2 * (rounds + 2) * len(names)
    for name in names:
        assert scene.both(name).action == "none"


def test_as_the_owner_of_the_view(scene: Scene) -> None:
    """The session is another role's; rows that come from the slot are as those from the queue."""
    for name in ("outer_joined", "projection"):
        scene.make(name, VIEWS[name])
        set_view_owner(scene.su, name, "gdq_owner")
        assert scene.both(name).action == "full"
    scene.write("update item set amount = 3, note = 'é'", "delete from dim where k = 2")
    for name in ("outer_joined", "projection"):
        assert scene.both(name).action == "delta"


def test_transactions_open_at_a_refresh_come_with_the_next(grouped: Scene) -> None:
    """One that began before and committed after, one prepared; savepoints; and commits between that are applied."""
    with grouped.db.connect("su") as other:
        other.execute("begin")
        other.execute("insert into fact (k, qty, label) values (1, 5, 'open')")
        other.execute("savepoint s")
        other.execute("delete from fact where k = 2")
        other.execute("rollback to s")
        other.execute("savepoint t")
        other.execute("update fact set qty = qty + 1 where k = 3")
        other.execute("release t")
        prepared = f"p_{grouped.db.name}"
        grouped.write("begin", "insert into fact (k, qty) values (7, 3)", f"prepare transaction '{prepared}'")
        grouped.write("insert into fact (k, qty) values (4, 9)")
        assert grouped.both("grouped").action == "delta"
        assert grouped.both("grouped").action == "none"
        other.execute("commit")
    assert grouped.both("grouped").action == "delta"
    grouped.write(f"commit prepared '{prepared}'")
    assert grouped.both("grouped").action == "delta"
    assert grouped.both("grouped").action == "none"
    assert grouped.su.execute("select n from out_grouped where k = 7").fetchone() is not None


def test_commits_between_the_snapshot_and_the_reading_come_again(grouped: Scene) -> None:
    """The slot sends them already, the snapshot does not see them: the slot is not confirmed beyond the first."""

    def commit(at: str) -> None:
        if at == "exported":
            other.execute("commit")
            grouped.write("insert into fact (k, qty) values (5, 5)")

    with grouped.db.connect("su") as other, Refresher(grouped.db.su_dsn, at=commit) as refresher:
        other.execute("begin; insert into fact (k, qty) values (6, 6)")
        grouped.write("insert into fact (k, qty) values (4, 4)")
        before = grouped.confirmed("grouped")
        assert refresher.refresh("grouped", slot=True).action == "delta"
        assert grouped.confirmed("grouped") > before
    assert grouped.both("grouped").action == "delta"
    assert grouped.both("grouped").action == "none"


def test_large_transaction_is_streamed_with_its_subtransactions(grouped: Scene) -> None:
    """What is sent of a running transaction waits for its commit, and what a savepoint undoes does not count."""
    grouped.write(f"alter database {grouped.db.name} set logical_decoding_work_mem = '64kB'")
    with grouped.db.connect("su") as other:
        other.execute("begin")
        other.execute(
            "insert into fact (k, qty, label) select i % 5, 1, repeat(md5(i::text), 40) from generate_series(1, 300) i"
        )
        grouped.both("grouped")
        other.execute("savepoint s")
        other.execute("insert into fact (k, qty) select 99, i from generate_series(1, 5) i")
        other.execute("rollback to s")
        other.execute("savepoint s2")
        other.execute("update fact set label = label || 'x' where k = 2")
        other.execute("commit")
    assert grouped.both("grouped").action == "delta"
    query = "select stream_txns from pg_stat_replication_slots where slot_name = 'gdq_q_grouped'"
    assert (grouped.su.execute(query).fetchone() or (0,))[0] > 0


def test_killed_and_run_again(grouped: Scene) -> None:
    """Nothing is applied twice, though the slot sends it again."""
    points: tuple[RefreshPoint, ...] = ("exported", "ticked", "applied", "committed")
    for point in points:
        kill_and_run_again(grouped, point)


def kill_and_run_again(grouped: Scene, point: RefreshPoint) -> None:
    grouped.write("insert into fact (k, qty) values (1, 1), (2, 2)", "delete from fact where k = 3")

    before = grouped.confirmed("grouped")
    with Refresher(grouped.db.su_dsn, at=Deaths([point])) as other, pytest.raises(Killed):
        other.refresh("grouped", slot=True)
    assert grouped.confirmed("grouped") == before
    assert grouped.both("grouped").action == ("none" if point == "committed" else "delta")
    grouped.write("insert into fact (k, qty) values (1, 1)")
    assert grouped.both("grouped").action == "delta"
    assert grouped.confirmed("grouped") > before


@pytest.mark.long
def test_queue_and_slot_in_turn(grouped: Scene) -> None:
    """The position is a snapshot: what the queue has applied the slot does not apply again, and the other way round."""
    for slot in (False, True, True, False, False, True):
        grouped.write("insert into fact (k, qty) values (1, 1), (8, 2)", "update fact set qty = 4 where k = 8")
        assert grouped.refresh("grouped", slot=slot).action == "delta"


def test_values_arrive_as_they_are(scene: Scene) -> None:
    """Tabs, line ends, backslashes, NULL's own mark, large values that an update leaves as they were."""
    scene.write("alter table fact alter label set storage external")
    scene.make("bag", VIEWS["bag"])
    scene.both("bag")
    scene.write(
        r"""insert into fact (label, qty) values (E'a\tb\nc\\d\re', 1), (E'\\N', 2), ('', 3), (null, 4), ('ä€𝄞', 5)""",
        "insert into fact (label, qty) select string_agg(md5(i::text), ''), 6 from generate_series(1, 300) i",
        "update fact set price = 'NaN' where qty = 6",
    )
    assert scene.both("bag").action == "delta"


def test_views_of_a_slot_that_is_not_there(scene: Scene) -> None:
    scene.make("grouped", VIEWS["grouped"], slot=False)
    run = partial(CliRunner().invoke, main)
    arguments = ["refresh", "--source", "slot", "--dsn", scene.db.su_dsn]
    done = run([*arguments, "grouped"])
    assert done.exit_code == 1
    assert "there is no slot gdq_q_grouped" in done.stderr
    assert "gdq create-slot q grouped public.fact" in done.stderr
    create_slot(scene.su, "q", "grouped", ["public.fact"])
    done = run([*arguments, "grouped"])
    assert done.exit_code == 0, done.stderr
    assert run(arguments).exit_code == 2


REFUSED = (
    ("alter table fact replica identity default", "without old rows", "alter table fact replica identity full"),
    (
        "alter publication gdq_q set (publish = 'insert')",
        "not send all",
        "alter publication gdq_q set (publish = 'insert, update, delete, truncate')",
    ),
    (
        "alter publication gdq_q drop table fact",
        "does not have table public.fact",
        "alter publication gdq_q add table fact",
    ),
    ("alter publication gdq_q set table fact where (k > 1)", "not send all", "alter publication gdq_q set table fact"),
)


def test_refused(grouped: Scene) -> None:
    """What does not come with all rows, whole, and the old ones."""
    for statement, message, back in REFUSED:
        grouped.write(statement)
        with pytest.raises(GdqError, match=message):
            grouped.refresh("grouped")
        grouped.write(back)
        # nothing was written without old rows
        assert grouped.refresh("grouped").action == ("none" if "identity" in statement else "full")


def again(scene: Scene) -> None:
    drop_slot(scene.su, "q", "grouped")
    scene.write("insert into fact (k, qty) values (1, 1)")
    create_slot(scene.su, "q", "grouped", ["public.fact"])


def consumed(scene: Scene) -> None:
    with SlotSource(scene.db.su_dsn, "q", "grouped") as source:
        assert list(source.batches(once=True))


def published_anew(scene: Scene) -> None:
    scene.write("alter publication gdq_q drop table fact", "insert into fact (k, qty) values (1, 1)")
    scene.write("alter publication gdq_q add table fact")


def execute(*statements: str) -> Callable[[Scene], None]:
    return lambda scene: scene.write(*statements)


FULL: dict[str, tuple[Callable[[Scene], None], str]] = {
    "truncate": (execute("truncate fact"), "truncate|changed"),
    "truncate within": (execute("begin", "insert into fact (k) values (1)", "truncate fact", "commit"), "."),
    "rewritten": (execute("alter table fact alter qty type int using qty + 1"), "was changed"),
    "column of another default": (
        execute("alter table fact drop column qty", "alter table fact add column qty int default 5"),
        "was changed",
    ),
    "names there and back": (
        execute(
            "alter table fact rename k to x",
            "alter table fact rename grp to k",
            "insert into fact (k, x, qty) values (1, 2, 3)",
            "alter table fact rename k to grp",
            "alter table fact rename x to k",
        ),
        "was changed",
    ),
    "identity there and back": (
        execute(
            "alter table fact replica identity nothing",
            "insert into fact (k, qty) values (1, 1)",
            "alter table fact replica identity full",
        ),
        "was changed",
    ),
    "slot made anew": (again, "not read for this view"),
    "slot read by another": (consumed, "ahead"),
    "published anew": (published_anew, "was changed"),
}


def test_loaded_in_full(grouped: Scene) -> None:
    """What rows do not show, or the slot does not have any more, is loaded; then changes do again."""
    for change, reason in FULL.values():
        load_in_full(grouped, change, reason)


def load_in_full(grouped: Scene, change: Callable[[Scene], None], reason: str) -> None:
    grouped.write("insert into fact (k, qty) values (1, 1), (2, 2)")
    change(grouped)
    grouped.write("delete from fact where k = 1")
    result = grouped.refresh("grouped")
    assert result.action == "full"
    assert re.search(reason, result.reason or ""), result.reason
    grouped.write("insert into fact (k, qty) values (1, 1), (2, 2)")
    assert grouped.refresh("grouped").action == "delta"


def test_table_published_while_a_writer_was_at_work(grouped: Scene) -> None:
    """What it wrote before is in no slot: loaded in full as long as such a transaction is open, and once after it."""
    with grouped.db.connect("su") as other:
        grouped.write("alter publication gdq_q drop table fact")
        other.execute("begin")
        other.execute("insert into fact (k, qty) values (1, 100)")
        grouped.write("alter publication gdq_q add table fact")
        assert grouped.refresh("grouped").action == "full"
        other.execute("commit")
    assert grouped.refresh("grouped").reason == "a transaction was open that is older than what is published"
    grouped.write("insert into fact (k, qty) values (1, 1)")
    assert grouped.refresh("grouped").action == "delta"


@pytest.mark.long
def test_asked_for_in_full_moves_the_slot(grouped: Scene) -> None:
    before = grouped.confirmed("grouped")
    grouped.write("insert into fact (k, qty) values (1, 1)")
    assert grouped.refresh("grouped", full=True).reason == "asked for"
    assert grouped.confirmed("grouped") > before
    assert grouped.refresh("grouped").action == "none"


@pytest.mark.long
def test_transactions_prepared_in_a_slot_of_two_phases(scene: Scene) -> None:
    """Such a slot sends them when they are prepared, once: it is not confirmed beyond that until they are over."""
    scene.make("grouped", VIEWS["grouped"], slot=False)
    create_slot(scene.su, "q", "grouped", ["public.fact"], two_phase=True)
    scene.refresh("grouped")
    gid = f"two_{scene.db.name}"
    scene.write("begin", "insert into fact (k, qty) values (7, 3)", f"prepare transaction '{gid}'")
    scene.write("insert into fact (k, qty) values (1, 1)")
    assert scene.refresh("grouped").action == "delta"
    before = scene.confirmed("grouped")
    scene.write(f"commit prepared '{gid}'")
    assert scene.refresh("grouped").action == "delta"
    assert scene.confirmed("grouped") > before


def test_which_transactions_a_snapshot_sees() -> None:
    snapshot = PgSnapshot.parse("4294967290:4294967310:4294967290,4294967300")
    assert [snapshot.full(xid) for xid in (0, 5, 4294967295)] == [2**32, 2**32 + 5, 4294967295]
    seen = [xid for xid in range(4294967285, 4294967315) if snapshot.sees(xid)]
    assert seen == [*range(4294967285, 4294967290), *range(4294967291, 4294967300), *range(4294967301, 4294967310)]
    assert PgSnapshot.parse("7:7:").running == frozenset()
    assert PgSnapshot.parse(snapshot.text) == snapshot


def test_which_snapshot_is_the_later_one() -> None:
    steps = [PgSnapshot.parse(text) for text in ("5:5:", "5:8:5,6", "6:8:6", "6:9:6,8", "9:9:", "12:12:")]
    for n, later in enumerate(steps):
        assert [later.covers(step) for step in steps] == [m <= n for m in range(len(steps))]


@pytest.mark.long
def test_lost_slot(grouped: Scene) -> None:
    """Loaded in full each time, and said why, until there is a new one."""
    grouped.write("insert into fact (k, qty) values (1, 1)")
    lose(grouped)
    for _ in range(2):
        assert grouped.refresh("grouped").reason == "slot gdq_q_grouped is lost: drop it and make it anew"
    drop_slot(grouped.su, "q", "grouped")
    create_slot(grouped.su, "q", "grouped", ["public.fact"])
    assert grouped.refresh("grouped").reason == "slot gdq_q_grouped was not read for this view before"
    grouped.write("insert into fact (k, qty) values (1, 1)")
    assert grouped.refresh("grouped").action == "delta"


def lose(scene: Scene) -> None:
    """Have the server remove log that the slot needs."""
    scene.write("alter system set max_slot_wal_keep_size = '1MB'", "select pg_reload_conf()")
    try:
        query = "select wal_status from pg_replication_slots where slot_name = 'gdq_q_grouped'"
        while scene.su.execute(query).fetchone() != ("lost",):
            scene.write("select pg_logical_emit_message(false, 'x', 'x')", "select pg_switch_wal()", "checkpoint")
    finally:
        scene.write("alter system reset max_slot_wal_keep_size", "select pg_reload_conf()")
