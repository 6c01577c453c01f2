"""`gdq consume` and `gdq ticker` as processes: output, handlers, signals and cut connections."""

from __future__ import annotations

import json
import select
import signal
import subprocess
from datetime import UTC
from pathlib import Path

import pytest

from gdq import Consumer
from tests.support.consumed import consumed, insert, seen
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import SECONDS, until


def test_consume_prints_json_lines(shop: Database) -> None:
    insert(shop, 1, 2)
    with shop.connect() as connection:
        connection.execute("update orders set note = 'Zoë \"q\"' where id = 2")
    done = gdq("consume", "q", "c", "--once", dsn=shop.dsn)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(event) for event in events] == [["id", "xid", "time", "op", "table", "key", "old", "new"]] * 3
    assert [event["op"] for event in events] == ["insert", "insert", "update"]
    assert events[2]["new"] == {"id": 2, "note": 'Zoë "q"'}
    assert events[0]["time"].endswith("Z")
    done = gdq("consume", "q", "c", "--once", "--json", dsn=shop.dsn)
    assert (done.returncode, done.stdout) == (0, "")


def test_consume_prints_json_lines_where_stdout_is_not_utf8(shop: Database) -> None:
    """A letter that stdout's encoding lacks is written as JSON writes it, and arrives."""
    note = "Zoë 雪 😀"
    with shop.connect() as connection:
        connection.execute("insert into orders values (1, %s)", [note])
    done = gdq("consume", "q", "c", "--once", dsn=shop.dsn, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert json.loads(done.stdout)["new"] == {"id": 1, "note": note}
    assert consumed(shop) == []


HANDLERS = """
import logging, urllib.error
def store(connection, events):
    for event in events:
        connection.execute("insert into seen values (%s, %s)", [event.id, event.op])
def fail(connection, events):
    store(connection, events)
    raise LookupError("no such shelf")
def offline(connection, events):
    raise urllib.error.URLError("no network")
def misspelt(connection, events):
    connection.execute("select from sen")
def lazy(connection, events):
    yield {}["shelf"]
def number(connection, events):
    store(connection, events)
    return 7
def commit(connection, events):
    connection.commit()
async def later(connection, events):
    pass
class Awaited:
    async def __call__(self, connection, event):
        pass
awaited = Awaited()
rows = [1]
def alone(batch):
    pass
def logged(connection, events):
    logging.getLogger("shop.mail").info("stored %s", len(list(events)))
    logging.getLogger("shop").debug("nothing")
    logging.error('it "rains"')
def timed(connection, events):
    store(connection, events)
    connection.execute("set local statement_timeout = 1")
    connection.execute("select pg_sleep(60)")
def timed_event(connection, event):
    timed(connection, [event])
def slow(connection, events):
    store(connection, events)
    print("stored", flush=True)
    connection.execute("select pg_sleep(2)")
def generated(connection, events):
    exec("slow(connection, events)")
"""


@pytest.fixture
def handlers(tmp_path: Path) -> Path:
    """A folder with the module shop_handlers, as the current folder of `gdq consume`."""
    (tmp_path / "shop_handlers.py").write_text(HANDLERS)
    return tmp_path


def test_handler_writes_in_the_transaction_of_the_batch(shop: Database, handlers: Path) -> None:
    insert(shop, 1, 3)
    for _ in range(2):
        done = gdq("consume", "q", "c", "shop_handlers:store", "--once", dsn=shop.dsn, cwd=handlers)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert seen(shop) == 3


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        ("fail", "shop_handlers:fail (shop_handlers.py, line 8): LookupError: no such shelf"),
        ("offline", "shop_handlers:offline (shop_handlers.py, line 10): URLError: <urlopen error no network>"),
        (
            "misspelt",
            'shop_handlers:misspelt (shop_handlers.py, line 12): UndefinedTable: relation "sen" does not exist',
        ),
        ("lazy", "shop_handlers:lazy (shop_handlers.py, line 14): KeyError: 'shelf'"),
        ("number", "shop_handlers:number returned 7"),
        ("commit", "shop_handlers:commit (shop_handlers.py, line 19): ProgrammingError: Explicit commit() forbidden"),
    ],
)
def test_handler_error_rolls_back_and_exits_1(shop: Database, handlers: Path, handler: str, says: str) -> None:
    """The last line names the handler, the line in its file, and the error, also of a server or of a network."""
    insert(shop, 1, 3)
    done = gdq("consume", "q", "c", f"shop_handlers:{handler}", "--once", dsn=shop.dsn, cwd=handlers)
    assert done.returncode == 1
    last = [line for line in done.stderr.splitlines() if not line.startswith("Hint: ")][-1]
    assert last.startswith(f"Error: handler {says}"), done.stderr
    assert seen(shop) == 0
    assert len(consumed(shop)) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["shop_handlers:later"], "handler shop_handlers:later is an async function"),
        (["shop_handlers:awaited", "--each"], "handler shop_handlers:awaited is an async function"),
        (["shop_handlers:lazy", "--each"], "handler shop_handlers:lazy is a generator"),
        (["shop_handlers:rows"], "handler shop_handlers:rows is not a function"),
        (["broken:f"], "handler broken:f cannot be loaded: ZeroDivisionError: division by zero"),
        (["shop_handlers"], "no handler shop_handlers"),
        (["shop_handlers:alone"], "handler shop_handlers:alone does not take two arguments"),
        (["shop_handlers:stor"], "no handler shop_handlers:stor: module 'shop_handlers' has no attribute 'stor'"),
    ],
)
def test_a_handler_that_cannot_be_called_is_refused(
    shop: Database, handlers: Path, arguments: list[str], says: str
) -> None:
    insert(shop, 1, 1)
    (handlers / "broken.py").write_text("1 / 0")
    done = gdq("consume", "q", "c", *arguments, "--once", dsn=shop.dsn, cwd=handlers)
    assert done.returncode == 1
    assert f"Error: {says}" in [line.partition(" (")[0] for line in done.stderr.splitlines()]
    assert len(consumed(shop)) == 1


