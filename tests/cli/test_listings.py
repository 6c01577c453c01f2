"""Every listing: a table of at most ten columns, --wide for all, --json for programs."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from gdq.cli import listing, main
from gdq.cli.listing import cell, heading
from tests.support.programs import environment, gdq
from tests.support.server import Database
from tests.support.waiting import SECONDS

_CONTEXT = click.Context(main)
# All but those that change a replica, which needs another database with the tables.
LISTINGS = [
    name
    for name in main.list_commands(_CONTEXT)
    if name not in ("mirror", "replicate", "skip-replica-changes", "switchover")
    and any(parameter.name == "shape" for parameter in main.commands[name].params)
]
# TO: a connection string of a target.
ARGUMENTS = {
    "view-history": ["v"],
    "verify-view": ["v"],
    "replica-conflicts": ["--to", "TO"],
    "replica-dead-letters": ["--to", "TO"],
    "replica-skips": ["--to", "TO"],
    "replicas": ["--to", "TO"],
}
# No slots, no restored queues, no mirrors and no replicas in the test's database.
EMPTY = {"slots", "rebase", "mirrors", "replicas", "replica-conflicts", "replica-dead-letters", "replica-skips"}

# A name, and a reason of an error, that would steer a terminal.
_HOSTILE = "a\x1b[31m\nb"
_HANDLER = f"""
import gdq

def handle(connection, event):
    raise (gdq.Retry if event.key["id"] == 1 else gdq.DeadLetter)({_HOSTILE!r})
"""


@pytest.fixture(scope="module")
def modules_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handlers")
    (folder / "wrong.py").write_text(_HANDLER, encoding="utf-8")
    return folder


@pytest.fixture
def shop(db: Database, modules_folder: Path) -> Database:
    """A queue of which every listing but those of slots and restores has a row."""
    with db.connect() as connection:
        for statement in (
            f'create table orders (id int primary key, note text); create table "{_HOSTILE}" (id int primary key)',
            "create sequence numbers; select gdq.create_queue('q')",
            f"""select gdq.add_table('q', 'orders'), gdq.add_table('q', '"{_HOSTILE}"')""",
            "select gdq.add_sequence('q', 'numbers')",
            "select gdq.register_consumer('q', 'c')",
            "select gdq.register_consumer('q', 'd')",
            "select gdq.register_member('q', 'd', 'm')",
            "insert into orders values (1, 'x'), (2, E'\\x1b[31m')",
        ):
            connection.execute(statement.encode())
    made = ["create-view", "v", "--sql", "-", "--target", "public.v"]
    for arguments in (["consume", "c", "--once"], made, ["create-group", "g", "v"], ["refresh"]):
        more = ["-q", "q", "wrong:handle", "--each"] if arguments[0] == "consume" else []
        done = gdq(*arguments, *more, dsn=db.dsn, stdin="select id, note from orders", cwd=modules_folder)
        assert done.returncode == 0, done.stderr
    with db.connect() as connection:
        connection.execute("insert into orders values (4, E'\\x1b]0;title\\x07')")
    return db


def run(shop: Database, *arguments: str) -> str:
    done = CliRunner().invoke(main, arguments, env={"GDQ_DSN": shop.dsn})
    assert done.exit_code == 0, done.output
    return done.stdout


def columns_of(text: str) -> list[str]:
    return re.split(r" {2,}", text.splitlines()[0].strip())


def control_characters(text: str) -> set[str]:
    return {character for character in text if character != "\n" and not character.isprintable()}


def test_every_listing(shop: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are tried, also one that is added later."""
    assert {"queues", "tables", "consumers", "members", "views", "view-history", "groups", "slots"} <= set(LISTINGS)
    monkeypatch.setenv("COLUMNS", "80")
    for name in LISTINGS:
        arguments = [name, *(shop.dsn if word == "TO" else word for word in ARGUMENTS.get(name, []))]
        parsed = json.loads(run(shop, *arguments, "--json"))
        assert isinstance(parsed, list), name
        assert bool(parsed) == (name not in EMPTY), name
        text, wide = run(shop, *arguments), run(shop, *arguments, "--wide")
        if parsed:
            assert len(columns_of(text)) <= 10, name
            assert len(columns_of(wide)) == len(parsed[0]), name
            assert len(text.splitlines()) == len(parsed) + 1, name
        with monkeypatch.context() as terminal:
            terminal.setattr(listing, "on_terminal", lambda: True)
            shown = run(shop, *arguments)
        assert max((len(line) for line in shown.splitlines()), default=0) <= 80, name
        for output in (text, wide, shown):
            assert not control_characters(output), name


@pytest.mark.long
def test_a_listing_fits_a_terminal(shop: Database) -> None:
    """A queue, a consumer and a view in one line each, without a folded cell."""
    for name, rows in (("queues", 1), ("consumers", 3), ("views", 1), ("members", 1), ("groups", 1)):
        lines = run(shop, name).splitlines()
        assert len(lines) == rows + 1
        assert max(map(len, lines)) <= 80, name


@pytest.mark.long
def test_on_a_terminal(shop: Database) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "gdq", "queues"]
    env = environment(shop.dsn) | {"COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen(command, env=env, stdout=follower) as listed:
        os.close(follower)
        assert listed.wait(timeout=SECONDS) == 0
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    header, row = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()[:2]
    assert header.split()[:3] == ["queue", "tables", "consumers"]
    assert row.split()[:3] == ["q", "2", "3"]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("seconds", 1.987, "1.99 s"),
        ("lag", timedelta(seconds=180), "3 min"),
        ("retention", timedelta(hours=25), "1 d 1 h"),
        ("log_bytes", 24 << 20, "24.0 MB"),
        ("log_bytes", 999, "999 B"),
        ("events", 1234567, "1,234,567"),
        ("last_tick", 1234567, "1234567"),
        ("events_per_second", 12.34, "12.3"),
        ("paused", False, "no"),
        ("reason", None, ""),
        ("key", {"id": "\x1b"}, '{"id": "\\u001b"}'),
        ("tables", ["a\x1b", "b"], "a\\x1b,b"),
        ("error", "one\r\ntwo", "one\\x0d\\x0atwo"),
    ],
)
def test_values_for_people(name: str, value: Any, shown: str) -> None:
    assert cell(name, value) == shown


def test_moments() -> None:
    moment = datetime.now(UTC)
    assert cell("last_seen", moment - timedelta(seconds=200)) == "3 min ago"
    assert cell("due_at", moment + timedelta(hours=3)) in ("in 2 h", "in 3 h")
    assert cell("last_seen", datetime(2026, 5, 1, 12, tzinfo=UTC), exact=True).startswith("2026-05-01T12:00:00")
    assert [heading(name) for name in ("queue_name", "log_bytes", "owner_role")] == ["queue", "log", "owner role"]
