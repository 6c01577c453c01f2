"""Refreshes a view inside the database that holds both its tables and its target, in one transaction.

The steps of the plan are statements of the server; what passes through this process are the keys that they collect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection, sql

from gdq.consumers.leader import Leader
from gdq.consumers.relations import log_columns, weighted
from gdq.pgtypes import READ_SETTINGS
from gdq.plan import WEIGHT, PlanError, quote
from gdq.plan_incremental import Replace, Step
from gdq.plan_postgres import Changes, PostgresPlan, UsedTable
from gdq.plan_query import render
from gdq.plan_state import StatePlan
from gdq.target import Diverged, NeedsFull, OutputType, Target, run
from gdq.view import ViewInfo, apply_settings

# More keys than these are looked up one by one for longer than the whole takes.
_KEYS_MAX = 50_000

# Of a table without statistics PostgreSQL thinks that it has about so many.
_UNKNOWN_ROWS = 500

_TOKEN = re.compile(r"\bgdq_(keys|null)_(\d+)\b")
_OUT, _GONE, _SUMS, _BEFORE = "pg_temp.gdq_out", "pg_temp.gdq_gone", "pg_temp.gdq_sums", "pg_temp.gdq_before"


@dataclass(slots=True)
class PostgresEngine:
    """One refresh of one view in the transaction of `output`, which reads what the leader sees."""

    leader: Leader
    output: Connection[Any]
    target: Target
    view: ViewInfo
    plan: PostgresPlan
    types: Sequence[OutputType]
    _keys: dict[str, str] = field(default_factory=dict, init=False)

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """NeedsFull for a view that has no delta; all else is done in one transaction."""
        if s0 is not None and changed and self.plan.full:
            raise NeedsFull(self.plan.full)

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:
        """Load the target in full, or bring it from s0 to the leader's snapshot; the rows deleted and inserted.

        NeedsFull when that takes a full load, Diverged when the target lacks rows that should go. Must come first in
        its transaction.
        """
        self.output.execute("set transaction isolation level repeatable read")
        self.output.execute(sql.SQL("set transaction snapshot {}").format(sql.Literal(self.leader.exported)))
        apply_settings(self.output, READ_SETTINGS | self.view.settings)
        if s0 is None:
            return self._load()
        if not changed:
            return 0
        connection, queue = self.leader.connection, self.view.queue_name
        # the server quotes names where it must, the plan always
        names = dict(zip(self.view.tables, (schema.qualified for schema in self.plan.schemas), strict=True))
        deltas = {}
        with connection.transaction():
            for table, rows in changed.items():
                deltas[names[table]] = weighted(rows, log_columns(connection, queue, table))
        try:
            return self._change(self._make_deltas(deltas))
        except (psycopg.DataError, psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
            # an image that is gone again may raise what no row of the table does
            raise NeedsFull(f"a changed row cannot be computed: {str(error).splitlines()[0]}") from error

    def _load(self) -> int:
        """Fill the target, made if missing, with all rows of the view; the rows deleted and inserted."""
        deleted = self.target.empty(self.output, self.types)
        columns = ", ".join(quote(column.name) for column in self.types)
        state = self.plan.state
        if state is None:
            inserted = run(self.output, f"insert into {self.target.table} ({columns}) {self.plan.query}")
        else:
            self._make_state(state)
            inserted = run(self.output, f"insert into {self.target.table} ({columns}) {self._shown(state, '')}")
        self.target.make_index(self.output, ", ".join(quote(column) for column in self.plan.match), unique=False)
        run(self.output, f"analyze {self.target.table}")
        return deleted + inserted

    def _make_deltas(self, images: Mapping[str, str]) -> list[str]:
        """Net the signed images of tables, SELECTs with __gdq_weight, into relations; the tables that did change."""
        changed = []
        for number, table in enumerate(self.plan.tables, 1):
            if table.name in images:
                self._make_delta(number, table, images[table.name])
                if self._one(f"select exists (select from pg_temp.gdq_delta_{number})"):
                    changed.append(table.name)
        return changed

    def _change(self, changed: Sequence[str]) -> int:
        """Bring the target to the present by the deltas of these tables."""
        try:
            steps = self.plan.changes(changed)
        except PlanError as error:
            raise NeedsFull(str(error)) from error
        statements = " ".join(step.sql for step in steps.steps)
        views = []
        for number, table in enumerate(self.plan.tables, 1):
            if re.search(rf"\bgdq_(old|any)_{number}\b", statements):
                self._make_old(number, table)
                views.append(f"pg_temp.gdq_old_{number}, pg_temp.gdq_any_{number}")
        for step in steps.steps:
            self._take(step)
        rows = self._finish(steps)
        if views:
            run(self.output, f"drop view {', '.join(views)}")
        return rows

    def _finish(self, steps: Changes) -> int:
        if steps.outcome is None:
            return 0
        if isinstance(steps.outcome, Replace):
            return self._replace(steps.outcome)
        columns = [f"c{n}" for n in range(1, len(self.types) + 1)]
        if self.plan.state is None:
            return self._merge(f"select {', '.join(columns)}, w from {steps.outcome.rows}")
        return self._merge_state(self.plan.state, steps.outcome.rows)

    def _make_delta(self, number: int, table: UsedTable, images: str) -> None:
        columns = ", ".join(quote(name) for name in table.logged)
        weight = quote(WEIGHT)
        self._temporary(
            f"gdq_delta_{number}",
            f"select * from (select distinct on (__image) {columns}{', ' if columns else ''}__image, "
            f"sum({weight}) over (partition by __image) as {weight} "
            f"from (select {columns}{', ' if columns else ''}{weight}, {_image(table.logged)} as __image "
            f"from {images} as i) as i) as net where {weight} <> 0",
        )

    def _make_old(self, number: int, table: UsedTable) -> None:
        """The table as it was, and all rows of both states, as views over the table and its delta."""
        columns = ", ".join(quote(name) for name in table.logged)
        delta, weight = f"pg_temp.gdq_delta_{number}", quote(WEIGHT)
        gone = f"select {columns} from {delta}, generate_series(1, -{weight}) where {weight} < 0"
        if table.key:
            same = " and ".join(f"d.{quote(key)} = t.{quote(key)}" for key in table.key)
            kept = f"select {columns} from {table.name} as t where not exists (select from {delta} as d where {same})"
        else:
            image = _image(table.logged)
            kept = (
                f"select {columns} from (select {columns}{', ' if columns else ''}{image} as __image, "
                f"row_number() over (partition by {image}) as __copy from {table.name} as i) as t "
                f"where not exists (select from {delta} as d where d.__image = t.__image and t.__copy <= d.{weight})"
            )
        run(self.output, f"create temp view gdq_old_{number} as {kept} union all {gone}")
        rows = f"select {columns} from {table.name} union all {gone}"
        run(self.output, f"create temp view gdq_any_{number} as {rows}")

    def _take(self, step: Step) -> None:
        if step.kind == "delta":
            self._temporary(step.name.removeprefix("pg_temp."), self._with_keys(step.sql))
        elif step.kind == "check":
            if self._one(self._with_keys(step.sql)):
                raise NeedsFull(step.reason)
        else:
            self._collect(step)

    def _collect(self, step: Step) -> None:
        row = self.output.execute(
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
        if nested:
            raise NeedsFull("a key is an array")
        self._keys[step.name] = f"{sql.Literal(values).as_string(self.output)}::{kind}"
        self._keys[step.name.replace("keys", "null")] = "true" if null else "false"

    def _replace(self, outcome: Replace) -> int:
        conditions = []
        for column, keys in outcome.keys:
            name, null = quote(column), self._keys[keys.replace("keys", "null")]
            conditions.append(f"({name} = any ({self._keys[keys]}) or ({null} and {name} is null))")
        deleted = run(self.output, f"delete from {self.target.table} where {' and '.join(conditions)}")
        columns = ", ".join(quote(column.name) for column in self.types)
        rows = self._with_keys(outcome.sql)
        return deleted + run(self.output, f"insert into {self.target.table} ({columns}) {rows}")

    def _merge(self, rows: str) -> int:
        """Apply signed rows (c1, c2, ..., w): exactly as many equal rows go as they take away."""
        typed = ", ".join(f"c{n}::{column.type} as c{n}" for n, column in enumerate(self.types, 1))
        names = [f"c{n}" for n in range(1, len(self.types) + 1)]
        self._temporary(
            "gdq_out",
            f"select * from (select distinct on (image) *, sum(w) over (partition by image) as net "
            f"from (select *, {_image(names)} as image from (select {typed}, w from ({rows}) as r) as r) as r) as r "
            f"where net <> 0",
        )
        deleted = self._delete()
        columns = ", ".join(quote(column.name) for column in self.types)
        return deleted + run(
            self.output,
            f"insert into {self.target.table} ({columns}) "
            f"select {', '.join(names)} from {_OUT}, generate_series(1, net) where net > 0",
        )

    def _delete(self) -> int:
        expected = self._one(f"select coalesce(-sum(net), 0)::bigint from {_OUT} where net < 0")
        if not expected:
            return 0
        numbers = {column.name: n for n, column in enumerate(self.types, 1)}
        match = [(quote(name), f"d.c{numbers[name]}") for name in self.plan.match]
        some = " or ".join(f"{value} is null" for _, value in match)
        same = "".join(f" and t.{name} = {value}" for name, value in match)
        alike = "".join(f" and t.{name} is not distinct from {value}" for name, value in match)
        image = _image([column.name for column in self.types], "t.")
        joined = (
            f"select t.ctid, row_number() over (partition by d.image) as copy, -d.net as n "
            f"from {self.target.table} as t join {_OUT} as d on d.net < 0 and d.image = {image}"
        )
        parts = [f"{joined}{same}"] + ([f"{joined}{alike} and ({some})"] if match else [])
        found = " union all ".join(f"({part})" for part in parts)
        gone = f"array(select ctid from ({found}) as f where copy <= n)"
        deleted = run(self.output, f"delete from {self.target.table} where ctid = any ({gone})")
        if deleted != expected:
            raise Diverged(f"{self.target.table} held {deleted} of the {expected} rows that went")
        return deleted

    def _make_state(self, state: StatePlan) -> None:
        """Make the state afresh from the tables."""
        table, columns = self.target.state, state.group_columns
        items = ", ".join(f"{render(item)} as c{n}" for n, item in enumerate(state.items, 1))
        bare = state.select.copy()
        for clause in ("group", "having", "order", "limit", "expressions"):
            bare.set(clause, None)
        source = render(bare).removeprefix("SELECT")
        run(self.output, f"drop table if exists {table}")
        rows = f"(select {items}{', ' if items else ''}1 as w{source})"
        run(self.output, f"create table {table} as {state.sums(rows)}")
        run(self.output, f"alter table {table} add check (n {'>' if columns else '>='} 0)")
        if columns:
            listed = ", ".join(f"(array[{column}])" for column in columns)
            run(self.output, f"create unique index on {table} ({listed})")
        run(self.output, f"analyze {table}")

    def _merge_state(self, state: StatePlan, rows: str) -> int:
        """Add signed rows of groups and arguments to the state, and the groups' old and new rows to the target."""
        check = state.no_number(rows)
        if check and self._one(check):
            raise NeedsFull("NaN or infinity came into or went from a sum")
        columns, numbers = state.group_columns, state.numbers
        some = " or ".join(f"{name} <> 0" for name in numbers)
        self._temporary("gdq_sums", f"select * from ({state.sums(rows)}) as s where {some}")
        touched = "" if state.order else f" join {_SUMS} as d on {_same(columns)}"
        names = ", ".join(f"c{n}" for n in range(1, len(self.types) + 1))
        self._temporary("gdq_before", f"select *, -1 as w from ({self._shown(state, touched)}) as b({names})")
        added = ", ".join(f"{name} = s.{name} + d.{name}" for name in numbers)
        gone = "when matched and s.n + d.n = 0 then delete " if columns else ""
        listed = ", ".join([*columns, *numbers])
        values = ", ".join(f"d.{name}" for name in [*columns, *numbers])
        try:
            run(
                self.output,
                f"merge into {self.target.state} as s using {_SUMS} as d on {_same(columns)} {gone}"
                f"when matched then update set {added} when not matched then insert ({listed}) values ({values})",
            )
        except psycopg.errors.CheckViolation as error:
            raise Diverged(f"{self.target.state} counts fewer rows than the delta takes away") from error
        after = f"select *, 1 as w from ({self._shown(state, touched)}) as a({names})"
        return self._merge(f"{after} union all select * from {_BEFORE}")

    def _shown(self, state: StatePlan, touched: str) -> str:
        """The view's rows from the state."""
        where = f" where {state.having}" if state.having else ""
        return f"select {', '.join(state.visible)} from {self.target.state} as s{touched}{where}{state.order}"

    def _with_keys(self, statement: str) -> str:
        return _TOKEN.sub(lambda token: self._keys[token[0]], statement)

    def _temporary(self, name: str, query: str) -> None:
        rows = run(self.output, f"create temp table {name} on commit drop as {query}")
        if rows > _UNKNOWN_ROWS:
            run(self.output, f"analyze pg_temp.{name}")

    def _one(self, query: str) -> Any:
        row = self.output.execute(sql.SQL(query)).fetchone()
        return row[0] if row else None


def _image(columns: Sequence[str], prefix: str = "") -> str:
    """A row's columns in one text, NULL and empty text told apart: rows of types without an equality compare by it."""
    return f"row({', '.join(prefix + quote(name) for name in columns)})::text"


def _same(columns: Sequence[str]) -> str:
    """The condition that s and d are one group; arrays with a NULL each are equal."""
    return " and ".join(f"array[s.{column}] = array[d.{column}]" for column in columns) or "true"
