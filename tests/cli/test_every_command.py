"""Every command where something is wrong: one clear line, the right exit code, no traceback."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from gdq.cli import main
from tests.support.programs import start_gdq
from tests.support.server import Database
from tests.support.waiting import SECONDS

# Arguments with which each command works on the shop. In capitals: a name that the database must have.
COMMANDS = {
    "add-sequence": "Q SEQUENCE",
    "add-table": "Q OTHER",
    "alter-group": "GROUP --add VIEW",
    "alter-table": "Q TABLE --mode pk",
    "alter-view": "VIEW --audit off",
    "apply-ddl": "Q -f FILE",
    "check-position": "Q POSITION",
    "compare": "--tables orders --seconds 1",
    "compare-tables": "--tables TABLE --to TO",
    "consume": "Q C --once",
    "consumers": "Q",
    "create-event-triggers": "",
    "create-group": "new VIEW",
    "create-queue": "new",
    "create-slot": "Q new TABLE",
    "create-view": "new --queue Q --sql FILE --target public.new",
    "dead-letters": "Q C",
    "demo": "--no-spark",
    "docs": "",
    "doctor": "Q",
    "drop-group": "GROUP",
    "drop-mirror": "Q C",
    "drop-queue": "Q --force",
    "drop-replica": "Q C --to TO",
    "drop-slot": "Q C",
    "drop-view": "VIEW",
    "explain-view": "VIEW",
    "groups": "",
    "insert-event": "Q kind 1",
    "install": "",
    "members": "Q C",
    "metrics": "Q --once",
    "mirror": "Q public.orders --target delta:lake",
    "mirrors": "",
    "pause": "Q C",
    "peek": "Q C",
    "position": "Q C",
    "purge-dead-letters": "Q C --all",
    "purge-replica-dead-letters": "mirror --to TO --all",
    "queues": "",
    "rebase": "Q",
    "relay": "Q C http://127.0.0.1:1/ --once",
    "refresh": "VIEW",
    "register-consumer": "Q new",
    "remove-sequence": "Q SEQUENCE",
    "remove-table": "Q TABLE",
    "repair-tables": "--tables TABLE --to TO",
    "replay-dead-letters": "Q C --all",
    "replay-replica-dead-letters": "mirror --to TO --all",
    "replica-conflicts": "mirror --to TO",
    "replica-dead-letters": "mirror --to TO",
    "replica-skips": "mirror --to TO",
    "replicas": "--to TO",
    "replicate": "Q new --to TO",
    "resume": "Q C",
    "resynced": "Q C TABLE --snapshot 1:1:",
    "retries": "Q C",
    "seek": "Q C --now",
    "sequences": "Q",
    "set-queue": "Q rotation_period=1min",
    "set-retry-limit": "Q C 3",
    "set-tables": "Q C TABLE",
    "skip-replica-changes": "Q mirror --to TO --tick 1",
    "slots": "",
    "snapshot": "TABLE --to TO",
    "spool": "Q spool --once",
    "status": "Q",
    "switchover": "Q mirror --to TO --check",
    "tables": "Q",
    "tick": "Q",
    "ticker": "--once",
    "top": "--once",
    "uninstall": "--yes",
    "unregister-consumer": "Q C",
    "verify-view": "VIEW",
    "view-history": "VIEW",
    "views": "",
}
NAMES = {
    "Q": "q", "C": "c", "TABLE": "orders", "OTHER": "log", "SEQUENCE": "number", "VIEW": "total", "GROUP": "night",
    "POSITION": "1", "FILE": "query.sql", "TO": "host=127.0.0.1 port=1",
}  # fmt: skip


def words(command: str, **others: str) -> list[str]:
    """The command with its arguments; `others`: other names for those of NAMES."""
    return [command, *((NAMES | others).get(word, word) for word in COMMANDS[command].split())]


# Commands that need no server, demo, which has one of its own, and metrics, which goes on without and says so.
WITHOUT_SERVER = ("demo", "docs", "metrics")
# Slots are the cluster's, which anyone sees; a target without replicas has none to hide.
REPLICA_NOTES = (
    "replica-conflicts",
    "replica-skips",
    "replica-dead-letters",
    "replay-replica-dead-letters",
    "purge-replica-dead-letters",
)
NO_RIGHT_NEEDED = ("drop-slot", "slots", "replicas", *REPLICA_NOTES, *WITHOUT_SERVER)
# Commands for which an object that does not exist is no error: there is nothing left to do.
GONE = {
    ("drop-group", "GROUP"), ("drop-queue", "Q"), ("drop-slot", "Q"), ("drop-slot", "C"), ("drop-view", "VIEW"),
    ("drop-replica", "Q"), ("drop-replica", "C"), ("drop-mirror", "C"),
    ("remove-sequence", "SEQUENCE"), ("unregister-consumer", "C"),
}  # fmt: skip


def test_each_command_is_looked_at() -> None:
    assert sorted(COMMANDS) == sorted(main.list_commands(click.Context(main)))


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option(command: str) -> None:
    result = CliRunner().invoke(main, [*words(command), "--no-such-option"])
    assert result.exit_code == 2
    assert "Error: No such option '--no-such-option'" in result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with the file that some commands read."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / NAMES["FILE"]).write_text("select id, count(*) from orders group by id")
    with chdir(folder):
        yield folder


@pytest.fixture(scope="module")
def shop(module_db: Database, folder: Path) -> Database:
    """A queue q that captures orders, with the consumer c, the view total and the group night."""
    with module_db.connect() as owner:
        owner.execute("create table orders (id int primary key, status text); create table log (line text)")
        owner.execute("create sequence number")
        owner.execute("select gdq.create_queue('q')")
        owner.execute("select gdq.add_table('q', 'orders')")
        owner.execute("select gdq.register_consumer('q', 'c')")
    assert run(module_db.dsn, "create-view", "total", *words("create-view")[2:-1], "public.total").exit_code == 0
    assert run(module_db.dsn, "create-group", "night", "total").exit_code == 0
    return module_db


def run(dsn: str, *arguments: str) -> Result:
    """The command in this process; what it raises but SystemExit is the test's failure."""
    result = CliRunner().invoke(main, ["-d", dsn, *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in WITHOUT_SERVER])
