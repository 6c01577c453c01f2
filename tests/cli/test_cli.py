"""The command line: output, exit codes, messages."""

from __future__ import annotations

import importlib
import json
import pkgutil
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import gdq as gdq_library
from gdq import cli
from gdq.cli import main
from gdq.cli.base import split_names, split_table_names
from gdq.cli.sections import SECTIONS
from tests.support.programs import environment, gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import SECONDS, until


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


def test_life_of_a_queue(db: Database) -> None:
    """Every mutation says on stderr what it did, in the past tense; the second time it says already; both exit 0."""
    with db.connect() as connection:
        connection.execute("create table orders (id int primary key, status text)")
    for arguments, first, second in (
        (["create-queue", "q"], "created queue q\n", "already there: queue q\n"),
        (["add-table", "q", "orders"], "added table public.orders to q\n", "already captured: public.orders in q\n"),
        (["register-consumer", "q", "c"], "registered consumer c on q\n", "already registered: c on q\n"),
        (["unregister-consumer", "q", "c"], "unregistered consumer c from q\n", "already gone: c on q\n"),
        (["remove-table", "q", "orders"], "removed table orders from q\n", None),
        (["drop-queue", "q"], "dropped queue q\n", "already gone: queue q\n"),
    ):
        done = gdq(*arguments, dsn=db.dsn)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", first)
        if second is not None:
            done = gdq(*arguments, dsn=db.dsn)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", second)


def test_no_control_character_of_a_name_reaches_the_terminal(db: Database) -> None:
    """It could steer the terminal or forge a line of output; JSON has its own escapes."""
    name = "a\x1b]0;title\x07\nb\r\x9b31m[red]"
    with db.connect() as connection:
        connection.execute(f'create table "{name}" (id int primary key)'.encode())
        connection.execute("select gdq.create_queue('q')")
        connection.execute("select gdq.register_consumer('q', 'c')")
        connection.execute("select gdq.add_table('q', %s::regclass)", [f'public."{name}"'])
        connection.execute(f'alter table "{name}" disable trigger all'.encode())
        connection.execute(f'alter table "{name}" enable trigger all'.encode())
    shown = 0
    for arguments in (["tables"], ["status"], ["consumers"], ["doctor"], ["add-table", "q", f'"{name}"']):
        done = gdq(*arguments, dsn=db.dsn)
        for text in (done.stdout, done.stderr):
            assert not set(text) & {"\x1b", "\x07", "\r", "\x9b"}, arguments
            assert "\nb" not in text, arguments
            shown += "\\x1b]0;title\\x07\\x0ab\\x0d\\x9b31m[red]" in text
    assert shown >= 4
    with db.connect() as connection:
        connection.execute("select gdq.maintain()")
        connection.execute("select gdq.register_consumer('q', 'd')")
        connection.execute(f'insert into "{name}" values (1)'.encode())
    for arguments in (["tables", "--json"], ["status", "--json"], ["consume", "q", "d", "--once"]):
        done = gdq(*arguments, dsn=db.dsn)
        assert not set(done.stdout) & {"\x1b", "\x07", "\r", "\x9b"}, arguments
        assert "\\u009b31m" in done.stdout, arguments
    listed = gdq("tables", "--json", dsn=db.dsn)
    assert json.loads(listed.stdout)[0]["table_name"] == f'public."{name}"'


def test_quiet_says_nothing(db: Database) -> None:
    done = gdq("--quiet", "create-queue", "q", dsn=db.dsn)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_empty_listing_is_an_empty_array(db: Database) -> None:
    assert gdq("queues", "--json", dsn=db.dsn).stdout == "[]\n"


def test_values_in_json(shop: Database) -> None:
    [queue] = json.loads(gdq("queues", "--json", dsn=shop.dsn).stdout)
    assert (queue["queue_name"], queue["tables"], queue["ticker_max_lag_seconds"], queue["retention_seconds"]) == (
        "q",
        2,
        0.1,
        0.0,
    )
    [log, orders] = json.loads(gdq("tables", "q", "--json", dsn=shop.dsn).stdout)
    assert (log["key"], orders["key"]) == (None, ["id"])
    assert (orders["table_name"], orders["mode"], orders["state"]) == ("public.orders", "full", "ok")
    [consumer] = json.loads(gdq("consumers", "q", "--json", dsn=shop.dsn).stdout)
    assert (consumer["lag_seconds"], consumer["unread_events"]) == (0, 0)
    assert consumer["last_seen"].endswith("Z")


