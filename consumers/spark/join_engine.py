"""Computes views of several tables with Apache Spark: tasks read tables and logs, Spark joins, counts and adds.

What was computed is staged beside the target, where PostgreSQL finishes what concerns several tables and merges it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from gdq.consumers.spark.jobs import (
    LONG,
    PARTITION_BYTES,
    Staged,
    Texts,
    log_bytes,
    own_jobs,
    put,
    text_columns,
    weighed,
    worker_errors,
)
from gdq.consumers.spark.reach import Reach
from gdq.consumers.spark.session import SparkRun
from gdq.consumers.spark.source import read_statements
from gdq.consumers.spark.table_sql import base, block_ranges, split_log_rows, table_bytes
from gdq.consumers.views.change_source import log_columns, weighted
from gdq.consumers.views.computation import net, temporary
from gdq.consumers.views.difference import Difference
from gdq.consumers.views.engine import Effort, Task
from gdq.consumers.views.kept_state import Kept, KeptState, KeptSums, KeptValues, image_of_keys
from gdq.consumers.views.signals import NeedsFull
from gdq.consumers.views.target import TargetRows, target_types
from gdq.plan.kept_state import StatePlan
from gdq.plan.spark.parts import Branch, LeafRead
from gdq.plan.spark.plan import SparkPlan
from gdq.plan.table import WEIGHT
from gdq.sql_text import quote, raw
from gdq.typed.arrow import LOG_SETTINGS, Column, select_sql
from gdq.typed.pgtypes import AS_TEXT, READ_SETTINGS
from gdq.view.table_schema import apply_settings, describe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


# Look-ups by keys beside rows of the log: where a table has no index for them, compiling the scan is not worth it.
_DELTA_SETTINGS = LOG_SETTINGS | {"jit": "off"}


_WEIGHTS = (Column("n", LONG), Column("o", LONG))


@dataclass(frozen=True, slots=True)
class _Reading:
    """The statements that read one leaf of the SELECT `number` of the view for Spark's relation `name`."""

    number: int
    name: str
    columns: Sequence[Column]
    statements: Sequence[str]

    def padded(self, width: int) -> list[str]:
        """The statements with the name of the relation and `width` columns, padded with NULL."""
        names = [f"q.{quote(column.label)}" for column in self.columns]
        names += ["null::pg_catalog.text"] * (width - len(names))
        listed = "".join(f"{name} as x{n}, " for n, name in enumerate(names, 1))
        head = f"select '{self.name}'::pg_catalog.text as leaf, {listed}q.n, q.o"
        return [f"{head} from ({statement}) as q" for statement in self.statements]


