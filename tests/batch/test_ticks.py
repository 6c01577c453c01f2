"""When a tick is taken, when it is refused, and who hears of it."""

from __future__ import annotations

import psycopg
import pytest

from gdq.ticker import Housekeeping
from tests.support.schedules import Call, Stage
from tests.support.waiting import SECONDS, until


def refused(connection: psycopg.Connection[object], statement: str) -> str | None:
    """The SQLSTATE of an error."""
    with pytest.raises(psycopg.Error) as error:
        connection.execute(statement.encode())
    return error.value.sqlstate


def ticker(stage: Stage) -> int:
    return int(stage.value("select gdq.ticker('q')"))


def test_nothing_due(stage: Stage) -> None:
    assert ticker(stage) == 0
    stage.insert()
    assert ticker(stage) == 0


def test_due_by_count(stage: Stage) -> None:
    stage.owner.execute("update gdq.queue set ticker_max_count = 3")
    stage.insert()
    stage.insert()
    assert ticker(stage) == 0
    stage.insert()
    assert ticker(stage) == 1
    assert ticker(stage) == 0


def test_due_by_lag(stage: Stage) -> None:
    stage.insert()
    stage.owner.execute("update gdq.queue set ticker_max_lag = '1 ms'")
    until(lambda: ticker(stage) == 1)


def test_due_by_a_lag_of_the_caller(stage: Stage) -> None:
    """Changes of a transaction that was open at the last tick too, whose commit moves no number."""
    soon = "select gdq.ticker('q', lag => '0')"
    assert stage.value(soon) == 0
    stage.insert()
    assert ticker(stage) == 0
    assert stage.value("select gdq.ticker('q', lag => '1 day')") == 0
    assert stage.value(soon) == 1
    assert stage.value(soon) == 0
    late = stage.session()
    late.execute("begin")
    stage.insert(late)
    stage.tick()
    assert stage.value(soon) == 0
    late.execute("commit")
    assert ticker(stage) == 0
    assert stage.value(soon) == 1
    assert stage.value(soon) == 0


def test_ticks_come_as_often_as_one_consumer_needs_them(stage: Stage) -> None:
    """The shortest pace counts, if it is longer than ticker_max_lag: none of a queue without consumers."""

    def tick_lag() -> str:
        lag, *paces = stage.owner.execute(
            """select (select tick_lag::text from gdq.queue_info('q'))
                union all (select pace::text from gdq.consumer_info('q') order by consumer_name)"""
        ).fetchall()
        assert all(len(pace) == 1 for pace in paces)
        return str(lag[0])

    def pace(consumer: str, wanted: str) -> bool:
        return bool(stage.value(f"select gdq.set_pace('q', '{consumer}', {wanted})"))

    stage.owner.execute("select gdq.unregister_consumer('q', consumer_name) from gdq.consumer_info('q')")
    stage.owner.execute("update gdq.queue set ticker_max_lag = '1 ms'")
    assert tick_lag() == "00:00:00.001"
    stage.owner.execute("select gdq.register_consumer('q', 'slow')")
    stage.owner.execute("select gdq.register_consumer('q', 'slower')")
    assert tick_lag() == "00:00:00.001"
    assert pace("slow", "'1 hour'")
    assert not pace("slow", "'1 hour'")
    assert tick_lag() == "00:00:00.001", "the other one needs ticks at once"
    assert pace("slower", "'2 hours'")
    assert tick_lag() == "01:00:00"
    stage.tick()
    stage.insert()
    assert stage.value("select made = 0 and due > 3000 from gdq.tick_step('q')")
    assert stage.value("select gdq.ticker('q', lag => '0')") == 1, "a caller who waits has its ticks all the same"
    stage.insert()
    assert pace("slow", "'1 ms'")
    until(lambda: ticker(stage) == 1)
    assert pace("slow", "'3 hours'")
    assert tick_lag() == "02:00:00"
    stage.owner.execute("update gdq.queue set ticker_max_lag = '1 day'")
    assert tick_lag() == "1 day"
    assert pace("slow", "null")
    assert not pace("slow", "'0'")
    assert refused(stage.owner, "select gdq.set_pace('q', 'slow', '-1 s')") == "22023"
    assert refused(stage.owner, "select gdq.set_pace('q', 'nobody', '1 s')") == "42704"
    stage.owner.execute("select gdq.unregister_consumer('q', 'slow'), gdq.unregister_consumer('q', 'slower')")
    assert stage.value("select count(*) from gdq.subscription_pace") == 0


def test_one_tick_for_a_caller_who_waits_for_changes(stage: Stage) -> None:
    """The next one is due at once, as under a writer that is faster than ticks are taken."""
    stage.owner.execute("update gdq.queue set ticker_idle_period = '1 us'")
    assert Housekeeping("q", lag=0.001).step(stage.owner) == 1