def test_a_handler_that_is_named_by_its_file(shop: Database, handlers: Path) -> None:
    done = gdq("consume", "q", "c", "shop_handlers.py:store", "--once", dsn=shop.dsn, cwd=handlers)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Hint: Write shop_handlers:store, as in import."


@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_what_a_handler_logs_is_shown(shop: Database, handlers: Path, options: tuple[str, ...]) -> None:
    insert(shop, 1, 1)
    done = gdq(*options, "consume", "q", "c", "shop_handlers:logged", "--once", dsn=shop.dsn, cwd=handlers)
    assert done.returncode == 0, done.stderr
    lines = [line.partition(" ")[2] for line in done.stderr.splitlines()]
    shown = ['level=info msg="stored 1"', 'level=error msg="it \\"rains\\""']
    assert lines == (shown[1:] if options else shown)


@pytest.mark.parametrize("handler", [("timed",), ("timed_event", "--each")])
def test_timeout_of_the_handlers_own_statement_ends_the_command(
    shop: Database, handlers: Path, handler: tuple[str, ...]
) -> None:
    """Where gdq's own statements are tried again, the handler's would fail for ever."""
    insert(shop, 1, 1)
    name, *options = handler
    done = gdq("consume", "q", "c", f"shop_handlers:{name}", *options, dsn=shop.dsn, cwd=handlers)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("QueryCanceled: canceling statement due to statement timeout")
    assert seen(shop) == 0


