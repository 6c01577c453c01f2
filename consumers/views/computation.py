"""Computes what a refresh of a view changes, in the source database: temporary tables of one transaction.

The steps of the plan are statements of the server; what passes through this process are the keys that they collect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import psycopg
from psycopg import Connection, sql

from gdq.consumers.views.change_source import log_columns_of, weighted
from gdq.consumers.views.difference import OUT, Difference, KeySet, image_of
from gdq.consumers.views.engine import Effort, Kind, Task, rows_read
from gdq.consumers.views.signals import NeedsFull
from gdq.consumers.views.target import OutputType, run
from gdq.errors import PlanError
from gdq.plan.postgres import ChangePlan, PostgresPlan, UsedTable
from gdq.plan.steps import Recompute, Replace, Signed, Step
from gdq.plan.table import WEIGHT
from gdq.sql_text import quote, raw
from gdq.typed.pgtypes import READ_SETTINGS, base_name
from gdq.view.table_schema import apply_settings, describe

# 100,000 keys of two million rows cost six tenths of a full load (python -m bench.keys), and statements repeat them.
_KEYS_MAX = 100_000
_KEYS_BYTES_MAX = 16 * 2**20

# The number of rows that PostgreSQL expects, roughly, in a table without statistics.
_UNKNOWN_ROWS = 500

_TOKEN = re.compile(r"\bgdq_(keys|null)_(\d+)\b")

# What a server says that cannot index a column; a cancelled statement is none of these.
_NO_INDEX = (
    psycopg.errors.ProgramLimitExceeded,
    psycopg.ProgrammingError,
    psycopg.NotSupportedError,
    psycopg.DataError,
)

# Makes a temporary table of a name from a query; its rows.
Make = Callable[[str, str], int]


class _OtherTypeError(Exception):
    """Keys are of another type than the view's column."""


