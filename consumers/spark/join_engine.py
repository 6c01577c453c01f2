"""Computes views of several tables with Spark: tasks read tables and logs, Spark joins, counts and adds.

The result is staged beside the target. There PostgreSQL evaluates expressions over several tables and merges the rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import psycopg

from gdq.call import scalar
from gdq.consumers.spark import jobs
from gdq.consumers.spark.reach import Reach
from gdq.consumers.spark.session import SparkRun
from gdq.consumers.spark.source import read_statements
from gdq.consumers.spark.table_sql import block_ranges, split_log_rows_sql, table_bytes, table_rows_sql
from gdq.consumers.views.change_source import log_columns, weighted_log_rows
from gdq.consumers.views.difference import Difference
from gdq.consumers.views.engine import EngineEffort, EngineTask
from gdq.consumers.views.kept_state import KeptContents, KeptState, KeptSums, KeptValues, image_of_keys
from gdq.consumers.views.netting import make_temporary_table, net_signed_rows
from gdq.consumers.views.signals import NeedsFull
from gdq.consumers.views.target import target_types
from gdq.consumers.views.target_rows import TargetRows
from gdq.plan.kept_state import StatePlan
from gdq.plan.spark.parts import Branch, LeafRead
from gdq.plan.spark.plan import SparkPlan
from gdq.plan.steps import NO_NUMBER
from gdq.plan.table import WEIGHT_COLUMN
from gdq.sql_text import quote, raw
from gdq.typed.arrow import ARROW_LOG_SETTINGS, ArrowColumn, arrow_select_sql
from gdq.typed.pgtypes import READ_AS_TEXT, READ_SETTINGS
from gdq.view.table_schema import apply_view_settings, describe_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


# Look-ups by key: if a table has no index for the key, PostgreSQL would compile the scan, which does not pay.
_DELTA_SETTINGS = ARROW_LOG_SETTINGS | {"jit": "off"}
_WEIGHTS = (ArrowColumn("n", jobs.LONG_TYPE), ArrowColumn("o", jobs.LONG_TYPE))


@dataclass(frozen=True, slots=True)
class _TableRead:
    """Statements that read one leaf of the view's SELECT `number`, as Spark's relation `name`."""

    number: int
    name: str
    columns: Sequence[ArrowColumn]
    statements: Sequence[str]

    def padded(self, width: int) -> list[str]:
        """The statements with the relation's name as a column and `width` columns, padded with NULL."""
        names = [f"q.{quote(column.label)}" for column in self.columns]
        names += ["null::pg_catalog.text"] * (width - len(names))
        listed = "".join(f"{name} as x{n}, " for n, name in enumerate(names, 1))
        head = f"select '{self.name}'::pg_catalog.text as leaf, {listed}q.n, q.o"
        return [f"{head} from ({statement}) as q" for statement in self.statements]


