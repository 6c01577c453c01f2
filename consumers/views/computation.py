"""Computes the changes of a view in one refresh, in the source database, by temporary tables of one transaction.

The steps of the plan run as statements on the server; only collected keys pass through this process.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import psycopg
from psycopg import Connection, sql

from gdq.consumers.views.change_source import LoggedRows
from gdq.consumers.views.difference import Difference, KeySet
from gdq.consumers.views.engine import EffortKind, EngineEffort, EngineTask, rows_read
from gdq.consumers.views.netting import (
    BEGIN_NETTING,
    END_NETTING,
    UNKNOWN_ROWS,
    as_part,
    make_temporary_table,
    net_signed_rows,
    netted_images_sql,
    old_rows_sql,
    with_parts,
)
from gdq.consumers.views.signals import NeedsFull
from gdq.consumers.views.target import TargetColumn
from gdq.errors import PlanError
from gdq.owner_sql import OwnerSql
from gdq.plan.postgres import ChangePlan, PostgresPlan
from gdq.plan.steps import PlanStep, RecomputeOutcome, ReplaceOutcome, SignedOutcome
from gdq.plan.table import WEIGHT_COLUMN, UsedTable
from gdq.sql_text import PIN_TRANSACTION, is_not_null, is_null, quote, raw
from gdq.typed.pgtypes import READ_SETTINGS, base_type_name
from gdq.view.table_schema import apply_view_settings, describe_query

# 100,000 keys of two million rows cost 0.6 of a full load (python -m bench.keys), and statements repeat the keys.
KEYS_MAX = 100_000
KEYS_BYTES_MAX = 16 * 2**20

_TOKEN = re.compile(r"\bgdq_(keys|null)_(\d+)\b")

# Errors of a server that cannot index a column; a cancelled statement raises none of these.
_NO_INDEX = (
    psycopg.errors.ProgramLimitExceeded,
    psycopg.ProgrammingError,
    psycopg.NotSupportedError,
    psycopg.DataError,
)


class _OtherTypeError(Exception):
    """The collected keys have another type than the view's column."""


