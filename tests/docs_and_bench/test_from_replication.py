"""docs/from-londiste.md and docs/from-slony.md leave no command out, name commands of gdq that exist, and work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from gdq.cli import main
from tests.docs_and_bench.test_pages import PROGRAMS
from tests.support.page import ROOT, run_page
from tests.support.server import Database

LONDISTE = "docs/from-londiste.md"
SLONY = "docs/from-slony.md"

# The commands of londiste 3.12 and pgq 3.8, the worker's internal one too; table states; handlers.
_LONDISTE = """install create-root create-branch create-leaf members tag-dead tag-alive change-provider rename-node
status node-status node-info pause resume drop-node takeover resurrect wait-root wait-provider add-table remove-table
change-handler add-seq remove-seq tables seqs missing resync wait-sync check fkeys triggers execute show-handlers
worker compare repair copy"""
COMMANDS = set(re.findall(r"\S+", _LONDISTE))
STATES = {"in-copy", "catching-up", "wanna-sync:TICK", "do-sync:TICK", "ok"}
HANDLERS = {"applyfn", "bulk", "dispatch", "multimaster", "obfuscate", "qtable", "shard", "vtable"}

# The statements of slonik 2.2.11, with those that 2.0 removed.
_SLONIK = """CLUSTER NAME, ADMIN CONNINFO, INIT CLUSTER, STORE NODE, DROP NODE, UNINSTALL NODE, RESTART NODE,
UPDATE FUNCTIONS, REPAIR CONFIG, STORE PATH, DROP PATH, STORE LISTEN, DROP LISTEN, CLONE PREPARE,
CLONE FINISH, CREATE SET, DROP SET, MERGE SET, SET ADD TABLE, SET ADD SEQUENCE, SET DROP TABLE, SET
DROP SEQUENCE, SET MOVE TABLE, SET MOVE SEQUENCE, TABLE ADD KEY, TABLE DROP KEY, STORE TRIGGER, DROP
TRIGGER, SUBSCRIBE SET, UNSUBSCRIBE SET, RESUBSCRIBE NODE, SYNC, WAIT FOR EVENT, EXECUTE SCRIPT,
LOCK SET, UNLOCK SET, MOVE SET, FAILOVER, SLEEP, ECHO, DATE, EXIT, INCLUDE, DEFINE, TRY"""
STATEMENTS = " ".join(_SLONIK.split()).split(", ")

pytestmark = pytest.mark.skipif(not (ROOT / LONDISTE).exists(), reason="an sdist has no documentation")


def rows(page: str) -> list[list[str]]:
    """The cells of every table row, without the headings."""
    lines = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line.removesuffix("|").removeprefix("|").split(" | ")] for line in lines]
    return [row for row in found if row[0] not in {"Londiste", "slonik", "Slony-I"}]


def named(page: str) -> list[str]:
    return [name for row in rows(page) for name in re.findall("`([^`]+)`", row[0])]


def test_every_command_of_londiste_is_there() -> None:
    for names in (COMMANDS, STATES, HANDLERS):
        assert names <= set(named(LONDISTE)), names - set(named(LONDISTE))


def test_every_statement_of_slonik_is_there_once() -> None:
    assert sorted(name for name in named(SLONY) if name.isupper()) == sorted(STATEMENTS)


@pytest.mark.parametrize("page", [LONDISTE, SLONY])
def test_every_row_has_an_answer(page: str) -> None:
    """A counterpart, or none and the reason."""
    assert len(rows(page)) > 30
    for row in rows(page):
        assert len(row) == 3, row
        assert row[1] != "none" or len(row[2]) > 10, row


@pytest.mark.parametrize("page", [LONDISTE, SLONY])
def test_every_command_of_gdq_can_be_given_so(page: str) -> None:
    """Each counterpart is a command with its arguments; the text beside it names commands and options that exist."""
    for row in rows(page):
        for text in re.findall(r"`gdq ([a-z][^`]*)`", row[1]):
            name, *arguments = shlex.split(text)
            with click.Context(main) as parent:
                command_of(text).make_context(name, arguments, parent=parent)
    found = re.findall(r"`gdq ([a-z][^`]*)`", (ROOT / page).read_text(encoding="utf-8"))
    assert len(found) > 20
    for text in found:
        known = {option for given in command_of(text).params for option in (*given.opts, *given.secondary_opts)}
        assert {word for word in shlex.split(text) if word.startswith("-")} <= known, text


def command_of(text: str) -> click.Command:
    command = main.get_command(click.Context(main), text.partition(" ")[0])
    assert command is not None, text
    return command


@pytest.mark.server
@pytest.mark.parametrize("page", [LONDISTE, SLONY])
def test_a_node_moves(empty_db: Database, tmp_path: Path, page: str) -> None:
    """The page's commands, over a target with the rows that the other program has left there."""
    _tables(empty_db)
    copy = Database(empty_db.server, "copy")
    with empty_db.connect("su") as su:
        su.execute("drop database if exists copy with (force)")
        su.execute("create database copy")
        try:
            _tables(copy)
            with copy.connect("su") as there:
                there.execute("update orders set amount = 0; insert into customer values (9, 'left over')")
            run_page(page, empty_db, tmp_path, PROGRAMS)
            with copy.connect("su") as there:
                for table in ("orders", "customer"):
                    query = f"select t::text from {table} t order by 1".encode()
                    assert there.execute(query).fetchall() == su.execute(query).fetchall() != []
        finally:
            su.execute("drop database if exists copy with (force)")


def _tables(database: Database) -> None:
    with database.connect("su") as su:
        su.execute(
            """create table orders (id int primary key, customer text, amount numeric(10, 2));
               create table customer (id int primary key, name text);
               insert into orders values (1, 'Ann', 9.90); insert into customer values (1, 'Ann')"""
        )