def test_queue_settings(db: Database) -> None:
    done = gdq("create-queue", "q", "--set", "ticker_max_count=7", "--set", "retention=1 day", dsn=db.dsn)
    assert done.returncode == 0
    [queue] = json.loads(gdq("queues", "--json", dsn=db.dsn).stdout)
    assert (queue["ticker_max_count"], queue["retention_seconds"]) == (7, 86400.0)


def test_table_options(db: Database) -> None:
    with db.connect() as connection:
        connection.execute(
            "create table t (id int primary key, \"a,b\" text, c int, d int); select gdq.create_queue('q')"
        )
    assert gdq("add-table", "q", "t", "--mode", "pk", "--include", '"a,b", c', dsn=db.dsn).returncode == 0
    [table] = json.loads(gdq("tables", "--json", dsn=db.dsn).stdout)
    assert (table["mode"], table["columns"]) == ("pk", ["id", "a,b", "c"])


def test_tables_of_a_consumer(shop: Database) -> None:
    assert gdq("register-consumer", "q", "some", "--tables", "orders", dsn=shop.dsn).returncode == 0
    listed = json.loads(gdq("consumers", "q", "--json", dsn=shop.dsn).stdout)
    assert [consumer["tables"] for consumer in listed] == [None, ["public.orders"]]