def test_a_dead_server(folder: Path, command: str) -> None:
    result = run("host=127.0.0.1 port=1", *words(command))
    assert result.exit_code == 1
    assert result.output.startswith('Error: connection failed: connection to server at "127.0.0.1", port 1 failed')
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in NO_RIGHT_NEEDED])
def test_a_missing_right(shop: Database, command: str) -> None:
    """A role that may only connect learns what it lacks."""
    result = run(shop.app_dsn, *words(command, TO=shop.app_dsn))
    first, *others = result.output.splitlines()
    assert result.exit_code == 1
    assert re.match(
        "Error: (permission denied|schema gdq belongs to role gdq_owner|role app has no REPLICATION"
        "|this role may not read the logs|schema gdq_target is not as gdq makes it: it belongs to gdq_owner)",
        first,
    )
    assert all(line.startswith(("Detail: ", "Hint: ")) for line in others)


MISSING = [(command, name) for command, arguments in COMMANDS.items() for name in NAMES if name in arguments.split()]


@pytest.mark.parametrize(
    ("command", "name"),
    # a slot needs a right that comes first
    [
        pair
        for pair in MISSING
        if pair[1] not in ("FILE", "POSITION", "TO") and pair[0] not in ("create-slot", *WITHOUT_SERVER)
    ],
)
def test_a_missing_object(shop: Database, command: str, name: str) -> None:
    """One line says which object does not exist, a hint names the one that was meant."""
    wrong = NAMES[name] + "x"
    result = run(shop.dsn, *words(command, **{"TO": shop.server.conninfo(), name: wrong}))
    first, *others = result.output.splitlines()
    if (command, name) in GONE:
        assert (result.exit_code, others) == (0, [])
        assert first.startswith("already gone: ")
    else:
        assert result.exit_code == 1
        assert re.match(f'Error: .*"{wrong}" (does not exist|is not registered)', first)
        assert re.search(f"Did you mean the [a-z]+ {NAMES[name]}[?]$", others[-1])


@pytest.mark.parametrize("command", [command for command, name in MISSING if name == "FILE"])
def test_a_missing_file(shop: Database, command: str) -> None:
    result = run(shop.dsn, *words(command, FILE="none.sql"))
    assert result.exit_code == 2
    assert "'none.sql': No such file or directory" in result.output.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    "commands", [[name for name in COMMANDS if name not in ("demo", "docs")][part::8] for part in range(8)]
)
def test_an_interrupted_command(folder: Path, commands: list[str]) -> None:
    """Ctrl-C while a server does not answer ends each command at once, as a shell expects it, without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        for command in commands:
            dsn = f"host=127.0.0.1 port={server.getsockname()[1]} connect_timeout={SECONDS}"
            process = start_gdq(*words(command, TO=dsn), dsn=dsn, cwd=folder)
            with server.accept()[0]:
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=SECONDS)
            assert (command, process.returncode) == (command, 130)
            assert re.fullmatch("Error: interrupted(: .*)?\n", errors)