@dataclass(slots=True)
class SparkJoinEngine:
    """Engine of one refresh of one view of several tables; Spark's tasks read under the holder's snapshot.

    `start` gives the Spark session, which starts only if there is something to compute.
    """

    start: Callable[[], SparkRun]
    task: EngineTask
    plan: SparkPlan
    place: TargetRows
    texts: jobs.ColumnsAsText = field(default_factory=lambda: jobs.text_columns)
    _effort: EngineEffort = field(default=EngineEffort("none"), init=False)
    _staged: jobs.StagedRows | None = field(default=None, init=False)
    _value_types: list[dict[str, str]] = field(default_factory=list, init=False)

    @property
    def run(self) -> SparkRun:
        """The Spark session and its settings for tasks."""
        return self.start()

    @property
    def computation(self) -> None:
        """As Engine.computation."""
        return None  # Spark holds the changes

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Let Spark compute and stage the result: from the changes since s0, or for None from the whole tables."""
        jobs.tell_computing(self.task, full=s0 is None)
        if s0 is not None and not changed:
            return
        logs = None if s0 is None else self.logs(changed)
        self._value_types = [self._types_of(branch) for branch in self.plan.branches]
        delta_rows = jobs.weighed_log_images(self.task.holder, changed, self.task.choose)
        try:
            with jobs.worker_errors(delta=s0 is not None), jobs.own_jobs(self.run.spark, self.task.tell) as own:
                self._staged = self._write(logs)
            self._effort = EngineEffort("full" if s0 is None else "incremental", delta_rows, own.rows_read)
        except psycopg.DataError as error:
            if s0 is None:
                raise
            raise NeedsFull(f"a changed row cannot be computed: {str(error).splitlines()[0]}") from error

    def effort(self) -> EngineEffort:
        """The work of the refresh."""
        return self._effort

    def logs(self, changed: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """The changed tables by their names in the plan: the server's name and the log rows of each.

        NeedsFull if the view's owner, as whom the tasks read, may not read logs.
        """
        owner = self.task.view.acts_as
        may_read = "select pg_catalog.has_schema_privilege(%s, 'gdq_log', 'usage')"
        if changed and owner is not None and not scalar(self.task.holder.connection, may_read, owner):
            raise NeedsFull(f"Spark's tasks read as the view's owner {owner}, who may read no logs: not in gdq_admin")
        # the plan quotes every name, the server only where needed
        names = dict(zip(self.task.view.tables, (schema.qualified for schema in self.plan.schemas), strict=True))
        return {names[table]: (table, rows) for table, rows in changed.items()}

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:  # noqa: ARG002 (what changed is staged)
        self.task.tell("writing")
        staged = self._staged
        if staged is None:
            return 0
        apply_view_settings(self.place.output, READ_SETTINGS | self.task.view.target_settings)
        stage = staged.table or self.place.target.temporary_stage(self.place.output, staged.columns, staged.rows)
        self.place.output.execute(raw(f"analyze {stage}"))
        return self.place.change(self._difference(stage, full=s0 is None))

    def _difference(self, stage: str, *, full: bool) -> Difference:
        """The change of the view that follows from the staged rows."""
        match, state, detail = self.plan.match, self.plan.state, self.plan.detail
        make = partial(make_temporary_table, self.place.sql)
        if state is None and detail is None:
            rows = self._rows(stage)
            if not full:
                return net_signed_rows(make, self.place.types, rows, match)
            values = "".join(f"r.c{n}::{column.type}, " for n, column in enumerate(self.place.types, 1)).rstrip(", ")
            return Difference("full", f"select {values} from ({rows}) as r, generate_series(1, r.w)", match=match)
        kept: KeptContents
        if state is not None:
            kept, sums = KeptSums(state, self.plan.loose), self._sums(stage, state)
            if not full and self.place.sql.value(self._no_number(stage, state)):
                raise NeedsFull(NO_NUMBER)
        elif detail is not None:
            kept = KeptValues(detail, self.plan.loose)
            sums = kept.sums(f"({self._rows(stage)})")
        beside = KeptState(self.place, match, kept, make)
        return beside.load(sums) if full else beside.add(sums)

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
        """SELECT of the additions to the state: from staged rows, or from sums that Spark has computed."""
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
        """SELECT that is true if NaN or infinity enters or leaves a sum."""
        if self.plan.sums is None:
            return state.no_number(f"({self._rows(stage)})") or "select false"
        some = " or ".join(f"z{n}::bigint <> 0" for n, kind in enumerate(self.plan.sums, 1) if kind)
        return f"select exists (select from {stage} where {some})" if some else "select false"

    def _types_of(self, branch: Branch) -> dict[str, str]:
        """Types of a branch's values in the target's database."""
        found: dict[str, str] = {}
        for leaf in branch.leaves:
            described = describe_query(
                self.task.holder.connection, leaf.render(leaf.table, "1 as n, 1 as o"), self.task.view.settings
            )
            types = target_types(described, same_database=self.task.view.target_dsn is None)
            found |= {column.name: column.type for column in types}
        return found

    # what Spark does

    def _write(self, logs: Mapping[str, tuple[str, str]] | None) -> jobs.StagedRows:
        with self.frame(logs) as (data, size):
            dsn = self.run.worker_dsn if self.task.view.target_dsn is None else self.task.view.target_dsn
            stage = self.place.target.stage(secrets.token_hex(4)) if size > self.run.driver_bytes else None
            return jobs.stage_job_rows(data, (self.place.output, self.place.target, stage), dsn)

    @contextmanager
    def frame(self, logs: Mapping[str, tuple[str, str]] | None) -> Iterator[tuple[DataFrame, int]]:
        """The frame to compute and the bytes it reads: from these logs, or for None from the whole tables.

        Use the frame within the block only.
        """
        connection, spark = self.task.holder.connection, self.run.spark
        if logs is None:
            size = sum(table_bytes(connection, table)[1] for table in self.task.view.tables)
        else:
            size = jobs.log_bytes(self.task.holder, self.task.view)
        reads = self._reads(logs)
        together: DataFrame | None = None
        if logs is None and size > self.run.driver_bytes:
            for read in reads:
                rows = self._frame(read.statements, [*read.columns, *_WEIGHTS], READ_SETTINGS)
                rows.createOrReplaceTempView(read.name)
        else:
            # With little to read, starting a read costs more than the read: one read for all leaves, kept by the tasks.
            width = max(len(read.columns) for read in reads)
            columns = [
                ArrowColumn("leaf", READ_AS_TEXT),
                *(ArrowColumn(f"x{n}", READ_AS_TEXT) for n in range(1, width + 1)),
                *_WEIGHTS,
            ]
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
        """Spark's SELECT of the rows to stage for one SELECT of the view: distinct rows, or groups with their sums."""
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

    def _reads(self, logs: Mapping[str, tuple[str, str]] | None) -> list[_TableRead]:
        """Statements for each leaf. `logs`: the changed tables with their names and log rows; None reads all.

        A SELECT of the view without a changed table is left out.
        """
        connection, queue = self.task.holder.connection, self.task.view.queue_name
        whole, parts = {}, {}
        for name, (table, rows) in (logs or {}).items():
            columns = [column for column in log_columns(connection, queue, table) if not column.omitted]
            whole[name] = weighted_log_rows(rows, columns)
            split = split_log_rows_sql(connection, queue, table, rows, jobs.PARTITION_BYTES)
            parts[name] = [weighted_log_rows(part, columns) for part in split]
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
                queries += [
                    leaf.render(image, f"0 as n, -{quote(WEIGHT_COLUMN)} as o") for image in parts.get(leaf.table, ())
                ]
                described = describe_query(connection, leaf.render(leaf.table, weights), self.task.view.settings)
                texts = self.texts(connection, described[:-2])
                statements = [arrow_select_sql(f"({query}) as q", [*texts, *_WEIGHTS]) for query in queries]
                found.append(_TableRead(number, _relation(number, leaf), texts, statements))
        return found

    def _base(self, leaf: LeafRead, conditions: Sequence[str] | None, weights: str) -> list[str]:
        """Statements that read a leaf's table: all of it by blocks, or the rows that meet each condition."""
        if conditions is None:
            parts = block_ranges(self.task.holder.connection, leaf.table, jobs.PARTITION_BYTES)
            return [leaf.render(table_rows_sql(leaf.table, part), weights) for part in parts]
        return [leaf.render(leaf.table, weights, condition) for condition in conditions]

    def _frame(
        self, statements: Sequence[str], columns: Sequence[ArrowColumn], settings: Mapping[str, str]
    ) -> DataFrame:
        return read_statements(
            self.run.spark,
            self.run.worker_dsn,
            jobs.as_owner(self.task.holder.connection, self.task.view, statements),
            columns,
            settings=dict(settings) | self.task.view.settings,
            snapshot=self.task.holder.exported,
        )


def _relation(number: int, leaf: LeafRead) -> str:
    """Spark's name for the rows of a leaf in one SELECT of the view."""
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