def test_register_at_a_tick(shop: Database) -> None:
    number = gdq("tick", "q", dsn=shop.dsn).stdout.strip()
    assert gdq("register-consumer", "q", "late", "--at", number, dsn=shop.dsn).returncode == 0
    done = gdq("register-consumer", "q", "lost", "--at", "99999", dsn=shop.dsn)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, 'Error: queue "q" has no tick 99999')


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["create-queue", "q", "--set", "speed=9"], "'speed'"),
        (["create-queue", "q", "--set", "retention"], "'retention'"),
        (["register-consumer", "q", "c", "--at", "yesterday"], "'yesterday'"),
        (["add-table"], "TABLE"),
        (["add-table", "q", "t", "--mode", "half"], "half"),
        (["queues", "--dsn", "host=a nonsense"], "the connection string cannot be read"),
        (["consume", "q", "c", "a:b", "--json"], "--json"),
        (["ticker", "--interval", "0"], "0"),
        (["ticker", "--interval", "nan"], "no number of seconds within 1000 years"),
        (["consume", "q", "c", "--dead-after", "inf"], "no number of seconds within 1000 years"),
        (["consume", "q", "c", "--dead-after", "1e15"], "no number of seconds within 1000 years"),
        (["refresh", "--follow", "--interval", "1e300"], "no number of seconds within 1000 years"),
        (["doctor", "--patience", "1e15"], "no number of seconds within 1000 years"),
        (["create-view", "v", "--queue", "q", "--sql", "-", "--target", "t", "--audit", "nan"], "nan is no share"),
        (["nonsense"], "nonsense"),
        (["consum"], "Did you mean one of: 'consume', 'consumers'?"),
    ],
)
def test_wrong_usage_exits_2_and_says_what(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert says in result.output


_OTHER_OPTIONS = "table public.orders is already captured by this queue with other options: mode"

FAILURES = [
    (["tick", "none"], 'queue "none" does not exist'),
    (["add-table", "q", "none"], 'relation "none" does not exist'),
    (["add-table", "q", "orders", "--mode", "pk"], _OTHER_OPTIONS),
    (["drop-queue", "q"], 'queue "q" still has 2 table(s), 1 consumer(s) and 0 view(s)'),
    (["consume", "q", "nobody", "--once"], 'consumer "nobody" is not registered on queue "q"'),
    (["consume", "q", "c", "no_such:f"], "no handler no_such:f: No module named 'no_such'"),
    (["peek", "none"], 'queue "none" does not exist'),
    (["create-queue", "x", "--set", "retention=soon"], 'invalid input syntax for type interval: "soon"'),
]


def test_failure_is_one_line_and_hints(shop: Database) -> None:
    for arguments, message in FAILURES:
        done = gdq(*arguments, dsn=shop.dsn)
        first, *others = done.stderr.splitlines()
        assert (done.returncode, done.stdout, first) == (1, "", f"Error: {message}")
        assert all(line.startswith(("Detail: ", "Hint: ")) for line in others)


def test_ctrl_c_while_modules_are_loaded() -> None:
    """What was loaded by half is not loaded again for the message: that would fail in other ways."""
    program = """
import sys, gdq.cli
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "psycopg.pq":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
gdq.cli.main(["queues"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Error: interrupted\n")


def test_a_shell_completes_names(shop: Database) -> None:
    def completed(words: str) -> set[str]:
        env = {
            "_GDQ_COMPLETE": "bash_complete",
            "COMP_WORDS": f"gdq {words}",
            "COMP_CWORD": str(len(shlex.split(f"{words}."))),
        }
        program = Path(sys.executable).with_name("gdq")
        done = subprocess.run([program], env=environment(shop.dsn) | env, capture_output=True, text=True, check=True)
        return {line.partition(",")[2] for line in done.stdout.split()}

    assert completed("tick ") == {"q"}
    assert completed("consume q ") == {"c"}
    assert completed("add-table q ord") == {"orders"}
    assert completed(f"-d {shlex.quote(shop.dsn)} tick ") == {"q"}
    assert completed("-d dbname=none tick ") == set()


def test_the_connection_stands_before_or_after_the_command(shop: Database) -> None:
    for arguments in (
        ["-d", shop.dsn, "queues"],
        ["queues", "-d", shop.dsn],
        ["-d", "host=/none", "queues", "-d", shop.dsn],
    ):
        assert gdq(*arguments, dsn="host=/nowhere").returncode == 0
    assert gdq("-d", "host", "queues", dsn=shop.dsn).returncode == 2


def test_debug_shows_the_traceback(shop: Database) -> None:
    assert "Traceback" in gdq("--debug", "tick", "none", dsn=shop.dsn).stderr


def test_database_without_gdq(empty_db: Database) -> None:
    done = gdq("queues", dsn=empty_db.dsn)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1] == "Hint: Is gdq installed in this database? gdq install"


def test_another_missing_schema_does_not_hint_at_gdq(shop: Database) -> None:
    with shop.connect() as connection:
        gdq_library.create_view(connection, "v", "q", "select id from orders", "nowhere.v")
    done = gdq("refresh", "v", dsn=shop.dsn)
    assert (done.returncode, done.stderr) == (1, 'Error: schema "nowhere" does not exist\n')


def test_no_server(empty_db: Database) -> None:
    done = gdq("queues", dsn="host=127.0.0.1 port=1")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    unset = {"GDQ_DSN": "", "DATABASE_URL": "", "PGHOST": "127.0.0.1", "PGPORT": "1"}
    done = gdq("queues", dsn="", env=unset)
    first, hint = done.stderr.splitlines()
    assert first.startswith("Error: ")
    assert hint.startswith("Hint: No connection string is set. Set DATABASE_URL")


def test_add_table_waits_for_a_writer_in_short_tries(db: Database) -> None:
    with db.connect() as connection, db.connect(autocommit=False) as writer:
        connection.execute("create table t (id int primary key); select gdq.create_queue('q')")
        writer.execute("insert into t values (1)")
        adding = start_gdq("add-table", "q", "t", dsn=db.dsn)
        query = "select from pg_stat_activity where application_name = 'gdq' and wait_event_type = 'Lock'"
        until(lambda: connection.execute(query).rowcount)
        # Somebody who writes meanwhile gets through, at worst after one try.
        connection.execute("set statement_timeout = '10 min'; insert into t values (2)")
        writer.commit()
        assert adding.communicate(timeout=SECONDS)[1] == "added table public.t to q\n"
        assert adding.returncode == 0


def test_consume_registers(shop: Database) -> None:
    """With --register a consumer that nobody knows gets what is written from then on; nothing else takes ticks."""
    with shop.connect() as connection:
        connection.execute("insert into orders values (1, 'before', 0)")
        consuming = start_gdq("consume", "q", "new", "--register", "--member", "m", dsn=shop.dsn)
        assert consuming.stderr is not None
        assert consuming.stdout is not None
        try:
            assert consuming.stderr.readline() == "registered consumer new on q\n"
            connection.execute("insert into orders values (2, 'after', 0)")
            assert json.loads(consuming.stdout.readline())["new"]["status"] == "after"
        finally:
            consuming.terminate()
            consuming.communicate(timeout=SECONDS)
        assert consuming.returncode == 0
        connection.execute("insert into orders values (3, 'later', 0)")
    again = gdq("consume", "q", "new", "--register", "--member", "m", "--once", dsn=shop.dsn)
    assert [json.loads(line)["key"] for line in again.stdout.splitlines()] == [{"id": 3}]
    assert again.stderr == ""
    assert gdq("consume", "q", "new", "--register", "--source", "slot", dsn=shop.dsn).returncode == 2


def test_warnings_of_the_server_reach_stderr(db: Database) -> None:
    with db.connect() as connection:
        connection.execute("create table t (id int primary key, doc text); select gdq.create_queue('q')")
        connection.execute("alter table t alter doc set storage external")
        connection.execute("insert into t values (1, repeat('x', 100000))")
    done = gdq("add-table", "q", "t", dsn=db.dsn)
    assert done.returncode == 0
    assert done.stderr.startswith("WARNING: table public.t holds large out-of-line values (doc)")


def test_the_list_of_commands_is_complete() -> None:
    """SECTIONS names every command of every module once."""
    found = {}
    for module in pkgutil.iter_modules(cli.__path__, "gdq.cli."):
        values = vars(importlib.import_module(module.name)).values()
        commands = [one for one in values if isinstance(one, click.Command) and one.callback is not None]
        own = {str(one.name) for one in commands if one.callback.__module__ == module.name}
        if own:
            found[module.name.rpartition(".")[2]] = own
    listed = [pair for modules in SECTIONS.values() for pair in modules.items()]
    assert found == {module: set(commands) for module, commands in listed}
    assert len({module for module, _ in listed}) == len(listed)


@pytest.mark.parametrize("width", [60, 80, 110])
def test_the_list_of_commands_has_sections_and_whole_sentences(width: int) -> None:
    done = CliRunner().invoke(main, ["--help"], terminal_width=width)
    lines = done.output.splitlines()
    headings = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings[1:] == list(SECTIONS)
    assert max(map(len, lines)) <= width
    text = " ".join(done.output.split())
    assert "add-table Capture tables from now on: all of them in one transaction, or none" in text
    assert "drop-slot Drop a consumer's slot, and with the last slot the queue's publication" in text


def test_every_command_has_help() -> None:
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        assert command.help, name
        options = {option for parameter in command.params for option in parameter.opts}
        # what a target keeps of replicas needs no source
        there = "replica-" in name and "--to" in options
        assert {"-d", "--dsn"} <= options or there or name in ("demo", "docs"), name


@pytest.mark.parametrize(
    ("text", "parsed"),
    [(None, None), ("a", ["a"]), ("a, b", ["a", "b"]), ('"a,b",c', ["a,b", "c"]), ("Ä b,c%", ["Ä b", "c%"])],
)
def test_names(text: str | None, parsed: list[str] | None) -> None:
    assert split_names(text) == parsed


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (None, None),
        ("orders, public.log", ["orders", "public.log"]),
        ('"Odd, ""one""",public."B c"', ['"Odd, ""one"""', 'public."B c"']),
    ],
)
def test_table_names_keep_their_quotes(text: str | None, parsed: list[str] | None) -> None:
    assert split_table_names(text) == parsed