@dataclass(slots=True)
class Computation:
    """What one refresh of a view changes, computed in the transaction of `connection` at the held snapshot.

    `types` are the types of the view's columns. `folded`: columns whose values the target compares otherwise than the
    source; rows are not replaced by these.
    """

    connection: Connection[Any]
    task: Task
    plan: PostgresPlan
    types: Sequence[OutputType]
    folded: Collection[str] = ()
    _keys: dict[str, KeySet] = field(default_factory=dict, init=False)
    _literals: dict[str, str] = field(default_factory=dict, init=False)
    _made: list[str] = field(default_factory=list, init=False)
    _views: list[str] = field(default_factory=list, init=False)
    _kind: Kind = field(default="none", init=False)
    _delta_rows: int = field(default=0, init=False)
    _read_before: int | None = field(default=None, init=False)
    _exact: set[tuple[str, str]] = field(default_factory=set, init=False)

    def begin(self) -> None:
        """Join the held snapshot and apply the settings of the view, first in the transaction. TableWanted."""
        self.join()
        apply_settings(self.connection, READ_SETTINGS | self.task.view.settings)
        self._read_before = self._rows_read()

    def join(self) -> None:
        """Join the held snapshot, unless another view of the group has done so."""
        if not self.task.joined:
            self.task.holder.join(self.connection)

    def effort(self) -> Effort:
        """The work of the refresh so far; to be asked in the same transaction."""
        read = 0 if self._read_before is None else self._rows_read() - self._read_before
        return Effort(self._kind, self._delta_rows, read)

    def _rows_read(self) -> int:
        return rows_read(self.connection, [table.name for table in self.plan.tables])

    @contextmanager
    def beside(self) -> Iterator[Self]:
        """Begin in a connection of its own, for a target elsewhere; the transaction ends with the block.

        The connection leads to the source, is in no transaction and not in autocommit.
        """
        try:
            self.begin()
            yield self
        finally:
            if not self.connection.closed:
                self.connection.rollback()

    def difference(self, s0: str | None, changed: Mapping[str, str]) -> Difference:
        """The difference from s0 (None: from no rows) to the held snapshot, for a plan without state.

        `changed`: the tables that changed, and the SELECTs of their log rows. NeedsFull when that takes a full load.
        """
        if s0 is None:
            return self.full()
        if not changed:
            return Difference("none", match=self.plan.match)
        with self.computing():
            return self.difference_of(self.outcome(changed, once=True))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """NeedsFull for an error of the server: an image that is gone again may raise what no row of the table does."""
        try:
            yield
        except (psycopg.DataError, psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
            raise NeedsFull(f"a changed row cannot be computed: {str(error).splitlines()[0]}") from error

    def full(self) -> Difference:
        """All rows of the view."""
        self._kind = "full"
        return Difference("full", self._named(self.plan.query), match=self.plan.match)

    def outcome(self, changed: Mapping[str, str], *, once: bool) -> Signed | Replace | None:
        """Take the steps of the plan for these tables and the SELECTs of their log rows; its outcome.

        `once`: signed rows are read once, so what only they are for is not written down.
        """
        if self.plan.full and not self.plan.checked:
            raise NeedsFull(self.plan.full)
        self.task.write(self.connection)
        connection, queue = self.task.holder.connection, self.task.view.queue_name
        # the server quotes names where it must, the plan always
        names = dict(zip(self.task.view.tables, (schema.qualified for schema in self.plan.schemas), strict=True))
        deltas = {}
        read = {table.name: {*table.logged} for table in self.plan.tables}
        for table, logged in log_columns_of(connection, queue, [*changed]).items():
            name = names[table]
            columns = [column for column in logged if column.name in read.get(name, ())]
            deltas[name] = weighted(changed[table], columns)
            self._exact |= {(name, column.name) for column in columns if column.is_exact}
        self.task.tell("netting", 0)
        tables = self._make_deltas(deltas)
        if tables:
            self.task.choose(self._delta_rows)
        self.task.tell("computing", 0)
        return self._take_all(tables, once)

    def difference_of(self, outcome: Signed | Replace | None) -> Difference:
        """The outcome of a plan without state as a difference."""
        if outcome is None:
            return Difference("none", match=self.plan.match)
        if isinstance(outcome, Signed):
            columns = [f"c{n}" for n in range(1, len(self.types) + 1)]
            return self.net(f"select {', '.join([*columns, 'w'])} from {outcome.rows} as r")
        keys = tuple(replace(self._keys[name], column=column) for column, name in outcome.keys)
        return Difference("replace", self._named(self.rows_of(outcome)), keys, self.plan.match)

    def rows_of(self, outcome: Replace, some: Mapping[str, KeySet] | None = None) -> str:
        """The SELECT of the rows that come; with `some` keys in place of all those of the same name, when given."""
        literals = dict(self._literals)
        for name, keys in (some or {}).items():
            literals |= self._literals_of(name, keys)
        return _TOKEN.sub(lambda token: literals[token[0]], outcome.sql)

    def net(self, rows: str) -> Difference:
        """Net signed rows (c1, c2, ..., w) of the view into OUT."""
        return net(self.temporary, self.types, rows, self.plan.match)

    def temporary(self, name: str, query: str, weight: str | None = None) -> int:
        """Make a table that ends with the transaction; its rows. `weight`: a column of one that is to be joined."""
        self._made.append(f"pg_temp.{name}")
        return temporary(self.connection, name, query, weight)

    def one(self, query: str) -> Any:
        """The first value of the first row."""
        row = self.connection.execute(raw(query)).fetchone()
        return row[0] if row else None

    def end(self) -> None:
        """Drop what would outlive the transaction."""
        if self._views:
            run(self.connection, f"drop view {', '.join(self._views)}")
            self._views.clear()

    def clear(self) -> None:
        """Drop what was made, so that another view can be computed in the same transaction."""
        if self._made:
            run(self.connection, f"drop table {', '.join(self._made)}")
            self._made.clear()

    def _named(self, query: str) -> str:
        names = ", ".join(quote(column.name) for column in self.types)
        return f"select * from ({query}) as r({names})" if names else query

    def _make_deltas(self, images: Mapping[str, str]) -> list[str]:
        """Net the signed images of tables, SELECTs with __gdq_weight, into relations; the tables that did change."""
        changed = []
        # as in gdq.arrow.LOG_SETTINGS: of a log that a slower consumer keeps only what is new should be read
        run(self.connection, "set local enable_seqscan = off")
        for number, table in enumerate(self.plan.tables, 1):
            if table.name in images:
                rows = self._make_delta(number, table, images[table.name])
                self._delta_rows += rows
                if rows:
                    changed.append(table.name)
        run(self.connection, "set local enable_seqscan to default")
        return changed

    def _take_all(self, changed: Sequence[str], once: bool) -> Signed | Replace | None:
        try:
            plan = self.plan.plan_changes(changed)
            if self.plan.elsewhere and isinstance(plan.outcome, Replace):
                if not any(column in self.folded for column, _ in plan.outcome.keys):
                    with suppress(_OtherTypeError), self._tried():
                        return self._take_steps(plan, once)
                plan = self.plan.plan_changes(changed, replace=False)
        except PlanError as error:
            raise NeedsFull(str(error)) from error
        return self._take_steps(plan, once)

    @contextmanager
    def _tried(self) -> Iterator[None]:
        """Undo what the block made when it fails with _OtherTypeError."""
        made = len(self._made)
        try:
            with self.connection.transaction():
                yield
        except _OtherTypeError:
            del self._made[made:]
            self._views.clear()
            self._keys.clear()
            self._literals.clear()
            raise

    def _take_steps(self, plan: ChangePlan, once: bool) -> Signed | Replace | None:
        statements = " ".join(step.sql for step in plan.steps)
        for number, table in enumerate(self.plan.tables, 1):
            if re.search(rf"\bgdq_(old|any)_{number}\b", statements):
                self._make_old(number, table)
                self._views += [f"pg_temp.gdq_old_{number}", f"pg_temp.gdq_any_{number}"]
        steps, last = list(plan.steps), None
        if once and isinstance(plan.outcome, Signed) and steps and steps[-1].name == plan.outcome.rows:
            last = steps.pop()
        for step in steps:
            if self.plan.elsewhere and isinstance(plan.outcome, Replace):
                self._check_type(step, plan.outcome)
            self._take(step)
        if isinstance(plan.outcome, Recompute):
            if self.one(f"select exists (select from {plan.outcome.rows})"):
                raise NeedsFull(plan.outcome.reason)
            return None
        if plan.outcome is not None:
            self._kind = "by-key" if self._views or isinstance(plan.outcome, Replace) else "incremental"
        return plan.outcome if last is None else Signed(f"({self._with_keys(last.sql)})")

    def _check_type(self, step: Step, outcome: Replace) -> None:
        """_OtherTypeError for keys of another type than the column of the view that they replace rows by.

        They come from any column that is compared with it: a bigint that no integer equals, a time within a day.
        """
        types = {column.name: column.type for column in self.types}
        wanted = [types[column] for column, name in outcome.keys if name == step.name]
        if wanted:
            ((_, _, kind),) = describe(self.connection, self._with_keys(step.sql), {})
            if any(own not in (kind, base_name(kind)) for own in wanted):
                raise _OtherTypeError

    def _make_delta(self, number: int, table: UsedTable, images: str) -> int:
        columns = ", ".join(quote(name) for name in table.logged)
        weight, images = quote(WEIGHT), table.matter(images)
        net = f"sum({weight}) over (partition by __image) as {weight}"
        if table.keys_only:  # an update of a column that is not logged nets to nothing
            query = f"select distinct {columns}, 1 as {weight} from {images} as i"
        elif table.key and all((table.name, name) in self._exact for name in table.logged):
            query = (
                f"select {columns}, sum({weight}) as {weight} from {images} as i "
                f"group by {columns} having sum({weight}) <> 0"
            )
        else:
            listed = f"{columns}, " if columns else ""
            query = (
                f"select * from (select distinct on (__image) {listed}__image, {net} "
                f"from (select {listed}{weight}, {image_of(table.logged)} as __image from {images} as i) as i) as net "
                f"where {weight} <> 0"
            )
        return self.temporary(f"gdq_delta_{number}", query, weight)

    def _make_old(self, number: int, table: UsedTable) -> None:
        """The table as it was, and all rows of both states, as views over the table and its delta."""
        columns = ", ".join(quote(name) for name in table.logged)
        delta, weight = f"pg_temp.gdq_delta_{number}", quote(WEIGHT)
        gone = f"select {columns} from {delta} where {weight} < 0"
        rows = f"select {columns} from {table.name} union all {gone}"
        if table.key:
            same = " and ".join(f"d.{quote(key)} = t.{quote(key)}" for key in table.key)
            kept = f"select {columns} from {table.name} as t where not exists (select from {delta} as d where {same})"
        else:
            image = image_of(table.logged)
            gone = f"select {columns} from {delta}, generate_series(1, -{weight}) where {weight} < 0"
            kept = (
                f"select {columns} from (select {columns}{', ' if columns else ''}{image} as __image, "
                f"row_number() over (partition by {image}) as __copy from {table.name} as i) as t "
                f"where not exists (select from {delta} as d where d.__image = t.__image and t.__copy <= d.{weight})"
            )
        run(self.connection, f"create temp view gdq_old_{number} as {kept} union all {gone}")
        run(self.connection, f"create temp view gdq_any_{number} as {rows}")
        if table.looked_up and self.one(f"select count(*) > {_UNKNOWN_ROWS} from {delta}"):
            for listed in {", ".join(map(quote, table.key)), *map(quote, table.looked_up)} - {""}:
                # values that are too long for an index, or of a type without one
                with suppress(*_NO_INDEX), self.connection.transaction():
                    run(self.connection, f"create index on {delta} ({listed})")

    def _take(self, step: Step) -> None:
        if step.kind == "delta":
            self.temporary(step.name.removeprefix("pg_temp."), self._with_keys(step.sql), "w")
        elif step.kind == "check":
            if self.one(self._with_keys(step.sql)):
                raise NeedsFull(step.reason)
        else:
            self._collect(step)

    def _collect(self, step: Step) -> None:
        row = self.connection.execute(
            f"with q as materialized (select distinct k from ({self._with_keys(step.sql)}) as q(k) "
            f"limit {_KEYS_MAX + 1}), "
            f"a as (select coalesce(array_agg(k) filter (where k is not null), '{{}}')::text, "
            f"coalesce(bool_or(k is null), false), count(*), bool_or(pg_typeof(k)::text like '%[]'), "
            f"pg_typeof(array_agg(k)) as type from q) "
            f"select a.*, format('%I.%I', n.nspname, t.typname) from a join pg_catalog.pg_type as t on t.oid = a.type "
            f"join pg_catalog.pg_namespace as n on n.oid = t.typnamespace"
        ).fetchone()
        # not the type as it is written: character[] is of one letter each
        values, null, count, nested, _, kind = row or ("{}", False, 0, False, None, "text[]")
        if count > _KEYS_MAX:
            raise NeedsFull(f"more than {_KEYS_MAX} keys changed")
        if len(values) > _KEYS_BYTES_MAX:
            raise NeedsFull(f"the keys that changed take more than {_KEYS_BYTES_MAX} bytes")
        if nested:
            raise NeedsFull("a key is an array")
        self._keys[step.name] = KeySet("", values, kind, null)
        self._literals |= self._literals_of(step.name, self._keys[step.name])

    def _literals_of(self, name: str, keys: KeySet) -> dict[str, str]:
        """The texts that take the place of keys in a statement."""
        array = f"{sql.Literal(keys.array).as_string(self.connection)}::{keys.array_type}"
        return {name: array, name.replace("keys", "null"): "true" if keys.null else "false"}

    def _with_keys(self, statement: str) -> str:
        return _TOKEN.sub(lambda token: self._literals[token[0]], statement)


def net(make: Make, types: Sequence[OutputType], rows: str, match: Sequence[str]) -> Difference:
    """Net signed rows (c1, c2, ..., w) of a view into OUT, a table that `make` makes."""
    typed = "".join(f"c{n}::{column.type} as c{n}, " for n, column in enumerate(types, 1))
    names = [f"c{n}" for n in range(1, len(types) + 1)]
    make(
        "gdq_out",
        f"select * from (select distinct on (image) *, sum(w) over (partition by image) as net "
        f"from (select *, {image_of(names)} as image from (select {typed}w from ({rows}) as r) as r) as r) as r "
        f"where net <> 0",
    )
    weight = "w"
    while any(column.name == weight for column in types):
        weight += "_"
    shown = "".join(f"c{n} as {quote(column.name)}, " for n, column in enumerate(types, 1))
    listed = f"select {shown}net::bigint as {quote(weight)} from {OUT}"
    return Difference("signed", listed, match=tuple(match), weight=weight)


def temporary(connection: Connection[Any], name: str, query: str, weight: str | None = None) -> int:
    """Make a table that ends with the transaction; its rows. `weight`: a column of one that is to be joined."""
    rows = run(connection, f"create temp table {name} on commit drop as {query}")
    if rows > _UNKNOWN_ROWS:
        # sizes and numbers of distinct values are wanted, which a small sample tells in a tenth of the time
        target = "set local default_statistics_target"
        run(connection, f"{target} = 3; analyze pg_temp.{name}; {target} to default")
    elif weight is not None:
        # joined as one of unknown size, a table of ten rows had whole tables read beside it
        run(connection, f"analyze pg_temp.{name} ({weight})")
    return rows