@dataclass(slots=True)
class Computation:
    """Computes one refresh's changes of a view in the transaction of `connection` at the held snapshot.

    `types`: the view's columns. `folded`: columns whose values the target compares differently than the source, such
    as citext stored as text; rows are never replaced by such a column. `made`: the temporary tables there are by now.
    `replaced`: the keys whose rows were replaced.
    """

    connection: Connection[Any]
    task: EngineTask
    plan: PostgresPlan
    types: Sequence[TargetColumn]
    folded: Collection[str] = ()
    _keys: dict[str, KeySet] = field(default_factory=dict, init=False)
    _literals: dict[str, str] = field(default_factory=dict, init=False)
    made: list[str] = field(default_factory=list, init=False)
    _views: list[str] = field(default_factory=list, init=False)
    _kind: EffortKind = field(default="none", init=False)
    _delta_rows: int = field(default=0, init=False)
    _read_before: int | None = field(default=None, init=False)
    _logged: dict[str, LoggedRows] | None = field(default=None, init=False)
    _given: dict[str, int] | None = field(default=None, init=False)
    _parts: dict[str, str] = field(default_factory=dict, init=False)
    _by_key: bool = field(default=False, init=False)
    replaced: tuple[KeySet, ...] = field(default=(), init=False)

    @property
    def sql(self) -> OwnerSql:
        """Runs the plan's SQL, as the view's owner."""
        return OwnerSql(self.connection, self.task.view.acts_as)

    def begin(self) -> None:
        """Join the held snapshot and apply the view's settings, first in the transaction; may raise TableWanted."""
        self.join()
        apply_view_settings(self.connection, READ_SETTINGS | self.task.view.settings)
        self._read_before = self._rows_read()

    def join(self) -> None:
        """Join the held snapshot unless an earlier view of the group has done so."""
        if not self.task.joined:
            self.task.holder.join(self.connection)

    def effort(self) -> EngineEffort:
        """The work of the refresh so far; call it in the same transaction."""
        read = 0 if self._read_before is None else self._rows_read() - self._read_before
        return EngineEffort(self._kind, self._delta_rows, read)

    def _rows_read(self) -> int:
        return rows_read(self.connection, [table.name for table in self.plan.tables])

    @contextmanager
    def beside(self) -> Iterator[Self]:
        """Compute beside the target's session: begin a transaction that ends with the block.

        `connection` must lead to the source, outside a transaction and not in autocommit.
        """
        # no other view of the group has begun this transaction
        self.task = replace(self.task, joined=False)
        try:
            self.begin()
            yield self
        finally:
            if not self.connection.closed:
                self.connection.rollback()

    def difference(self, s0: str | None, changed: Mapping[str, str]) -> Difference:
        """The difference from s0 (None: from no rows) to the held snapshot, for a plan without state.

        `changed`: the changed tables with the SELECTs of their log rows. NeedsFull if the changes are not enough.
        """
        if s0 is None:
            return self.full()
        if not changed:
            return Difference("none", match=self.plan.match)
        with self.computing():
            return self.difference_of(self.outcome(changed, once=True))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Turn a server error into NeedsFull: images of rows that are gone may raise where no row of the table does."""
        try:
            yield
        except (psycopg.DataError, psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
            raise NeedsFull(f"a changed row cannot be computed: {str(error).splitlines()[0]}") from error

    def full(self) -> Difference:
        """All rows of the view as a difference."""
        self._kind = "full"
        self.task.tell.expect_rows_of(self.sql, self.plan.query)
        return Difference("full", self._named(self.plan.query), match=self.plan.match)

    def outcome(self, changed: Mapping[str, str], *, once: bool) -> SignedOutcome | ReplaceOutcome | None:
        """Run the plan's steps for these tables, given with the SELECTs of their log rows; returns the outcome.

        `once`: the caller reads signed rows once, so the last step becomes a subquery instead of a table.
        """
        if self.plan.full and not self.plan.checked:
            raise NeedsFull(self.plan.full)
        if self._given is None:
            logged = self._readable(self.logged(changed))
            self.task.tell("netting")
            tables = self._make_deltas(logged)
        else:
            tables, self._delta_rows = [*self._given], sum(self._given.values())
        if tables:
            self.task.choose(self._delta_rows)
        self.task.tell("computing")
        return self._take_all(tables, once)

    def logged(self, changed: Mapping[str, str]) -> dict[str, LoggedRows]:
        """The log rows of these tables, given with their SELECTs, by the tables' names as the plan has them.

        The session may read them, the view's owner may not.
        """
        if self._logged is not None:
            return self._logged
        self.task.write(self.connection)
        # the plan quotes every name, the server only where needed
        names = dict(zip(self.task.view.tables, (schema.qualified for schema in self.plan.schemas), strict=True))
        read = {table.name: {*table.logged} for table in self.plan.tables}
        self._logged = {}
        for table, found in self.task.log_columns([*changed]).items():
            columns = tuple(column for column in found if column.name in read.get(names[table], ()))
            self._logged[names[table]] = LoggedRows(changed[table], columns)
        return self._logged

    def give(self, deltas: Mapping[str, tuple[int, str]]) -> None:
        """Take netted changes, rows and SELECT by the table's name; they become parts of statements, not tables."""
        self._given = {name: rows for name, (rows, _) in deltas.items()}
        numbers = {table.name: number for number, table in enumerate(self.plan.tables, 1)}
        self._parts = {f"gdq_delta_{numbers[name]}": select for name, (_, select) in deltas.items()}

    def computed(self, kind: EffortKind, delta_rows: int) -> None:
        """Note what was computed elsewhere in the transaction, for effort()."""
        self._kind, self._delta_rows = kind, delta_rows

    def _readable(self, logged: Mapping[str, LoggedRows]) -> Mapping[str, LoggedRows]:
        """Log rows that the view's owner may read: the owner may read the tables, but not the logs.

        The session itself copies the rows into temporary tables, without running any code of the view.
        """
        view = self.task.view
        if view.acts_as is None:
            return logged
        self.connection.execute(raw(f"set local role to default; {PIN_TRANSACTION}; set local enable_seqscan = off"))
        found = dict(logged)
        for number, (table, rows) in enumerate(logged.items(), 1):
            if "pg_temp." not in rows.select:  # a slot's changes are in temporary tables already
                self.made.append(f"pg_temp.gdq_log_rows_{number}")
                make_temporary_table(OwnerSql(self.connection, None), f"gdq_log_rows_{number}", rows.select)
                grant = f"grant select on pg_temp.gdq_log_rows_{number} to {quote(view.acts_as)}"
                self.connection.execute(raw(grant))
                found[table] = replace(rows, select=f"select * from pg_temp.gdq_log_rows_{number}")
        self.connection.execute("set local enable_seqscan to default")
        apply_view_settings(self.connection, READ_SETTINGS | view.settings)
        return found

    def difference_of(self, outcome: SignedOutcome | ReplaceOutcome | None) -> Difference:
        """The difference that an outcome stands for; for plans without state."""
        if outcome is None:
            return Difference("none", match=self.plan.match)
        if isinstance(outcome, SignedOutcome):
            columns = [f"c{n}" for n in range(1, len(self.types) + 1)]
            return self.net(f"select {', '.join([*columns, 'w'])} from {outcome.rows} as r")
        keys = tuple(replace(self._keys[name], column=column) for column, name in outcome.keys)
        self.replaced = keys
        return Difference("replace", self._named(self.rows_of(outcome)), keys, self.plan.match)

    def rows_of(self, outcome: ReplaceOutcome, some: Mapping[str, KeySet] | None = None) -> str:
        """SELECT of the rows to insert; `some` replaces the keys of the same name, to compute a part of the rows."""
        literals = dict(self._literals)
        for name, keys in (some or {}).items():
            literals |= self._literals_of(name, keys)
        return _TOKEN.sub(lambda token: literals[token[0]], outcome.sql)

    def net(self, rows: str) -> Difference:
        """Net signed rows (c1, c2, ..., w) of the view into NETTED_ROWS."""
        return net_signed_rows(self.temporary, self.types, rows, self.plan.match)

    def temporary(self, name: str, query: str, weight: str | None = None) -> int:
        """As the function make_temporary_table(), for a table that clear() drops."""
        self.made.append(f"pg_temp.{name}")
        return make_temporary_table(self.sql, name, query, weight)

    def one(self, query: str) -> Any:
        """The first value of a query's first row."""
        return self.sql.value(query)

    def end(self) -> None:
        """Drop the temporary views, which would outlive the transaction."""
        if self._views:
            self.connection.execute(raw(f"drop view {', '.join(self._views)}"))
            self._views.clear()

    def clear(self) -> None:
        """Drop the temporary tables, so that another view can be computed in the same transaction."""
        if self.made:
            self.connection.execute(raw(f"drop table {', '.join(self.made)}"))
            self.made.clear()

    def _named(self, query: str) -> str:
        names = ", ".join(quote(column.name) for column in self.types)
        return f"select * from ({query}) as r({names})" if names else query

    def _make_deltas(self, logged: Mapping[str, LoggedRows]) -> list[str]:
        """Net the signed images of tables into temporary tables; returns those changed."""
        changed = []
        self.connection.execute(BEGIN_NETTING)
        for number, table in enumerate(self.plan.tables, 1):
            found = logged.get(table.name)
            if found is None:
                continue
            query = netted_images_sql(table, found.images, exact=found.is_exact(table.logged))
            rows = self.temporary(f"gdq_delta_{number}", query, quote(WEIGHT_COLUMN))
            self._delta_rows += rows
            if rows:
                changed.append(table.name)
        self.connection.execute(END_NETTING)
        return changed

    def _take_all(self, changed: Sequence[str], once: bool) -> SignedOutcome | ReplaceOutcome | None:
        try:
            plan = self.plan.plan_changes(changed)
            if self.plan.elsewhere and isinstance(plan.outcome, ReplaceOutcome):
                if not any(column in self.folded for column, _ in plan.outcome.keys):
                    with suppress(_OtherTypeError), self._tried():
                        return self._take_steps(plan, once)
                plan = self.plan.plan_changes(changed, replace=False)
        except PlanError as error:
            raise NeedsFull(str(error)) from error
        return self._take_steps(plan, once)

    @contextmanager
    def _tried(self) -> Iterator[None]:
        """Undo the block's tables, views and keys if it fails with _OtherTypeError."""
        made = len(self.made)
        try:
            with self.connection.transaction():
                yield
        except _OtherTypeError:
            del self.made[made:]
            self._views.clear()
            self._by_key = False
            self._keys.clear()
            self._literals.clear()
            raise

    def _take_steps(self, plan: ChangePlan, once: bool) -> SignedOutcome | ReplaceOutcome | None:
        statements = " ".join(step.sql for step in plan.steps)
        for number, table in enumerate(self.plan.tables, 1):
            if re.search(rf"\bgdq_(old|any)_{number}\b", statements):
                self._make_old(number, table)
        steps, last = list(plan.steps), None
        if once and isinstance(plan.outcome, SignedOutcome) and steps and steps[-1].name == plan.outcome.rows:
            last = steps.pop()
        for step in steps:
            if self.plan.elsewhere and isinstance(plan.outcome, ReplaceOutcome):
                self._check_type(step, plan.outcome)
            self._take(step)
        if isinstance(plan.outcome, RecomputeOutcome):
            if self.one(f"select exists (select from {plan.outcome.rows})"):
                raise NeedsFull(plan.outcome.reason)
            return None
        if plan.outcome is not None:
            self._kind = "by-key" if self._by_key or isinstance(plan.outcome, ReplaceOutcome) else "incremental"
        return plan.outcome if last is None else SignedOutcome(f"({self._with_keys(last.sql)})")

    def _check_type(self, step: PlanStep, outcome: ReplaceOutcome) -> None:
        """_OtherTypeError if keys have another type than the view's column that they are compared with.

        Example: keys from a bigint column compared with an integer column, or timestamps with a date.
        """
        types = {column.name: column.type for column in self.types}
        wanted = [types[column] for column, name in outcome.keys if name == step.name]
        if wanted:
            ((_, _, kind),) = describe_query(self.connection, self._with_keys(step.sql), self.task.view.role)
            if any(own not in (kind, base_type_name(kind)) for own in wanted):
                raise _OtherTypeError

    def _make_old(self, number: int, table: UsedTable) -> None:
        """Make the relations of a table as it was, and of all rows that it has or had: views, if its change is one."""
        names, delta = (f"gdq_old_{number}", f"gdq_any_{number}"), f"gdq_delta_{number}"
        self._by_key = True
        if delta in self._parts:
            self._parts |= dict(zip(names, old_rows_sql(table, delta), strict=True))
            return
        delta = f"pg_temp.{delta}"
        for name, rows in zip(names, old_rows_sql(table, delta), strict=True):
            self.sql.run(f"create temp view {name} as {rows}")
            self._views.append(f"pg_temp.{name}")
        if table.looked_up and self.one(f"select count(*) > {UNKNOWN_ROWS} from {delta}"):
            for listed in {", ".join(map(quote, table.key)), *map(quote, table.looked_up)} - {""}:
                # the column's values may be too long for an index, or its type may have none
                with suppress(*_NO_INDEX), self.connection.transaction():
                    self.sql.run(f"create index on {delta} ({listed})")

    def _take(self, step: PlanStep) -> None:
        if step.kind == "delta":
            self.temporary(step.name.removeprefix("pg_temp."), self._with_keys(step.sql), "w")
        elif step.kind == "check":
            if self.one(self._with_keys(step.sql)):
                raise NeedsFull(step.reason)
        else:
            self._collect(step)

    def _collect(self, step: PlanStep) -> None:
        keys = self._with_keys(step.sql)
        if step.instead:
            keys = min(keys, self._with_keys(step.instead), key=self.sql.cost)
        rows = self.sql.rows(
            f"with q as materialized (select distinct k from ({keys}) as q(k) "
            f"limit {KEYS_MAX + 1}), "
            f"a as (select coalesce(array_agg(k) filter (where {is_not_null('k')}), '{{}}')::text as keys, "
            f"coalesce(bool_or({is_null('k')}), false) as null, count(*), "
            f"bool_or(pg_typeof(k)::text like '%[]') as nested, pg_typeof(array_agg(k)) as type from q) "
            f"select a.*, format('%I.%I', n.nspname, t.typname) from a join pg_catalog.pg_type as t on t.oid = a.type "
            f"join pg_catalog.pg_namespace as n on n.oid = t.typnamespace"
        )
        # the type's own name, since format_type's character[] reads as arrays of char(1)
        values, null, count, nested, _, kind = next(iter(rows), ("{}", False, 0, False, None, "text[]"))
        if count > KEYS_MAX:
            raise NeedsFull(f"more than {KEYS_MAX} keys changed")
        if len(values) > KEYS_BYTES_MAX:
            raise NeedsFull(f"the keys that changed take more than {KEYS_BYTES_MAX} bytes")
        if nested:
            raise NeedsFull("a key is an array")
        self._keys[step.name] = KeySet("", values, kind, null)
        self._literals |= self._literals_of(step.name, self._keys[step.name])

    def _literals_of(self, name: str, keys: KeySet) -> dict[str, str]:
        """The SQL literals that replace a key's tokens in a statement."""
        array = f"{sql.Literal(keys.array).as_string(self.connection)}::{keys.array_type}"
        return {name: array, name.replace("keys", "null"): "true" if keys.null else "false"}

    def _with_keys(self, statement: str) -> str:
        """A step's SELECT with the keys that there are by now, and with the parts that it reads."""
        select = as_part(statement, self._parts)
        return with_parts(_TOKEN.sub(lambda token: self._literals[token[0]], select), self._parts)
