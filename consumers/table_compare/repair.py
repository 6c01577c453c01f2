"""`gdq repair-tables`: the rows of the target that differ from the source's are made equal, and no others are touched.

A comparison finds the keys of these rows. They are repaired in portions, each in one transaction of the target, which
keeps the replica from applying a batch meanwhile and takes the source as of the replica's position at that moment. So a
portion is right whatever was applied since the comparison, and stays right whatever is applied later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from psycopg.errors import LockNotAvailable

from gdq.call import try_while_locked
from gdq.conninfo import Connectable, conninfo_from
from gdq.consumers.replica.changes import Applied
from gdq.consumers.replica.foreign_keys import foreign_keys, parents_first
from gdq.consumers.replica.table import OnTriggers
from gdq.consumers.table_compare.compare import CompareProgress, Found, chosen_tables, compared_rows, link_of
from gdq.consumers.table_compare.portion import (
    BlockedError,
    Key,
    counted,
    differing_keys,
    repair_portion,
    repaired_table,
)
from gdq.consumers.table_compare.rows import Differing
from gdq.consumers.table_compare.sides import Choice, Databases, Link, TwoSides, open_sides
from gdq.errors import GdqError
from gdq.shown import Shown, ShownRows

# Keys of one transaction. The replica, and whoever writes to the target's table, waits for it to end.
_PORTION_KEYS = 2_000


@dataclass(frozen=True, slots=True, repr=False)
class TableRepair(Shown):
    """The repair of one table: how many rows of the target were inserted, updated and deleted.

    `tick`: where the target stood when the table was done; None if the databases are not linked.
    """

    table_name: str
    inserted: int
    updated: int
    deleted: int
    tick: int | None
    seconds: float

    @property
    def nothing(self) -> bool:
        """True if no row differed."""
        return not (self.inserted or self.updated or self.deleted)


def repair_tables(
    connection: Connectable,
    target: str,
    tables: Sequence[str] | None = None,
    *,
    queue: str | None = None,
    replica: str | None = None,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    dry_run: bool = False,
    wait_seconds: float = 10.0,
    triggers: OnTriggers = "refuse",
    progress: CompareProgress | None = None,
) -> list[TableRepair]:
    """Make the rows that differ from those of another database equal to them there, while both may be written to.

    `target`: its connection string; its rows are inserted, updated and deleted, in transactions of their own.
    `tables`, `queue`, `replica`: as for compare_tables(). Rows become those of the source as of the replica's position,
    or as they are now without it. `columns`: only these are compared, beside the key, and updated; a missing row
    comes whole. `where`: only rows that match it on either side are repaired. `dry_run`: nothing is written.
    `wait_seconds`: how long a replica is given to pass a TRUNCATE or DDL. `triggers`: what is done about triggers of
    the target that its role cannot keep from firing. GdqError, before anything is written, if a table cannot be
    compared or written to.
    """
    repaired = repair_each(
        connection,
        target,
        tables,
        link=link_of(queue, replica),
        columns=columns,
        where=where,
        dry_run=dry_run,
        wait_seconds=wait_seconds,
        triggers=triggers,
        progress=progress,
    )
    return ShownRows(repaired)


def repair_each(
    connection: Connectable,
    target: str,
    tables: Sequence[str] | None,
    *,
    link: Link | None,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    dry_run: bool = False,
    wait_seconds: float = 10.0,
    triggers: OnTriggers = "refuse",
    progress: CompareProgress | None = None,
) -> Iterator[TableRepair]:
    """As repair_tables(), one table after the other; all at the end if foreign keys fire in the target."""
    source = conninfo_from(connection)
    databases = Databases(source, target, link, wait_seconds)
    tell = progress or (lambda *_: None)
    choices = [Choice(name, where, columns) for name in chosen_tables(source, target, tables, link)]
    order: list[str] | None = None
    for choice in choices:
        with open_sides(databases, choice) as sides:
            if repaired_table(sides, triggers).fires != "nothing" and order is None:
                names = [one.table for one in choices]
                order, _ = parents_first(names, foreign_keys(sides.target.connection, names))
    repairs = [_Repair(databases, choice, triggers, tell) for choice in choices]
    if order is None or dry_run:
        for repair in repairs:
            repair.find(dry_run=dry_run)
            repair.repair(repair.keys)
            yield repair.result()
        return
    # rows that come need those that they point to, and rows that go those that point to them to be gone
    for repair in (ordered := sorted(repairs, key=lambda one: order.index(one.choice.table))):
        repair.find()
        repair.repair([key for key in repair.keys if key not in repair.going])
    for repair in ordered[::-1]:
        repair.repair([key for key in repair.keys if key in repair.going])
    yield from (repair.result() for repair in repairs)


@dataclass(slots=True)
class _Repair:
    """The repair of one table. `keys`: of the rows that differ; `going`: of those that the source does not have."""

    databases: Databases
    choice: Choice
    triggers: OnTriggers
    tell: CompareProgress
    keys: list[Key] = field(default_factory=list)
    going: set[Key] = field(default_factory=set)
    done: Applied = field(default_factory=Applied)
    tick: int | None = None
    seconds: float = 0.0

    def find(self, *, dry_run: bool = False) -> None:
        """Find the keys of rows that differ; `dry_run`: only count what a repair would do."""
        started = time.monotonic()

        def take(row: Differing) -> None:
            self.keys.append(row.named)
            if row.extra:
                self.going.add(row.named)

        with open_sides(self.databases, self.choice) as sides:
            compared_rows(sides, Found(0), self.tell, take)
            self.tick = sides.tick
            if dry_run:
                self.done = _counted(sides, self.keys)
                self.keys.clear()
        self.seconds += time.monotonic() - started

    def repair(self, keys: Sequence[Key]) -> None:
        """Repair the rows of these keys in portions."""
        if not keys:
            return
        started = time.monotonic()
        # a row that matches the condition on one side only is no row that came or went
        choice = Choice(self.choice.table, None, self.choice.columns)
        done, self.tick = _repair_keys(self.databases, choice, keys, self.tell, self.triggers)
        self.done += done
        self.seconds += time.monotonic() - started

    def result(self) -> TableRepair:
        """What was done."""
        done = self.done
        seconds = round(self.seconds, 3)
        return TableRepair(self.choice.table, done.inserted, done.updated, done.deleted, self.tick, seconds)


def _counted(sides: TwoSides, keys: Sequence[Key]) -> Applied:
    """What a repair of the rows of these keys would do."""
    whole, done = sides.without_condition(), Applied()
    for start in range(0, len(keys), _PORTION_KEYS):
        done += counted(differing_keys(whole, keys[start : start + _PORTION_KEYS]))
    return done


def _repair_keys(
    databases: Databases, choice: Choice, keys: Sequence[Key], tell: CompareProgress, triggers: OnTriggers
) -> tuple[Applied, int | None]:
    """Repair the rows of these keys in portions; what was done, and the tick of the last portion."""
    done, tick = Applied(), None
    start, size = 0, _PORTION_KEYS
    while start < len(keys):
        tell(choice.table, "repairing", start, len(keys))
        portion = keys[start : start + size]
        try:
            applied, tick = _committed(databases, choice, portion, triggers)
        except BlockedError:
            if start + size >= len(keys):
                raise
            # the rows that are in the way differ too: they come in a larger portion
            size *= 2
            continue
        if applied is not None:
            done += applied
            start, size = start + len(portion), _PORTION_KEYS
    return done, tick


def _committed(
    databases: Databases, choice: Choice, portion: Sequence[Key], triggers: OnTriggers
) -> tuple[Applied | None, int | None]:
    """Repair a portion in a transaction; as repair_portion(), and the tick that the target stood at."""

    def attempt() -> tuple[Applied | None, int | None]:
        with open_sides(databases, choice, writing=True) as sides:
            applied = repair_portion(sides, databases.link, portion, triggers)
            sides.target.connection.commit()
            return applied, sides.tick

    try:
        return try_while_locked(attempt)
    except LockNotAvailable as error:
        raise GdqError(
            f"table {choice.table} is locked by others, in the source or in the target",
            hint="Repair it again when they have finished; what was repaired stays.",
        ) from error