def test_a_lag_of_the_caller_waits_for_what_can_be_seen(stage: Stage) -> None:
    """A tick that only counts a transaction that is still open would be a batch without changes."""
    soon = "select gdq.ticker('q', lag => '0')"
    writer = stage.session()
    writer.execute("begin")
    stage.insert(writer)
    assert stage.value(soon) == 0
    stage.insert()
    assert stage.value(soon) == 1, "another transaction's change is there"
    writer.execute("commit")
    assert stage.value(soon) == 1
    writer.execute("begin")
    stage.insert(writer)
    assert stage.value(soon) == 0
    stage.owner.execute("update gdq.queue set ticker_max_lag = '1 ms'")
    until(lambda: stage.value(soon) == 1, "a tick after ticker_max_lag, whatever is open")


def test_no_tick_by_lag_without_changes(stage: Stage) -> None:
    stage.owner.execute("update gdq.queue set ticker_max_lag = '0'")
    stage.owner.execute("create table not_captured ()")
    assert ticker(stage) == 0


def test_due_by_idle_period(stage: Stage) -> None:
    stage.owner.execute("update gdq.queue set ticker_idle_period = '1 ms'")
    until(lambda: ticker(stage) == 1)


@pytest.mark.server
@pytest.mark.parametrize("newest", [True, False])
def test_writer_that_commits_on_an_idle_queue_is_delivered(stage: Stage, newest: bool) -> None:
    """Its numbers were given out before the last tick, so its commit moves no number."""
    late = stage.session()
    late.execute("begin")
    stage.insert(late)
    if not newest:
        stage.owner.execute("create table not_captured ()")
    stage.tick()
    stage.consume()
    stage.owner.execute("update gdq.queue set ticker_max_lag = '0'")
    assert ticker(stage) == 0
    late.execute("commit")
    assert ticker(stage) == 1
    stage.consume()
    assert len(stage.scene.check(stage.owner)) == 1
    assert ticker(stage) == 0


NEED_FRESH_SNAPSHOTS = (
    "force_tick('q')",
    "ticker()",
    "tick_step()",
    "maintain()",
    "check_tables()",
    "truncate_segment(1, null, 'acct')",
    "register_consumer('q', 'd')",
    "next_batch('q', 'c')",
    "next_events('q', 'c')",
    "finish_batch(1, gen_random_uuid())",
    "retry_event(1, gen_random_uuid(), 1)",
    "begin_refresh('q', 'c')",
    "add_tick('q', pg_current_snapshot())",
    "set_position('q', 'c', gen_random_uuid(), pg_current_snapshot())",
    "seek('q', 'c', at_tick => 1)",
    "resynced('q', 'c', 'acct', pg_current_snapshot())",
    "set_tables('q', 'c', '{acct}')",
    "create_queue('r')",
    "add_table('q', 'acct')",
    "alter_table_options('q', 'acct', '{}')",
    "remove_table('q', 'acct')",
    "apply_ddl('q', 'select 1')",
    "rebase()",
)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_refused_in_an_old_snapshot(stage: Stage, level: str) -> None:
    """It would show another worker's position as unchanged, or a row committed since as missing."""
    session = stage.session()
    answers = {}
    for call in NEED_FRESH_SNAPSHOTS:
        session.execute(f"begin isolation level {level}".encode())
        answers[call] = refused(session, f"select gdq.{call}")
        session.execute("rollback")
    assert answers == dict.fromkeys(NEED_FRESH_SNAPSHOTS, "GDQ04")


def test_refused_in_a_transaction_that_has_written(stage: Stage) -> None:
    """Its own snapshot would count it as finished, and its later changes would be lost."""
    session = stage.session()
    for call in ("force_tick('q')", "ticker()", "tick_step()", "register_consumer('q', 'd')"):
        session.execute("begin")
        stage.insert(session)
        assert refused(session, f"select gdq.{call}") == "GDQ04"
        session.execute("rollback")


def test_changes_after_a_tick_in_its_own_transaction(stage: Stage) -> None:
    session = stage.session()
    session.execute("begin; select gdq.force_tick('q')")
    stage.insert(session)
    session.execute("commit")
    stage.consume()
    stage.finish()


def test_one_notification_each(stage: Stage) -> None:
    listener = stage.session()
    queue_id = stage.value("select queue_id from gdq.queue")
    listener.execute(f"listen gdq_{queue_id}".encode())
    made = [stage.value("select gdq.force_tick('q')") for _ in range(3)]
    stage.insert()
    heard = [notify.payload for notify in listener.notifies(timeout=SECONDS, stop_after=3)]
    assert heard == [str(tick) for tick in made]
    assert not list(listener.notifies(timeout=0.1))


