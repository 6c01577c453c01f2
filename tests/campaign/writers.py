"""Writers of the application. Each change is noted in app.audit, outside capture, in the same transaction.

    python -m tests.campaign.writers KIND SEED DSN FOLDER CHANGES_PER_SECOND START

A row's `label` is new with every version and `prev` is the label before. So each change is one version born, one that
died, or both, and app.audit has the labels of both. A file `no_item` in FOLDER keeps the writers off app.item.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psycopg

LEVELS = {"rc": "read committed", "rr": "repeatable read", "ser": "serializable", "two": "read committed"}
KINDS = (*LEVELS, "bulk")
TABLES = ("acct", "item", "part")
REGIONS = 6
HOT_ROWS = 40
BULK_ROWS = (300, 2500)
_KEPT_ROWS = 20_000
_CHANGES_PER_LABEL = 1.25

_NOTE = "insert into app.audit (tbl, born, died) select '{}', {} from c"
_FILLER = "repeat('x', 20 + (random() * 60)::int)"


def noted(statement: str, table: str, op: str) -> str:
    """A statement on a table, and the note of what it did."""
    labels = {"i": "label, null", "u": "label, prev", "d": "null, label"}[op]
    returned = "label" if op in "id" else "label, prev"
    return f"with c as ({statement} returning {returned}) {_NOTE.format(table, labels)}"


def insert(table: str, first: int, last: int) -> str:
    """Rows with keys in a range."""
    region = f"(random() * {REGIONS - 1})::int"
    columns, values = {
        "acct": ("region, amount, pad", f"{region}, (random() * 100)::numeric(12,2), {_FILLER}"),
        "item": ("acct, region, note", f"(random() * {HOT_ROWS})::int, {region}, {_FILLER}"),
        "part": ("region, note", f"(id % {REGIONS})::int, {_FILLER}"),
    }[table]
    return noted(
        f"insert into app.{table} (id, label, {columns}) select id, nextval('app.label'), {values}"
        f" from generate_series({first}::bigint, {last}::bigint) id",
        table,
        "i",
    )


def update(rng: random.Random, table: str, first: int, last: int) -> str:
    """Rows with keys in a range; some move to another region, and so to another partition."""
    more = {
        "acct": ["amount = amount + 1", "pad = 'p'", f"region = (region + 1) % {REGIONS}"],
        "item": ["note = 'n'", f"acct = (acct + 1) % {HOT_ROWS}", f"region = (region + 1) % {REGIONS}"],
        "part": ["note = 'n'", f"region = (region + 1) % {REGIONS}"],
    }[table]
    return noted(
        f"update app.{table} set prev = label, label = nextval('app.label'), {rng.choice(more)}"
        f" where id between {first} and {last} and region >= 0",
        table,
        "u",
    )


def delete(table: str, first: int, last: int) -> str:
    """Rows with keys in a range."""
    return noted(f"delete from app.{table} where id between {first} and {last} and region >= 0", table, "d")


def upsert(table: str, key: int) -> str:
    """One row, which may be there: a partitioned table is left to the other statements."""
    into = "acct (id, region, label) values" if table == "acct" else "item (id, region, label) values"
    name = into.split(" ", 1)[0]
    return (
        f"with c as (insert into app.{into} ({key}, 1, nextval('app.label')) on conflict (id) do update"
        f" set prev = {name}.label, label = excluded.label returning label, prev, xmax)"
        f" insert into app.audit (tbl, born, died) select '{name}', label, prev from c"
    )


class Writer:
    """One writer with keys of its own, from `number` thousand millions on."""

    def __init__(self, kind: str, seed: int, dsn: str, folder: Path, *, rate: float, start: float) -> None:
        self.kind = kind
        self.rng = random.Random(seed)
        self.dsn = dsn
        self.folder = folder
        self.rate = rate
        self.base = (KINDS.index(kind) + 1) * 10**9
        self.start = start
        self.stopped = False

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._stop)
        while not self.stopped:
            try:
                with psycopg.connect(self.dsn, autocommit=True, application_name=f"writer {self.kind}") as connection:
                    connection.execute("set lock_timeout = '2s'")
                    if self.kind == "bulk":
                        self._bulk(connection)
                    else:
                        self._small(connection)
            except psycopg.Error as error:
                print(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
                time.sleep(0.3)

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def _tables(self) -> list[str]:
        return [table for table in TABLES if table != "item" or not (self.folder / "no_item").exists()]

    # Small transactions

    def _small(self, connection: psycopg.Connection[Any]) -> None:
        if self.kind == "two":
            self._settle(connection)
        fresh = self._highest(connection)
        number = 0
        while not self.stopped:
            started = time.monotonic()
            fresh += 10
            number += 1
            statements = self._statements(fresh)
            try:
                self._transaction(connection, statements, f"{self.kind}_{fresh}")
            except (psycopg.OperationalError, psycopg.InternalError, psycopg.IntegrityError) as error:
                if connection.broken or connection.closed:
                    raise
                print(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
                connection.execute("rollback")
            if self.kind == "two" and number % 5 == 0:
                self._settle(connection)
            time.sleep(max(len(statements) / self.rate - (time.monotonic() - started), 0.001))

    def _highest(self, connection: psycopg.Connection[Any]) -> int:
        # gone keys may come again: labels tell versions apart
        query = " union all ".join(
            f"select max(id) id from app.{table} where id between {self.base} and {self.base + 10**9 - 1}"
            for table in TABLES
        )
        row = connection.execute(f"select max(id) from ({query}) m".encode()).fetchone()
        return (row and row[0]) or self.base

    def _transaction(self, connection: psycopg.Connection[Any], statements: list[str], gid: str) -> None:
        rng = self.rng
        script = [f"begin isolation level {LEVELS[self.kind]}", *statements]
        if rng.random() < 0.3:
            place = rng.randint(1, len(script))
            script.insert(place, "savepoint s")
            script.append(rng.choice(["rollback to s", "rollback to s", "release s"]))
            script.append(self._change(rng.choice(self._tables()), self.base + rng.randint(0, 500)))
        dice = rng.random()
        if self.kind == "two" and dice < 0.7:
            script.append(f"prepare transaction '{gid}'")
        else:
            script.append("rollback" if dice > 0.93 else "commit")
        if rng.random() < 0.2:  # in pieces: a transaction that takes its time
            for statement in script:
                connection.execute(statement.encode())
                time.sleep(rng.random() * 0.05)
        else:
            connection.execute("; ".join(script).encode())

    def _settle(self, connection: psycopg.Connection[Any]) -> None:
        """End the prepared transactions, also those of an earlier life."""
        for (gid,) in connection.execute("select gid from pg_prepared_xacts where gid like 'two\\_%'").fetchall():
            end = "commit" if self.rng.random() < 0.75 else "rollback"
            connection.execute(f"{end} prepared '{gid}'".encode())

    def _statements(self, fresh: int) -> list[str]:
        rng = self.rng
        chosen = []
        for number in range(rng.randint(1, 5)):
            table = rng.choice(self._tables())
            if rng.random() < 0.35:
                chosen.append(insert(table, fresh + number, fresh + number))
            else:
                chosen.append(self._change(table, rng.randint(max(self.base, fresh - 500), fresh)))
        return chosen

    def _change(self, table: str, own: int) -> str:
        rng = self.rng
        shared = rng.random() < (0.4 if self.kind == "rc" else 0.15)
        key = rng.randint(1, HOT_ROWS) if shared else own
        dice = rng.random()
        if shared and table != "part" and dice < 0.3:
            return upsert(table, key)
        if dice < 0.5:
            return delete(table, key, key + rng.choice([0, 0, 3]))
        return update(rng, table, key, key + rng.choice([0, 0, 2, 10]))

    # Bulk

    def _bulk(self, connection: psycopg.Connection[Any]) -> None:
        """Statements of many rows, at the rate that was asked for; the tables keep their size."""
        rng = self.rng
        limits = {table: self._limits(connection, table) for table in TABLES}
        while not self.stopped:
            if self._is_ahead(connection):
                time.sleep(0.05)
                continue
            level = rng.choice(["read committed", "read committed", "repeatable read"])
            after = dict(limits)
            with connection.transaction():
                connection.execute(f"set transaction isolation level {level}".encode())
                for _ in range(rng.randint(1, 3)):
                    table = rng.choice(self._tables())
                    low, high = after[table]
                    number = rng.randint(*BULK_ROWS)
                    if high - low > _KEPT_ROWS:
                        connection.execute(delete(table, low, low + number - 1).encode())
                        after[table] = (low + number, high)
                    elif high - low < 2 * BULK_ROWS[1] or rng.random() < 0.4:
                        if table != "part" and rng.random() < 0.3:
                            self._copy(connection, table, high, number)
                        else:
                            connection.execute(insert(table, high, high + number - 1).encode())
                        after[table] = (low, high + number)
                    else:
                        first = rng.randint(low, high - number)
                        connection.execute(update(rng, table, first, first + number - 1).encode())
            limits = after

    def _is_ahead(self, connection: psycopg.Connection[Any]) -> bool:
        """Whether there were more changes than asked for until now: deletes take no label."""
        row = connection.execute("select last_value from app.label").fetchone()
        return row is not None and row[0] * _CHANGES_PER_LABEL > self.rate * (time.time() - self.start)

    def _limits(self, connection: psycopg.Connection[Any], table: str) -> tuple[int, int]:
        query = f"select min(id), max(id) + 1 from app.{table} where id between %s and %s"
        row = connection.execute(query.encode(), [self.base, self.base + 10**9 - 1]).fetchone()
        return (row[0], row[1]) if row and row[0] else (self.base, self.base)

    def _copy(self, connection: psycopg.Connection[Any], table: str, first: int, number: int) -> None:
        query = "select nextval('app.label') from generate_series(1, %s)"
        labels = [label for (label,) in connection.execute(query, [number])]
        with connection.cursor().copy(f"copy app.{table} (id, region, label) from stdin".encode()) as copy:
            for offset, label in enumerate(labels):
                copy.write_row((first + offset, offset % REGIONS, label))
        with connection.cursor().copy("copy app.audit (tbl, born) from stdin") as copy:
            for label in labels:
                copy.write_row((table, label))


if __name__ == "__main__":
    _, _kind, _seed, _dsn, _folder, _rate, _start = sys.argv
    Writer(_kind, int(_seed), _dsn, Path(_folder), rate=float(_rate), start=float(_start)).run()
