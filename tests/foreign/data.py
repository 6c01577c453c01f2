"""Random changes of tables that nobody described: rows made, copied, changed and deleted by their columns' types."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection

from gdq.sql_text import quote, raw

_WORDS = ("", "a", "b", "A", "ab", "hello", "x y", "10", "it''s", "ä")
_NUMBERS = ("0", "1", "2", "3", "-1", "10", "42")
_MOMENTS = ("2024-02-29", "1999-12-31", "2021-01-01", "2020-06-15")
_JSON = ("{}", "[]", "null", '{"a": 1}', '{"a": 1.0, "b": [1, 2]}', '[1, "x"]', '"s"', "7")

# Texts of values by type; a type that is not here takes what its columns hold.
_TEXTS: dict[str, Sequence[str]] = {
    "int2": _NUMBERS, "int4": _NUMBERS, "int8": (*_NUMBERS, "9000000000"), "oid": ("1", "2", "3"),
    "numeric": (*_NUMBERS, "1.0", "1.00", "0.3333", "NaN", "-2.50"), "money": ("1", "2.50", "-3"),
    "float4": (*_NUMBERS, "0.5", "NaN", "Infinity", "-0"), "float8": (*_NUMBERS, "0.25", "NaN", "-Infinity", "-0"),
    "bool": ("t", "f"), "text": _WORDS, "varchar": _WORDS, "bpchar": _WORDS,
    "name": ("a", "b", "ab"), "char": ("a", "b"),
    "date": (*_MOMENTS, "infinity"), "timestamp": (*(f"{day} 10:30:00" for day in _MOMENTS), "2024-02-29 23:59:59.5"),
    "timestamptz": (*(f"{day} 10:30:00+00" for day in _MOMENTS), "2024-02-29 23:30:00-05"),
    "time": ("00:00", "10:30", "23:59:59.5"), "timetz": ("10:30+00", "12:30+02"),
    "interval": ("1 day", "24 hours", "1 mon", "30 days", "-2 hours", "0"),
    "uuid": tuple(f"{digit * 8}-0000-4000-8000-000000000000" for digit in "123a"),
    "bytea": ("\\x", "\\x00", "\\xdeadbeef"), "json": _JSON, "jsonb": _JSON, "xml": ("<a/>", "<a>1</a>"),
    "inet": ("10.0.0.1", "10.0.0.0/8", "::1"), "cidr": ("10.0.0.0/8", "192.168.1.0/24"),
    "macaddr": ("08:00:2b:01:02:03",), "bit": ("0", "1", "101"), "varbit": ("0", "1", "101"),
    "point": ("(0,0)", "(1,2)"), "box": ("(1,1),(0,0)",), "circle": ("<(0,0),1>",), "lseg": ("[(0,0),(1,1)]",),
    "path": ("[(0,0),(1,1)]",), "polygon": ("((0,0),(1,1),(1,0))",), "line": ("{1,2,3}",),
    "tsvector": ("a b", "c"), "tsquery": ("a & b",), "int4range": ("[1,5)", "empty", "(,3]"),
    "int8range": ("[1,5)", "empty"), "numrange": ("[1.0,2.0)", "empty"), "daterange": ("[2024-01-01,2024-02-01)",),
}  # fmt: skip

_COLUMNS = """
    select a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), coalesce(b.typname, t.typname),
           a.attgenerated <> '', a.attidentity = 'a',
           coalesce(e.typname, ''), t.typcategory = 'A'
      from pg_catalog.pg_attribute a join pg_catalog.pg_type t on t.oid = a.atttypid
      left join pg_catalog.pg_type b on b.oid = t.typbasetype and t.typtype = 'd'
      left join pg_catalog.pg_type e on e.oid = t.typelem and t.typcategory = 'A'
     where a.attrelid = %s::pg_catalog.regclass and a.attnum > 0 and not a.attisdropped order by a.attnum"""
_POOL_MAX = 40


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its quoted name, its type as SQL, the type's plain name, and the element's name for an array."""

    name: str
    kind: str
    plain: str
    generated: bool
    always: bool
    element: str
    array: bool