@dataclass(slots=True)
class SparkViews:
    """One refresh of one view of several tables by Spark, whose tasks read what the snapshot holder sees."""

    run: SparkRun
    task: Task
    plan: SparkPlan
    place: TargetRows
    texts: Texts = field(default_factory=lambda: text_columns)
    _effort: Effort = field(default=Effort("none"), init=False)
    _staged: Staged | None = field(default=None, init=False)
    _value_types: list[dict[str, str]] = field(default_factory=list, init=False)

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Let Spark compute, from the changes since s0 or (None) from the whole tables, and stage the result."""
        self.task.tell("computing", 0)
        if s0 is not None and not changed:
            return
        logs = None if s0 is None else self.logs(changed)
        self._value_types = [self._types_of(branch) for branch in self.plan.branches]
        delta_rows = weighed(self.task.holder, changed, self.task.choose)
        try:
            with worker_errors(delta=s0 is not None), own_jobs(self.run.spark) as jobs:
                self._staged = self._write(logs)
            self._effort = Effort("full" if s0 is None else "incremental", delta_rows, jobs.rows_read)
        except psycopg.DataError as error:
            if s0 is None:
                raise
            raise NeedsFull(f"a changed row cannot be computed: {str(error).splitlines()[0]}") from error

    def effort(self) -> Effort:
        """The work of the refresh."""
        return self._effort

    def logs(self, changed: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """The tables that changed under the names of the plan, with their own names and log rows."""
        # the server quotes names where it must, the plan always
        names = dict(zip(self.task.view.tables, (schema.qualified for schema in self.plan.schemas), strict=True))
        return {names[table]: (table, rows) for table, rows in changed.items()}

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:  # noqa: ARG002 (what changed is staged)
        self.task.tell("writing", 0)
        staged = self._staged
        if staged is None:
            return 0
        apply_settings(self.place.output, READ_SETTINGS | self.task.view.settings)
        stage = staged.table or self.place.target.temporary_stage(self.place.output, staged.columns, staged.rows)
        self.place.output.execute(raw(f"analyze {stage}"))
        return self.place.change(self._difference(stage, full=s0 is None))

    def _difference(self, stage: str, *, full: bool) -> Difference:
        """The difference that the staged rows make in the view."""
        match, state, detail = self.plan.match, self.plan.state, self.plan.detail
        make = partial(temporary, self.place.output)
        if state is None and detail is None:
            rows = self._rows(stage)
            if not full:
                return net(make, self.place.types, rows, match)
            values = "".join(f"r.c{n}::{column.type}, " for n, column in enumerate(self.place.types, 1)).rstrip(", ")
            return Difference("full", f"select {values} from ({rows}) as r, generate_series(1, r.w)", match=match)
        kept: Kept
        if state is not None:
            kept, sums = KeptSums(state, self.plan.loose), self._sums(stage, state)
            if not full and self._one(self._no_number(stage, state)):
                raise NeedsFull("NaN or infinity came into or went from a sum")
        elif detail is not None:
            kept = KeptValues(detail, self.plan.loose)
            sums = kept.sums(f"({self._rows(stage)})")
        beside = KeptState(self.place, match, kept, make)
        return beside.load(sums) if full else beside.add(sums)

    def _one(self, query: str) -> Any:
        row = self.place.output.execute(raw(query)).fetchone()
        return row[0] if row else None

    # what is staged

    def _rows(self, stage: str) -> str:
        """The SELECT of signed rows (c1, c2, ..., w) from the staged values."""
        parts = []
        for number, (branch, types) in enumerate(zip(self.plan.branches, self._value_types, strict=True)):
            values = "".join(f"{name}::{types[name]} as {name}, " for name, _, _ in branch.values)
            own = f" where b = '{number}'" if len(self.plan.branches) > 1 else ""
            items = "".join(f"{item} as c{n}, " for n, item in enumerate(branch.items, 1))
            where = f" where {branch.where}" if branch.where else ""
            parts.append(f"select {items}w from (select {values}w::bigint as w from {stage}{own}) as v{where}")
        return " union all ".join(parts)

    def _sums(self, stage: str, state: StatePlan) -> str:
        """The SELECT of what the staged rows, or the sums that Spark has made of them, add to the state."""
        if self.plan.sums is None:
            return KeptSums(state, self.plan.loose).sums(f"({self._rows(stage)})")
        branch, types = self.plan.branches[0], self._value_types[0]
        cast = {name: f"{name}::{types[item]}" for name, item in zip(state.group_columns, branch.items, strict=False)}
        groups = [f"{value} as {name}" for name, value in cast.items()]
        if self.plan.loose:
            groups.append(f"{image_of_keys([cast[name] for name in self.plan.loose])} as image")
        numbers = []
        for name in state.numbers:
            total = f"coalesce(sum({name}::numeric), 0)"
            if name[0] == "n":
                numbers.append(f"{total}::bigint as {name}")
            else:
                nan = f"z{name[1:]}"
                numbers.append(f"case when sum({nan}::bigint) <> 0 then 'NaN' else {total} end as {name}")
        group = f" group by {', '.join(str(n) for n in range(1, len(groups) + 1))}" if groups else ""
        return f"select {', '.join([*groups, *numbers])} from {stage} as r{group}"

    def _no_number(self, stage: str, state: StatePlan) -> str:
        """A SELECT that is true when NaN or infinity comes into or goes from a sum."""
        if self.plan.sums is None:
            return state.no_number(f"({self._rows(stage)})") or "select false"
        some = " or ".join(f"z{n}::bigint <> 0" for n, kind in enumerate(self.plan.sums, 1) if kind)
        return f"select exists (select from {stage} where {some})" if some else "select false"

    def _types_of(self, branch: Branch) -> dict[str, str]:
        """The types of a branch's values in the database of the target."""
        found: dict[str, str] = {}
        for leaf in branch.leaves:
            described = describe(
                self.task.holder.connection, leaf.render(leaf.table, "1 as n, 1 as o"), self.task.view.settings
            )
            types = target_types(described, same_database=self.task.view.target_dsn is None)
            found |= {column.name: column.type for column in types}
        return found

    # what Spark does

    def _write(self, logs: Mapping[str, tuple[str, str]] | None) -> Staged:
        with self.frame(logs) as (data, size):
            dsn = self.run.worker_dsn if self.task.view.target_dsn is None else self.task.view.target_dsn
            stage = self.place.target.stage(secrets.token_hex(4)) if size > self.run.driver_bytes else None
            return put(data, (self.place.output, self.place.target, stage), dsn)

    @contextmanager
    def frame(self, logs: Mapping[str, tuple[str, str]] | None) -> Iterator[tuple[DataFrame, int]]:
        """What Spark is to compute, from these logs or (None) from the whole tables, and how large what it reads is.

        It is to be used within the block.
        """
        connection, spark = self.task.holder.connection, self.run.spark
        if logs is None:
            size = sum(table_bytes(connection, table)[1] for table in self.task.view.tables)
        else:
            size = log_bytes(self.task.holder, self.task.view)
        reads = self._reads(logs)
        together: DataFrame | None = None
        if logs is None and size > self.run.driver_bytes:
            for read in reads:
                rows = self._frame(read.statements, [*read.columns, *_WEIGHTS], READ_SETTINGS)
                rows.createOrReplaceTempView(read.name)
        else:
            # Starting to read takes Spark longer than reading so little: all is read in one go, and kept by the tasks.
            width = max(len(read.columns) for read in reads)
            columns = [Column("leaf", AS_TEXT), *(Column(f"x{n}", AS_TEXT) for n in range(1, width + 1)), *_WEIGHTS]
            statements = [query for read in reads for query in read.padded(width)]
            together = self._frame(statements, columns, READ_SETTINGS if logs is None else _DELTA_SETTINGS).persist()
            together.createOrReplaceTempView("gdq_together")
            for read in reads:
                listed = "".join(f"x{n} as {column.label}, " for n, column in enumerate(read.columns, 1))
                rows = spark.sql(f"select {listed}n, o from gdq_together where leaf = '{read.name}'")
                rows.createOrReplaceTempView(read.name)
        width = max(len(branch.values) for branch in self.plan.branches)
        numbers = sorted({read.number for read in reads})
        data = spark.sql(" union all ".join(self._selected(number, width) for number in numbers))
        try:
            yield data, size
        finally:
            if together is not None:
                together.unpersist()

    def _selected(self, number: int, width: int) -> str:
        """Spark's SELECT of what is staged of one SELECT of the view: equal rows as one, or groups with their sums."""
        branch = self.plan.branches[number]
        joined = branch.spark
        for leaf in branch.leaves:
            joined = joined.replace(f" gdq_{leaf.alias} ", f" {_relation(number, leaf)} ")
        if self.plan.state is not None and self.plan.sums is not None:
            return _summed(self.plan.state, self.plan.sums, branch, joined)
        names = [name for name, _, _ in branch.values]
        several = len(self.plan.branches) > 1
        parts = [f"'{number}' as b"] if several else []
        parts += names
        if several:
            parts += [f"cast(null as string) as v{n}" for n in range(len(names) + 1, width + 1)]
        group = f" group by {', '.join(names)}" if names else ""
        return f"select {', '.join([*parts, 'sum(w) as w'])} from ({joined}){group} having sum(w) <> 0"

    def _reads(self, logs: Mapping[str, tuple[str, str]] | None) -> list[_Reading]:
        """What is read of each leaf; `logs`: the tables that changed with their names and log rows, None: all is read.

        A SELECT of the view whose tables did not change is left out.
        """
        connection, queue = self.task.holder.connection, self.task.view.queue_name
        whole, parts = {}, {}
        for name, (table, rows) in (logs or {}).items():
            columns = log_columns(connection, queue, table)
            whole[name] = weighted(rows, columns)
            split = split_log_rows(connection, queue, table, rows, PARTITION_BYTES)
            parts[name] = [weighted(part, columns) for part in split]
        found = []
        for number, branch in enumerate(self.plan.branches):
            reach: Mapping[str, Sequence[str] | None] = {}
            if logs is not None:
                if not any(leaf.table in whole for leaf in branch.leaves):
                    continue
                reach = Reach(self.task.holder, self.task.view, self.plan, whole).conditions(branch)
            for leaf in branch.leaves:
                weights = "1 as n, 0 as o" if logs is None else "1 as n, 1 as o"
                queries = self._base(leaf, reach.get(leaf.alias), weights)
                queries += [leaf.render(image, f"0 as n, -{quote(WEIGHT)} as o") for image in parts.get(leaf.table, ())]
                described = describe(connection, leaf.render(leaf.table, weights), self.task.view.settings)
                texts = self.texts(connection, described[:-2])
                statements = [select_sql(f"({query}) as q", [*texts, *_WEIGHTS]) for query in queries]
                found.append(_Reading(number, _relation(number, leaf), texts, statements))
        return found

    def _base(self, leaf: LeafRead, conditions: Sequence[str] | None, weights: str) -> list[str]:
        """The statements that read a leaf's table, all by blocks or what meets each of the conditions."""
        if conditions is None:
            parts = block_ranges(self.task.holder.connection, leaf.table, PARTITION_BYTES)
            return [leaf.render(base(leaf.table, part), weights) for part in parts]
        return [leaf.render(leaf.table, weights, condition) for condition in conditions]

    def _frame(self, statements: Sequence[str], columns: Sequence[Column], settings: Mapping[str, str]) -> DataFrame:
        return read_statements(
            self.run.spark,
            self.run.worker_dsn,
            statements,
            columns,
            settings=dict(settings) | self.task.view.settings,
            snapshot=self.task.holder.exported,
        )


def _relation(number: int, leaf: LeafRead) -> str:
    """The name in Spark of what a SELECT of the view reads of a leaf."""
    return f"gdq_{number}_{leaf.alias}"


def _summed(state: StatePlan, sums: Sequence[str | None], branch: Branch, joined: str) -> str:
    """Spark's SELECT of the sums per group; z counts NaN, which a decimal cannot hold."""
    items = list(branch.items)
    groups = items[: len(state.groups)]
    parts = [f"{item} as c{n}" for n, item in enumerate(groups, 1)] + ["sum(w) as n"]
    for n, (item, kind) in enumerate(zip(items[len(groups) :], sums, strict=True), 1):
        parts.append(f"sum(if({item} is null, 0L, w)) as n{n}")
        if kind is not None:
            narrow = kind.replace("38", "28")
            number = f"cast(if({item} = 'NaN', null, {item}) as {narrow}) * cast(w as decimal(9,0))"
            parts.append(f"sum({number}) as s{n}")
            parts.append(f"sum(if({item} = 'NaN', w, 0L)) as z{n}")
    listed = f" group by {', '.join(groups)}" if groups else ""
    return f"select {', '.join(parts)} from ({joined}) where w <> 0{listed}"
