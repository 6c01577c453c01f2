"""Problems of queues and capture, and repairs that do not make the application wait."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import psycopg
from psycopg import Connection, sql

from gdq.call import call, rows
from gdq.installer import install
from gdq.shown import Shown
from gdq.sql_text import raw

PATIENCE = timedelta(minutes=1)

Severity = Literal["error", "warning", "note"]
_RANK: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}

# Each attempt waits at most 100 ms for a lock; between attempts other sessions go first.
_LOCK_TRIES = 6
_LOCK_TIMEOUT = "100ms"

_TABLE_CODES = frozenset(
    {
        "capture_off",
        "columns_changed",
        "cannot_capture",
        "capture_function",
        "trigger_disabled",
        "trigger_touched",
        "altered_unseen",
        "trigger_missing",
        "partition_not_captured",
    }
)


@dataclass(frozen=True, slots=True, repr=False)
class Finding(Shown):
    """A problem, an approaching problem, or (note) a fact worth knowing. `fixable`: fix() repairs it."""

    severity: Severity
    code: str
    object: str
    cause: str
    cure: str
    fixable: bool


@dataclass(frozen=True, slots=True)
class Repair:
    """A repair of one object by fix(). `done` is False if the object is unchanged, or left to maintain()."""

    object: str
    done: bool
    text: str


def doctor(connection: Connection[Any], queue: str | None = None, patience: timedelta = PATIENCE) -> list[Finding]:
    """The findings, errors first and notes last. Problems younger than `patience` are left out."""
    found = rows(connection, Finding, "select * from gdq.doctor(%s, %s)", queue, patience)
    found.sort(key=lambda finding: (_RANK[finding.severity], finding.code, finding.object, finding.cause))
    return found


def fix(connection: Connection[Any], findings: list[Finding]) -> Iterator[Repair]:
    """Repair the fixable ones of `findings`, each in its own transaction. Needs an idle connection.

    A repair that waits for a lock gives up after 100 ms, so that the application goes on, and tries again a few times.
    """
    connection.autocommit = True
    fixable = [finding for finding in findings if finding.fixable]
    codes = {finding.code for finding in fixable}
    if "event_triggers_off" in codes:
        yield _event_triggers(connection)
    if codes & {"trigger_left_over", "trigger_renamed"}:
        yield from _drop_triggers(connection)
    for table in sorted({finding.object for finding in fixable if finding.code in _TABLE_CODES | {"trigger_renamed"}}):
        yield from _repair_table(connection, table)
    behind = [finding.object for finding in fixable if finding.code == "index_behind"]
    if behind:
        connection.execute("select gdq.summarise_logs(%s::text[]::regclass[])", [behind])
        yield Repair("logs", True, "brought the indexes of the logs up to date")


def _event_triggers(connection: Connection[Any]) -> Repair:
    try:
        install.create_event_triggers(connection)
    except psycopg.Error as error:
        return Repair("event triggers", False, f"left the event triggers: {_line(error)}")
    return Repair("event triggers", True, "created the event triggers")


def _drop_triggers(connection: Connection[Any]) -> Iterator[Repair]:
    """Leftover and renamed triggers on tables that the session owns."""
    strays = connection.execute(
        """select gdq.table_name(relid), name from gdq.stray_triggers(null) where own
           union all
           select gdq.table_name(g.relid), g.name from gdq.renamed_triggers() g where g.own"""
    ).fetchall()
    for table, name in strays:
        drop = sql.SQL("drop trigger if exists {} on {}").format(sql.Identifier(name), raw(table))
        try:
            with connection.transaction():
                connection.execute(sql.SQL("set local lock_timeout = {}").format(sql.Literal(_LOCK_TIMEOUT)))
                connection.execute(drop)
        except psycopg.Error as error:
            yield Repair(table, False, f"left trigger {name} of {table}: {_line(error)}")
        else:
            yield Repair(table, True, f"dropped trigger {name} of {table}")


def _repair_table(connection: Connection[Any], table: str) -> Iterator[Repair]:
    """Switch capture off on record, then on again; the lock on the table is only taken for the second."""
    try:
        off = connection.execute("select gdq.suspend_table(%s)", [table]).fetchall()
    except psycopg.Error as error:
        yield Repair(table, False, f"left {table}: {_line(error)}")
        return
    for (table_id,) in off:
        if _rearm(connection, table_id):
            yield Repair(table, True, f"captured {table} again; that changes may be missing is recorded")
        else:
            reason = call(connection, "off_reason", table_id)
            yield Repair(table, False, f"left {table} switched off, on record; the ticker tries on ({reason})")


def _rearm(connection: Connection[Any], table_id: int) -> bool:
    for number in range(_LOCK_TRIES):
        if number:
            time.sleep(0.05 * 2**number * random.uniform(0.5, 1))
        if call(connection, "rearm", table_id):
            return True
    return False


def _line(error: psycopg.Error) -> str:
    return error.diag.message_primary or str(error).partition("\n")[0]