def test_ticker_leaves_a_queue_to_another_ticker(stage: Stage) -> None:
    stage.insert()
    stage.owner.execute("update gdq.queue set ticker_max_lag = '0'")
    other = stage.session()
    other.execute("begin; select gdq.force_tick('q')")
    assert ticker(stage) == 0
    forced = Call(stage.session(), "select gdq.force_tick('q')")
    stage.settled(forced)
    assert not forced.done
    other.execute("commit")
    forced.join()
    stage.finish()


def test_ticker_serves_all_queues(stage: Stage) -> None:
    stage.owner.execute("select gdq.create_queue('r', ticker_idle_period => '1 ms')")
    stage.owner.execute("update gdq.queue set ticker_idle_period = '1 ms'")
    before = {name for (name,) in stage.owner.execute("select max(tick_id) from gdq.tick group by queue_id")}
    made: list[int] = []
    while sum(made) < 2:
        made.append(stage.value("select gdq.ticker()"))
    after = {name for (name,) in stage.owner.execute("select max(tick_id) from gdq.tick group by queue_id")}
    assert set(made) <= {0, 1}
    assert len(after - before) == 2


def test_server_that_lost_its_tail(stage: Stage) -> None:
    stage.owner.execute(
        "insert into gdq.tick (queue_id, snapshot, event_seq) select queue_id, '900000000:900000000:', 0 from gdq.queue"
    )
    assert refused(stage.owner, "select gdq.force_tick('q')") == "55000"


@pytest.mark.server
def test_first_tick_does_not_pass_older_writers(stage: Stage) -> None:
    """A queue is made while transactions with lower ids than its own are running and none above has ended."""
    sessions = [stage.session() for _ in range(3)]
    for session in sessions:
        session.execute("begin; select pg_current_xact_id()")
    stage.owner.execute("begin; select pg_current_xact_id(); select gdq.create_queue('r'); commit")
    open_then = [session.execute("select pg_current_xact_id()::text::bigint").fetchone() for session in sessions]
    query = """select bool_or(pg_visible_in_snapshot(x::text::xid8, t.snapshot))
                 from gdq.tick t join gdq.queue using (queue_id), unnest(%s::bigint[]) x where queue_name = 'r'"""
    assert stage.value(query, [row[0] for row in open_then if row]) is False


def test_old_ticks_are_trimmed_but_not_those_still_needed(stage: Stage) -> None:
    stage.owner.execute("update gdq.queue set retention = '30 min'")
    for minutes in (90, 80, 40, 20, 1):
        tick = stage.value("select gdq.force_tick('q')")
        stage.owner.execute(
            "update gdq.tick set created_at = created_at - make_interval(mins => %s) where tick_id = %s",
            [minutes, tick],
        )
        if minutes == 80:
            needed = stage.value("select min(tick_id) from gdq.position")
    ages = "select array_agg(round(extract(epoch from now() - created_at) / 60)::int order by tick_id) from gdq.tick"
    for _ in range(2):
        stage.owner.execute("select gdq.rotate_control(true, 1)")
    assert stage.value("select min(tick_id) from gdq.tick") == needed
    stage.consume()
    for _ in range(2):
        stage.owner.execute("select gdq.rotate_control(true, 1)")
    assert stage.value(ages) == [40, 20, 1]


def test_ticks_and_rotation_go_on_when_the_clock_was_set_back(stage: Stage) -> None:
    """What was stored before lies in the future."""
    for table in ("tick", "log_ring", "event_ring"):
        column = "created_at" if table == "tick" else "switched_at"
        stage.owner.execute(f"update gdq.{table} set {column} = {column} + interval '1 hour'".encode())
    silent = "select count(*) from gdq.doctor() where code = 'ticker_silent' and cause ~ 'in the future'"
    assert stage.value(silent) == 1
    assert stage.value("select gdq.ticker('q')") == 1
    assert stage.value(silent) == 0
    stage.insert()
    before = stage.slot()
    stage.owner.execute("select gdq.rotate_logs()")
    assert stage.slot() != before


def test_intervals_of_a_queue_have_an_upper_bound(stage: Stage) -> None:
    """A time plus the interval must be a time."""
    for setting in ("ticker_max_lag", "ticker_idle_period", "rotation_period", "retention"):
        query = f"select gdq.set_queue('q', {setting} => interval '178000000 years')"
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=f"setting {setting} of queue"):
            stage.owner.execute(query.encode())
        stage.owner.execute(query.replace("178000000", "1000").encode())
    stage.owner.execute("select gdq.tick_step('q')")
    stage.owner.execute("select gdq.maintain()")
    assert stage.value("select count(*) from gdq.doctor() where severity = 'error'") == 0
    failed = "select count(*) from gdq.doctor(patience => '178000000 years') where code = 'check_failed'"
    assert stage.value(failed) == 0
