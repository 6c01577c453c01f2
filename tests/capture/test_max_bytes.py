"""A queue whose logs pass max_bytes lets go of what the slowest consumer holds, and says so."""

from __future__ import annotations

import json

import pytest

from gdq.errors import ResyncRequired, StaleBatch, TruncatedPosition, mapped_errors
from gdq.table_copy import copy_table, resynced
from tests.support.concurrency import next_batch, read_events
from tests.support.programs import gdq
from tests.support.schedules import Stage

TABLES = ["public.acct", "public.item", "public.part"]


def fill(stage: Stage) -> None:
    """Rows in a segment that is not written any more, and a tick after them."""
    stage.insert()
    assert stage.value("select gdq.rotate_logs()") >= 1
    stage.tick()


def limit(stage: Stage, max_bytes: int = 1) -> int:
    """Set max_bytes and maintain; how many segments were emptied."""
    stage.owner.execute("select gdq.set_queue('q', max_bytes => %s)", [max_bytes])
    return stage.maintain()


def test_slowest_consumer_is_cut_and_comes_back(stage: Stage) -> None:
    stage.owner.execute("select gdq.register_consumer('q', 'quick')")
    stage.insert()
    stage.owner.execute("select gdq.insert_event('q', 'note', '{}')")
    fill(stage)
    slow = next_batch(stage.owner, "c")
    quick = next_batch(stage.owner, "quick")
    assert slow
    assert quick
    stage.owner.execute("select gdq.finish_batch(%s, %s)", quick[:2])
    assert limit(stage, 10_000_000) == 0
    assert limit(stage) > 0
    with pytest.raises(ResyncRequired), mapped_errors():
        next_batch(stage.owner, "c")
    done = gdq("consume", "q", "c", "--once", dsn=stage.db.dsn)
    assert done.returncode == 3
    assert done.stderr.startswith(
        'Error: consumer "c" must copy anew public.acct, public.item, public.part, messages: max_bytes'
    )
    listed = {row["consumer_name"]: row for row in json.loads(gdq("consumers", "q", "--json", dsn=stage.db.dsn).stdout)}
    assert sorted(listed["c"]["resync"]) == ["messages", *TABLES]
    assert listed["c"]["reason"].startswith("max_bytes: the logs of queue")
    assert listed["quick"]["resync"] is None

    with pytest.raises(StaleBatch), mapped_errors():
        stage.owner.execute("select gdq.finish_batch(%s, %s)", slow[:2])
    for table in TABLES:
        with copy_table(stage.db.dsn, table) as copy:
            resynced(stage.owner, "q", "c", table, copy.snapshot)
    with pytest.raises(ResyncRequired, match="messages"), mapped_errors():
        next_batch(stage.owner, "c")
    assert gdq("resynced", "q", "c", "--messages", "--snapshot", copy.snapshot, dsn=stage.db.dsn).returncode == 0
    key = stage.insert()
    stage.tick()
    again = next_batch(stage.owner, "c")
    assert again
    assert [change.new_key for change in read_events(stage.owner, *again[:2])] == [str(key)]
    stage.tick()
    assert next_batch(stage.owner, "quick") is not None


def test_registering_again_brings_it_back(stage: Stage) -> None:
    fill(stage)
    assert limit(stage) == 1
    stage.owner.execute("select gdq.unregister_consumer('q', 'c')")
    stage.stream = stage.scene.register(stage.owner, "c")
    stage.insert()
    stage.finish()


def test_only_who_holds_something_is_cut(stage: Stage) -> None:
    """What is written now, or after the last tick, is nobody's lag; a consumer of another table holds nothing."""
    stage.owner.execute("select gdq.unregister_consumer('q', 'c')")
    stage.owner.execute("select gdq.register_consumer('q', 'items', tables => '{item}')")
    stage.owner.execute("select gdq.register_consumer('q', 'c')")
    stage.owner.execute("select gdq.set_queue('q', rotation_period => '1 hour')")
    stage.insert()
    stage.tick()
    assert limit(stage) == 0
    assert next_batch(stage.owner, "c") is not None
    stage.owner.execute("select gdq.set_queue('q', rotation_period => '1 microsecond')")
    fill(stage)
    assert limit(stage) == 1
    assert next_batch(stage.owner, "items") is not None
    with pytest.raises(ResyncRequired), mapped_errors():
        next_batch(stage.owner, "c")


