"""The writer of a campaign against a replica: rows, TRUNCATE and DDL, each version of a row noted in app.audit.

A row's `label` is new with every version. app.audit has the label of each version that was born or died with the number
of its transaction, so that the labels of any snapshot can be counted. Columns come, go, and change name and type.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import psycopg

TABLES = ("acct", "item", "part")
_KEYS = 400
_BIG = 3000
_PAUSE_SECONDS = 0.02

SCHEMA = """
create sequence app.label;
create table app.audit (xid xid8 not null default pg_current_xact_id(), tbl text, born bigint, died bigint);
create table app.acct (id int primary key, label bigint not null, place int unique, note text);
create table app.item (id int primary key, label bigint not null, amount numeric, pad text);
create table app.part (id int, region int, label bigint not null, primary key (id, region)) partition by list (region);
create table app.part0 partition of app.part for values in (0);
create table app.part1 partition of app.part default;
"""

# A table whose first copy is what is killed.
LARGE = "app.large"
LARGE_TABLE = f"create table {LARGE} (id bigint primary key, n int not null, note text)"


class Writer:
    """A thread that writes until stop(); what was cut off by a kill is rolled back, and it goes on.

    `large_rows`: those of the large table, to which it writes as well. `big`: the share of statements of many rows.
    """

    def __init__(self, dsn: str, seed: int, large_rows: int = 0, big: float = 0.02) -> None:
        self._large_rows = large_rows
        self._big = big
        self.altered: Counter[str] = Counter()
        self.transactions = 0
        self._dsn = dsn
        self._rng = random.Random(seed + 1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._columns = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """False once a statement failed for a reason that no kill explains."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with psycopg.connect(self._dsn, autocommit=True, connect_timeout=5) as connection:
                    while not self._over.is_set():
                        with suppress(psycopg.errors.UniqueViolation):  # a row that meets another in its new region
                            self._transaction(connection)
                        time.sleep(self._rng.uniform(0, _PAUSE_SECONDS))
            except (psycopg.OperationalError, psycopg.Rollback):  # a rollback passes on if its session is gone
                time.sleep(0.3)

    def _transaction(self, connection: psycopg.Connection[Any]) -> None:
        rng = self._rng
        if self._large_rows and rng.random() < 0.5:
            for statement in self._large():
                connection.execute(statement.encode())
        dice = rng.random()
        table = rng.choice(TABLES)
        if dice < 0.01:
            statements, done = self._truncate(table), "TRUNCATE"
        elif dice < 0.035:
            statements, done = self._ddl(connection, rng.choice(("acct", "item")))
        else:
            statements, done = [one for _ in range(rng.randint(1, 4)) for one in self._rows(rng.choice(TABLES))], ""
        with connection.transaction():
            for statement in statements:
                connection.execute(statement.encode())
            if rng.random() < 0.05:
                raise psycopg.Rollback
        self.transactions += 1
        if done:
            self.altered[done] += 1

    def _large(self) -> list[str]:
        """Changes all over the large table; keys move from one part of it to another."""
        one, other, third = (self._rng.randint(1, self._large_rows) for _ in range(3))
        return [
            f"update {LARGE} set n = n + 1 where id between {one} and {one + 9}",
            f"delete from {LARGE} where id = {other}",
            f"delete from {LARGE} where id = -{third}",
            f"update {LARGE} set id = -{third} where id = {third}",
            f"insert into {LARGE} values ({self._large_rows + other}, 1, 'new') on conflict do nothing",
        ]

    def _rows(self, table: str) -> list[str]:
        rng = self._rng
        first = rng.randint(1, _KEYS)
        last = first + (_BIG if rng.random() < self._big else rng.choice((0, 0, 0, 5, 50)))
        keys = f"id between {first} and {last}"
        region = ", region" if table == "part" else ""
        dice = rng.random()
        if dice < 0.4:
            value = ", id % 3" if table == "part" else ""
            change = f"""insert into app.{table} as t (id{region}, label)
                select id{value}, nextval('app.label') from generate_series({first}, {last}) id
                on conflict do nothing returning label as born, null::bigint as died"""
            return [_noted(change, table)]
        if dice < 0.75:
            more = {"acct": f"place = case when t.id % 7 = {rng.randint(0, 6)} then -t.id else t.id end",
                    "item": "amount = coalesce(t.amount, 0) + 1.10",
                    "part": "region = (t.region + 1) % 3"}[table]  # fmt: skip
            change = f"""update app.{table} t set label = nextval('app.label'), {more}
                  from (select {"id, region" if region else "id"}, label from app.{table} where {keys} for update) o
                 where t.id = o.id{" and t.region = o.region" if region else ""}
                returning t.label as born, o.label as died"""
            return [_noted(change, table)]
        return [_noted(f"delete from app.{table} where {keys} returning null::bigint as born, label as died", table)]

    def _truncate(self, table: str) -> list[str]:
        return [
            f"lock table app.{table}",
            f"insert into app.audit (tbl, died) select '{table}', label from app.{table}",
            f"truncate app.{table}",
            *self._rows(table),
        ]

    def _ddl(self, connection: psycopg.Connection[Any], table: str) -> tuple[list[str], str]:
        """One ALTER TABLE among rows."""
        query = """select attname::text from pg_attribute where attrelid = %s::regclass and attnum > 0
                      and not attisdropped and attname like 'x%%' order by 1"""
        names = [name for (name,) in connection.execute(query, [f"app.{table}"])]
        self._columns += 1
        kind = self._rng.choice(("ADD", "ADD", "DROP", "RENAME", "TYPE", "ADD DEFAULT"))
        if not names:
            kind = "ADD"
        name = self._rng.choice(names) if names else ""
        fresh = f"x{self._columns}"
        statement = {
            "ADD": f"add {fresh} varchar(20)",
            "ADD DEFAULT": f"add {fresh} int not null default {self._columns}",
            "DROP": f"drop {name}",
            "RENAME": f"rename {name} to {fresh}",
            "TYPE": f"alter {name} type text",
        }[kind]
        return [*self._rows(table), f"alter table app.{table} {statement}", *self._rows(table)], kind


def _noted(change: str, table: str) -> str:
    return f"with c as ({change}) insert into app.audit (tbl, born, died) select '{table}', born, died from c"