def run_until(process: subprocess.Popen[str], text: str) -> None:
    """Read lines of the program's output until one holds the text."""
    assert process.stdout is not None
    while select.select([process.stdout], [], [], SECONDS)[0]:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        if text in line:
            return
    raise AssertionError(f"no {text!r}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_finishes_the_batch(shop: Database, handlers: Path, number: signal.Signals) -> None:
    insert(shop, 1, 3)
    process = start_gdq("consume", "q", "c", "shop_handlers:slow", dsn=shop.dsn, cwd=handlers)
    run_until(process, "stored")
    process.send_signal(number)
    assert process.wait(SECONDS) == 0, process.communicate()[1]
    assert process.communicate() == ("", "")
    assert seen(shop) == 3
    assert consumed(shop) == []


@pytest.mark.parametrize("handler", ["slow", pytest.param("generated", id="within exec")])
def test_a_second_signal_rolls_back(shop: Database, handlers: Path, handler: str) -> None:
    """Python would end itself by SIGINT, not with an exit code, after Ctrl-C in code that is made of a text."""
    insert(shop, 1, 3)
    process = start_gdq("consume", "q", "c", f"shop_handlers:{handler}", dsn=shop.dsn, cwd=handlers)
    run_until(process, "stored")
    process.send_signal(signal.SIGTERM)
    with shop.connect() as connection:
        query = "select from pg_stat_activity where application_name = 'gdq:q/c' and query like '%%pg_sleep%%'"
        until(lambda: connection.execute(query).rowcount == 1)
    # Another number: two signals of one number within a moment are one.
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (130, "Error: interrupted: the batch at hand was rolled back\n")
    assert seen(shop) == 0
    assert len(consumed(shop)) == 3


def test_a_waiting_consumer_ends_at_once(shop: Database) -> None:
    process = start_gdq("consume", "q", "c", dsn=shop.dsn)
    with shop.connect() as connection:
        query = "select from pg_stat_activity where application_name = 'gdq:q/c'"
        until(lambda: connection.execute(query).rowcount == 1)
    insert(shop, 1, 1)
    run_until(process, '"op": "insert"')
    process.terminate()
    assert process.wait(SECONDS) == 0
    assert process.communicate()[1] == ""


def test_a_cut_connection_is_made_again(shop: Database) -> None:
    process = start_gdq("consume", "q", "c", dsn=shop.dsn)
    insert(shop, 1, 1)
    run_until(process, '"id": 1')
    with shop.connect("su") as su:
        query = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'gdq:q/c'"
        assert su.execute(query).rowcount == 1
    insert(shop, 2, 2)
    run_until(process, '"n2"')
    process.terminate()
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert errors.count("connection lost") == 1
    assert errors.count("connected again") == 1


def test_a_consumer_that_was_unregistered_is_not_made_again(shop: Database) -> None:
    """After a lost connection --register would begin with a later change than the last one that was consumed."""
    process = start_gdq("consume", "q", "late", "--register", "--member", "x", dsn=shop.dsn)
    assert process.stderr is not None
    assert process.stderr.readline() == "registered consumer late on q\n"
    assert process.stderr.readline() == "registered consumer late/x on q\n"
    insert(shop, 1, 1)
    run_until(process, '"id": 1')
    with shop.connect("su") as su, su.transaction():
        su.execute("select gdq.unregister_consumer('q', 'late')")
        su.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'gdq:q/late/x'")
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert errors.splitlines()[-2] == 'Error: consumer "late" is not registered on queue "q"', errors


def test_ticker_ends_by_signal_and_survives_a_cut(shop: Database) -> None:
    process = start_gdq("ticker", dsn=shop.dsn)
    with shop.connect("su") as su:
        # at work: a first connection that is lost before that is not tried again
        query = """select pg_terminate_backend(pid) from pg_stat_activity
                    where application_name = 'gdq ticker' and query ~ 'gdq.tick_step'"""
        until(lambda: su.execute(query).rowcount == 1)
        last = "select max(tick_id) from gdq.tick"
        before = su.execute(last).fetchone()
        insert(shop, 1, 1)
        until(lambda: su.execute(last).fetchone() != before)
    process.terminate()
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert errors.count("connected again") == 1


def test_ticker_once_leaves_nothing_due(shop: Database) -> None:
    with shop.connect() as connection:
        insert(shop, 1, 1000)
        assert gdq("ticker", "--once", dsn=shop.dsn).returncode == 0
        assert connection.execute("select gdq.ticker()").fetchone() == (0,)
        assert connection.execute("select gdq.maintain()").fetchone() == (False,)


def test_time_is_utc(shop: Database) -> None:
    insert(shop, 1, 1)
    with Consumer(shop.dsn, "q", "c") as consumer:
        [event] = [event for batch in consumer.batches(once=True) for event in batch.events()]
    assert event.time.astimezone(UTC).utcoffset() is not None
