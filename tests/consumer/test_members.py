"""Members of a consumer: batches side by side, takeover, and what holds the logs."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gdq import Consumer, StaleBatch, register_member
from gdq.consumer import peek
from gdq.member import member_info
from tests.support.concurrency import Scene, Stream, read_events
from tests.support.programs import gdq, start_gdq
from tests.support.schedules import Stage
from tests.support.schedules_retry import FINISH, Taken, finish, next_of
from tests.support.server import Database
from tests.support.waiting import SECONDS, until


@pytest.fixture
def stage(db: Database) -> Iterator[Stage]:
    """The consumer c with the members a and b."""
    with Stage(db) as opened:
        for member in ("a", "b"):
            assert register_member(opened.owner, "q", "c", member) is True
        yield opened


def grow(stage: Stage, batches: int) -> None:
    for _ in range(batches):
        stage.insert()
        stage.tick()


def taken(stage: Stage, member: str, dead_after: str = "1 hour") -> Taken:
    batch = next_of(stage.owner, member, dead_after)
    assert batch
    return batch


def refusal(stage: Stage, query: str, *values: Any) -> str | None:
    with pytest.raises(psycopg.Error) as error:
        stage.owner.execute(query.encode(), values or None)
    return error.value.sqlstate


def end(stage: Stage) -> None:
    """Let the consumer catch up without members, and check all that it got."""
    for member in ("a", "b"):
        stage.owner.execute("select gdq.unregister_member('q', 'c', %s)", [member])
    stage.finish()


def test_each_member_has_a_batch_of_its_own(stage: Stage) -> None:
    grow(stage, 4)
    first, second = taken(stage, "a"), taken(stage, "b")
    assert first[0] != second[0]
    assert first[2].snapshot_to == second[2].snapshot_from
    again = taken(stage, "a")
    assert again[0] == first[0]
    assert refusal(stage, FINISH, *first[:2]) == "GDQ01"
    held = [(info.member_name, info.batch_id) for info in member_info(stage.owner, "q", "c")]
    assert held == [("a", first[0]), ("b", second[0])]
    finish(stage, stage.owner, second)
    assert stage.value(FINISH, *second[:2]) is False
    assert refusal(stage, "select * from gdq.get_batch(%s, %s)", *second[:2]) == "GDQ01"
    third = taken(stage, "b")
    assert third[2].snapshot_from == second[2].snapshot_to
    finish(stage, stage.owner, third)
    assert stage.value("select (gdq.position_of(1)).batch_no") == 0
    finish(stage, stage.owner, again)
    assert stage.value("select (gdq.position_of(1)).batch_no") == 3
    end(stage)


def test_the_oldest_open_batch_holds_the_logs(stage: Stage) -> None:
    grow(stage, 2)
    older, younger = taken(stage, "a"), taken(stage, "b")
    finish(stage, stage.owner, younger)
    for _ in range(4):
        stage.maintain()
        stage.owner.execute("select gdq.rotate_control(true, 1)")
    assert len(read_events(stage.owner, *older[:2])) == 1
    finish(stage, stage.owner, older)
    assert stage.maintain() > 0
    stage.owner.execute("select gdq.rotate_control(true, 1)")
    assert stage.value("select count(*) from gdq.batch_end") <= 1
    end(stage)


def test_takeover_after_a_while_only(stage: Stage) -> None:
    grow(stage, 1)
    held = taken(stage, "a")
    assert next_of(stage.owner, "b") is None
    assert next_of(stage.owner, "b", "178000000 years") is None
    stage.owner.execute("update gdq.batch_token set granted_at = granted_at - interval '2 hours'")
    stage.owner.execute("select gdq.touch_batch(%s, %s)", held[:2])
    assert next_of(stage.owner, "b") is None
    assert len(read_events(stage.owner, *held[:2])) == 1
    stage.owner.execute("update gdq.batch_token set granted_at = granted_at - interval '2 hours'")
    over = taken(stage, "b")
    assert over[0] == held[0]
    for function in ("finish_batch", "touch_batch", "get_batch", "get_retries"):
        assert refusal(stage, f"select gdq.{function}(%s, %s)", *held[:2]) == "GDQ01", function
    finish(stage, stage.owner, over)
    end(stage)


def test_what_a_member_leaves_is_taken_up_at_once(stage: Stage) -> None:
    grow(stage, 1)
    held = taken(stage, "a")
    assert stage.value("select gdq.unregister_member('q', 'c', 'a')") is True
    over = taken(stage, "b")
    assert over[0] == held[0]
    assert stage.value("select gdq.unregister_member('q', 'c', 'b')") is True
    plain = next_of(stage.owner, None)
    assert plain
    assert plain[0] == held[0]
    finish(stage, stage.owner, plain)
    end(stage)


def test_refusals(stage: Stage) -> None:
    assert refusal(stage, "select gdq.next_batch('q', 'c')") == "55000"
    assert refusal(stage, "select gdq.begin_refresh('q', 'c')") == "55000"
    assert refusal(stage, "select gdq.next_batch('q', 'c', member => 'd')") == "42704"
    assert refusal(stage, "select gdq.register_member('q', 'd', 'a')") == "42704"
    assert refusal(stage, "select gdq.register_member('q', 'c', '')") == "22023"
    assert stage.value("select gdq.register_member('q', 'c', 'a')") is False
    assert stage.value("select gdq.unregister_member('q', 'c', 'd')") is False


def test_retries_come_to_one_member(stage: Stage) -> None:
    grow(stage, 3)
    batches = {member: taken(stage, member) for member in ("a", "b")}
    for batch in batches.values():
        ev_id = stage.value("select ev_id from gdq.get_batch(%s, %s)", *batch[:2])
        assert stage.value("select gdq.retry_event(%s, %s, %s, '0')", *batch[:2], ev_id) is True
    finish(stage, stage.owner, batches["b"])
    third = taken(stage, "b")
    assert stage.value("select count(*) from gdq.get_retries(%s, %s)", *third[:2]) == 1
    finish(stage, stage.owner, batches["a"])
    last = taken(stage, "a")
    assert stage.value("select count(*) from gdq.get_retries(%s, %s)", *last[:2]) == 1
    assert stage.value("select count(*) from gdq.get_batch(%s, %s)", *last[:2]) == 0
    finish(stage, stage.owner, third)
    stage.owner.execute(FINISH, last[:2])
    assert stage.value("select count(*) from gdq.retry_info('q')") == 0
    end(stage)


def test_consumers_of_one_stream(stage: Stage) -> None:
    """Both work at once; neither sees what the other has."""
    grow(stage, 2)
    got = {}
    dsn = stage.db.dsn
    with Consumer(dsn, "q", "c", member="a", max_events=1) as a, Consumer(dsn, "q", "c", member="b", max_events=1) as b:
        for one in a.batches(once=True):
            got["a"] = [event.id for event in one.events()]
            for two in b.batches(once=True):
                got["b"] = [event.id for event in two.events()]
                two.commit()
                break
            break
        assert set(got["a"]).isdisjoint(got["b"])
        # what a did not finish it gets again
        for one in a.batches(once=True):
            assert [event.id for event in one.events()] == got["a"]
            break
        assert len(peek(stage.owner, "q", "c", limit=5)) == 1


def test_a_member_that_was_taken_over_writes_nothing(stage: Stage) -> None:
    def apply(consumer: Consumer) -> None:
        for batch in consumer.batches(once=True):
            batch.connection.execute("insert into applied select from gdq.get_batch(%s, %s)", [batch.id, batch.token])
            assert taken(stage, "b", dead_after="0")[0] == batch.id

    stage.owner.execute("create table applied ()")
    grow(stage, 1)
    with Consumer(stage.db.dsn, "q", "c", member="a") as consumer, pytest.raises(StaleBatch):
        apply(consumer)
    assert stage.value("select count(*) from applied") == 0


def test_commands(stage: Stage) -> None:
    dsn = stage.db.dsn
    assert gdq("register-consumer", "q", "d", "--member", "x", dsn=dsn).stderr == "registered consumer d/x on q\n"
    assert gdq("register-consumer", "q", "d", "--member", "x", dsn=dsn).stderr == "already registered: d/x on q\n"
    stage.insert()
    wrong = gdq("consume", "q", "d", "--once", dsn=dsn)
    assert (wrong.returncode, wrong.stderr.splitlines()[0]) == (1, "Error: the consumer has members, and none is named")
    done = gdq("consume", "q", "d", "--member", "x", "--once", dsn=dsn)
    assert [json.loads(line)["op"] for line in done.stdout.splitlines()] == ["insert"]
    (listed,) = json.loads(gdq("members", "q", "d", "--json", dsn=dsn).stdout)
    assert (listed["member_name"], listed["batch_id"]) == ("x", None)
    assert gdq("unregister-consumer", "q", "d", "--member", "x", dsn=dsn).stderr == "unregistered consumer d/x from q\n"


class Crew:
    """Members that work while others write; some fall silent in the middle of a batch and come back as zombies."""

    def __init__(self, scene: Scene, stream: Stream, batches: int) -> None:
        self.scene = scene
        self.stream = stream
        self.batches = batches
        self.counts: Counter[str] = Counter()
        self.stop = threading.Event()
        self.errors: list[BaseException] = []

    def run(self) -> None:
        bodies = [*(lambda c, m=m: self.work(c, m) for m in "abc"), self.write, self.tick, self.maintain]
        threads = [threading.Thread(target=self._guarded, args=[body]) for body in bodies]
        for thread in threads:
            thread.start()
        self.stop.wait(SECONDS)
        self.stop.set()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _guarded(self, body: Any) -> None:
        try:
            with self.scene.db.connect() as connection:
                body(connection)
        except BaseException as error:  # the main thread raises it
            self.errors.append(error)
            self.stop.set()

    def work(self, connection: psycopg.Connection[Any], member: str) -> None:
        rng = random.Random(member)
        while not self.stop.is_set():
            batch = next_of(connection, member, "50 ms", 3)
            if batch is None:
                self.stop.wait(0.01)
                continue
            try:
                changes = read_events(connection, *batch[:2])
                self.stream.note_read(batch[0], changes)
                self.stop.wait(0.12 if rng.random() < 0.2 else 0)
                connection.execute(FINISH, batch[:2])
            except psycopg.Error as error:
                if error.sqlstate != "GDQ01":
                    raise
                self.counts["zombies"] += 1
            else:
                self.stream.applied.append(batch[2]._replace(changes=changes))
                self.counts["batches"] += 1
            if self.counts["batches"] >= self.batches and self.counts["zombies"] >= 5:
                self.stop.set()

    def write(self, connection: psycopg.Connection[Any]) -> None:
        key = 0
        while not self.stop.wait(0.002):
            key += 1
            connection.execute("insert into acct values (%s, nextval('label'))", [key])
            connection.execute("update acct set label = nextval('label') where id = %s", [key // 2])

    def tick(self, connection: psycopg.Connection[Any]) -> None:
        while not self.stop.wait(0.01):
            connection.execute("select gdq.force_tick('q')")

    def maintain(self, connection: psycopg.Connection[Any]) -> None:
        while not self.stop.wait(0.02):
            connection.execute("select gdq.maintain()")
            self.counts["rotated"] += connection.execute("select gdq.rotate_control(true, 1)").fetchone() != (0,)


def test_exactly_once_with_members_that_fall_silent(db: Database) -> None:
    scene = Scene(db)
    with db.connect() as owner:
        stream = scene.register(owner, "c")
        for member in "abc":
            register_member(owner, "q", "c", member)
        crew = Crew(scene, stream, batches=60)
        crew.run()
        for member in "abc":
            owner.execute("select gdq.unregister_member('q', 'c', %s)", [member])
        owner.execute("select gdq.force_tick('q')")
        while batch := next_of(owner, None, max_events=1000):
            changes = read_events(owner, *batch[:2])
            stream.note_read(batch[0], changes)
            owner.execute(FINISH, batch[:2])
            stream.applied.append(batch[2]._replace(changes=changes))
        scene.check(owner)
    assert crew.counts["batches"] >= 60
    assert crew.counts["zombies"] >= 5
    assert crew.counts["rotated"] > 0


def test_dead_after_of_a_consumer(stage: Stage) -> None:
    grow(stage, 1)
    held = taken(stage, "a")
    with Consumer(stage.db.dsn, "q", "c", member="b", dead_after=timedelta(0)) as consumer:
        for batch in consumer.batches(once=True):
            assert batch.id == held[0]
            break


HANDLER = """
import pathlib, time