def test_messages_are_cut_by_name(stage: Stage) -> None:
    """They belong to no table, and nobody can copy them."""
    stage.owner.execute("select gdq.insert_event('q', 'note', '{}')")
    fill(stage)
    assert limit(stage) > 0
    for table in TABLES:
        with copy_table(stage.db.dsn, table) as copy:
            resynced(stage.owner, "q", "c", table, copy.snapshot)
    with pytest.raises(ResyncRequired, match="must copy anew messages"), mapped_errors():
        next_batch(stage.owner, "c")


def test_retention_goes_first(stage: Stage) -> None:
    stage.owner.execute("select gdq.set_queue('q', retention => '1 hour')")
    start = stage.value("select gdq.force_tick('q')")
    fill(stage)
    stage.consume()
    assert stage.maintain() == 0
    assert limit(stage) == 1
    assert next_batch(stage.owner, "c") is None
    with pytest.raises(TruncatedPosition), mapped_errors():
        stage.owner.execute("select gdq.seek('q', 'c', at_tick => %s)", [start])
    limit(stage, 0)
    stage.insert()
    stage.finish()
    assert stage.maintain() == 0


def test_consumer_that_does_not_come_back_is_moved_again(stage: Stage) -> None:
    fill(stage)
    assert limit(stage) == 1
    with copy_table(stage.db.dsn, "acct") as copy:
        pass
    fill(stage)
    assert stage.maintain() == 1
    with pytest.raises(TruncatedPosition):
        resynced(stage.owner, "q", "c", "acct", copy.snapshot)
    assert stage.value("select count(*) from gdq.subscription_resync") == 3


def test_worker_at_work_is_passed_over(stage: Stage) -> None:
    fill(stage)
    worker = stage.session()
    worker.execute("begin")
    batch = next_batch(worker, "c")
    assert batch
    assert limit(stage) == 0
    worker.execute("select gdq.finish_batch(%s, %s)", batch[:2])
    worker.execute("commit")
    stage.stream.applied.append(batch[2]._replace(changes=[]))
    assert limit(stage, 0) == 1
    assert next_batch(stage.owner, "c") is None


def test_seek_back_before_truncation_undoes_a_cut(stage: Stage) -> None:
    start = stage.value("select gdq.force_tick('q')")
    stage.consume()
    fill(stage)
    stage.owner.execute("select gdq.set_queue('q', max_bytes => 1)")
    assert stage.value("select gdq.enforce_max_bytes()") is True
    stage.owner.execute("select gdq.set_queue('q', max_bytes => 0)")
    stage.owner.execute("select gdq.seek('q', 'c', at_tick => %s)", [start])
    batch = next_batch(stage.owner, "c")
    assert batch
    assert len(read_events(stage.owner, *batch[:2])) == 1


def test_view_loads_in_full(stage: Stage) -> None:
    """Its changes are gone: delta_sql() says so, begin_refresh() does not stop it, and the refresh ends the state."""
    stage.owner.execute("select gdq.unregister_consumer('q', 'c')")
    stage.owner.execute("select gdq.create_view('v', 'q', 'select', 's.v', array['acct'::regclass])")
    row = stage.owner.execute("select snapshot::text from gdq.begin_refresh('q', 'view:v')").fetchone()
    assert row
    fill(stage)
    assert limit(stage) == 1
    [info] = json.loads(gdq("consumers", "q", "--json", dsn=stage.db.dsn).stdout)
    assert info["resync"] == ["public.acct"]
    with pytest.raises(TruncatedPosition), mapped_errors():
        stage.owner.execute("select gdq.delta_sql('q', 'acct', %s, pg_current_snapshot())", row)
    token = stage.value("select token from gdq.begin_refresh('q', 'view:v')")
    stage.owner.execute("select gdq.set_position('q', 'view:v', %s, pg_current_snapshot())", [token])
    [info] = json.loads(gdq("consumers", "q", "--json", dsn=stage.db.dsn).stdout)
    assert info["resync"] is None


def test_copies_of_a_restored_queue_count_no_more(stage: Stage) -> None:
    """A snapshot of another cluster would hide changes; without keep every table has an event that says so."""
    stage.insert()
    with copy_table(stage.db.dsn, "acct") as copy:
        resynced(stage.owner, "q", "c", "acct", copy.snapshot)
    stage.owner.execute("select gdq.rebase_resync(1, true)")
    with pytest.raises(ResyncRequired, match=r"public\.acct: copied, and restored"), mapped_errors():
        next_batch(stage.owner, "c")