@dataclass(slots=True)
class Churn:
    """Random changes of `tables` (quoted, qualified).

    `pool`: texts of the values that columns of a type hold; `done`: the statements so far.
    """

    connection: Connection[Any]
    tables: Sequence[str]
    rng: random.Random
    columns: dict[str, list[Column]] = field(default_factory=dict)
    pool: dict[str, list[str]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Read the columns of the tables, and values that they hold."""
        for table in self.tables:
            found = self.connection.execute(_COLUMNS, [table]).fetchall()
            self.columns[table] = [
                Column(quote(name), kind, plain, generated, always, element, array)
                for name, kind, plain, generated, always, element, array in found
            ]
            for column in self.columns[table]:
                held = self.pool.setdefault(column.plain, [])
                if len(held) < _POOL_MAX:
                    query = f"select distinct {column.name}::text from {table} where {column.name} is not null limit 12"
                    held += [text for (text,) in self.connection.execute(raw(query))]

    def seed(self, rows: int) -> None:
        """Give tables that have hardly any rows some."""
        for table in self.tables:
            (number,) = self.connection.execute(raw(f"select count(*) from {table}")).fetchone() or (0,)
            for _ in range(rows if number < 3 else 0):
                self.attempt(self._insert(table))

    def transaction(self) -> None:
        """One transaction of some changes; what a constraint forbids is left out, and some are rolled back."""
        try:
            with self.connection.transaction() as transaction:
                for _ in range(self.rng.choice((1, 2, 3, 5))):
                    self.attempt(self._change(self.rng.choice(self.tables)))
                if self.rng.random() < 0.1:
                    self.done.append("-- rolled back")
                    raise psycopg.Rollback(transaction)
        except psycopg.IntegrityError as error:
            self.done.append(f"-- refused at the commit: {error.diag.message_primary}")  # by a deferred constraint

    def attempt(self, statement: str) -> bool:
        """Run a statement in a savepoint; False if the server refuses it."""
        try:
            with self.connection.transaction():
                self.connection.execute(raw(statement))
        except psycopg.OperationalError as error:
            if self.connection.closed:
                raise
            return isinstance(error, psycopg.errors.LockNotAvailable)
        except psycopg.Error:
            return False
        self.done.append(statement)
        return True

    def _change(self, table: str) -> str:
        changes: list[tuple[int, Callable[[str], str]]] = [
            (5, self._insert), (2, self._copy), (6, self._update), (4, self._delete), (1, self._swap), (1, self._sweep)
        ]  # fmt: skip
        return self.rng.choices([one for _, one in changes], [weight for weight, _ in changes])[0](table)

    def _settable(self, table: str) -> list[Column]:
        return [column for column in self.columns[table] if not column.generated]

    def _insert(self, table: str) -> str:
        columns = self._settable(table)
        if not columns:
            return f"insert into {table} default values"
        names, values = ", ".join(one.name for one in columns), ", ".join(self.value(one) for one in columns)
        return f"insert into {table} ({names}) overriding system value values ({values})"

    def _copy(self, table: str) -> str:
        """A row again, in one column another."""
        columns = self._settable(table)
        if not columns:
            return self._insert(table)
        other = self.rng.choice([None, *columns])
        values = ", ".join(self.value(one) if one is other else one.name for one in columns)
        names = ", ".join(one.name for one in columns)
        rows = f"select {values} from {table} where {self._one(table)}"
        return f"insert into {table} ({names}) overriding system value {rows}"

    def _update(self, table: str) -> str:
        columns = [one for one in self._settable(table) if not one.always]
        if not columns:
            return self._delete(table)
        some = self.rng.sample(columns, min(len(columns), self.rng.choice((1, 1, 2))))
        changes = ", ".join(f"{one.name} = {self.value(one)}" for one in some)
        return f"update {table} set {changes} where {self._some(table)}"

    def _swap(self, table: str) -> str:
        """Values of one column go to another row."""
        columns = [one for one in self._settable(table) if not one.always]
        if not columns:
            return self._delete(table)
        one = self.rng.choice(columns)
        return f"update {table} set {one.name} = (select o.{one.name} from {table} o limit 1) where {self._some(table)}"

    def _delete(self, table: str) -> str:
        return f"delete from {table} where {self._some(table)}"

    def _sweep(self, table: str) -> str:
        """Most or all rows go, or none in the end."""
        if self.rng.random() < 0.2:
            return f"delete from {table}"
        return f"delete from {table} where pg_catalog.hashtext(ctid::text) % 3 = {self.rng.randint(0, 2)}"

    def _one(self, table: str) -> str:
        offset = self.rng.randint(0, 30)
        found = f"select tableoid, ctid from {table} order by tableoid, ctid"
        count = f"(select count(*) from {table})"
        return f"(tableoid, ctid) = ({found} offset {offset} % greatest(1, {count}) limit 1)"

    def _some(self, table: str) -> str:
        column = self.rng.choice(self.columns[table]) if self.columns[table] else None
        if column is not None and self.rng.random() < 0.4:
            return f"{column.name}::text is not distinct from ({self.value(column)})::text"
        return self._one(table)

    def value(self, column: Column) -> str:
        """An expression for a random value of a column."""
        if self.rng.random() < 0.12:
            return "null"
        texts = _TEXTS.get(column.plain, ())
        held = self.pool.get(column.plain, [])
        if held and (not texts or self.rng.random() < 0.6):
            return self._literal(self.rng.choice(held), column)
        if texts:
            return self._literal(self.rng.choice(texts).replace("''", "'"), column)
        if column.array and column.element in _TEXTS:
            some = self.rng.choices(_TEXTS[column.element], k=self.rng.randint(0, 3))
            quoted = ",".join(
                '"' + one.replace("''", "'").replace("\\", "\\\\").replace('"', '\\"') + '"' for one in some
            )
            return self._literal("{" + quoted + "}", column)
        return "null"

    @staticmethod
    def _literal(text: str, column: Column) -> str:
        escaped = text.replace("'", "''").replace("\\", "\\\\")
        return f"E'{escaped}'::{column.kind}"