def apply(connection, events):
    connection.execute("insert into applied values (%s)", [len(list(events))])
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
"""


@pytest.fixture
def folder(stage: Stage, tmp_path: Path) -> Path:
    """Has a handler that works until there is a file `go`."""
    stage.owner.execute("create table applied (events int)")
    (tmp_path / "slow.py").write_text(HANDLER)
    return tmp_path


def test_a_command_that_was_taken_over_goes_on_with_the_next_batch(stage: Stage, folder: Path) -> None:
    grow(stage, 1)
    command = ("consume", "q", "c", "slow:apply", "--member", "a")
    with start_gdq(*command, dsn=stage.db.dsn, cwd=folder) as process:
        until(lambda: member_info(stage.owner, "q", "c")[0].batch_id is not None or process.poll() is not None)
        finish(stage, stage.owner, taken(stage, "b", dead_after="0"))
        (folder / "go").touch()
        until(lambda: member_info(stage.owner, "q", "c")[0].batch_id is None or process.poll() is not None)
        stage.insert()
        until(lambda: stage.value("select count(*) from applied") == 1 or process.poll() is not None)
        process.terminate()
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert "going on with the next batch" in errors
    assert stage.value("select count(*) from applied") == 1


def _shown(stage: Stage, batch: int, signs: int) -> None:
    """Wait for this many signs of life, all under the same token."""
    query = "select count(*) > %s and count(distinct token) = 1 from gdq.batch_token where batch_id = %s"
    until(lambda: stage.value(query, signs, batch))


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gdq batch")]


def test_a_member_at_work_shows_that_it_is_alive(stage: Stage) -> None:
    grow(stage, 1)
    with Consumer(stage.db.dsn, "q", "c", member="a", dead_after=timedelta(seconds=0.3)) as consumer:
        for batch in consumer.batches(once=True):
            _shown(stage, batch.id, 5)
            granted = "select max(granted_at) > clock_timestamp() - interval '1 minute' from gdq.batch_token"
            assert stage.value(granted) is True
            assert next_of(stage.owner, "b", "1 minute") is None
            assert len([*batch.events()]) == 1
    assert stage.value("select max(batch_no) from gdq.position") == 1
    assert not _threads()


def test_a_member_that_lost_its_batch_shows_no_more_signs(stage: Stage) -> None:
    grow(stage, 1)
    with Consumer(stage.db.dsn, "q", "c", member="a", dead_after=timedelta(seconds=0.03)) as consumer:
        for batch in consumer.batches(once=True):
            over = taken(stage, "b", dead_after="0")
            assert over[0] == batch.id
            until(lambda: not _threads())
            break
    finish(stage, stage.owner, over)
    end(stage)


@pytest.mark.parametrize(("most", "sizes"), [("1", [1, 1, 1]), ("2", [2, 1])])
def test_smaller_batches(stage: Stage, folder: Path, most: str, sizes: list[int]) -> None:
    (folder / "go").touch()
    grow(stage, 3)
    command = ("consume", "q", "c", "slow:apply", "--member", "a", "--once", "--max-events", most)
    done = gdq(*command, dsn=stage.db.dsn, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = stage.owner.execute("select events from applied where events > 0 order by ctid").fetchall()
    assert [events for (events,) in found] == sizes
