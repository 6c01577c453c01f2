"""Refreshes materialized views with Apache Spark: `gdq refresh [VIEW...]`, or spark-submit of this file.

One refresh:

    1. take the view's consumer, which fences older refreshes off
    2. read S0, the position in the target, and find out whether the changes since then suffice
    3. lock what will be read, take a snapshot S1 and export it: all readers import it
    4. Spark reads the delta (S0, S1], or the table at S1 for a full load, nets it and writes a staging table
    5. record S1 as a tick; its nonce goes into the position
    6. in one transaction of the target: position still S0? merge the staged rows, write the position
    7. let the queue drop what is consumed

Killed anywhere, it leaves the target at S0 or at S1, and the next refresh goes on from there.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

import psycopg
from psycopg import Connection
from psycopg.rows import scalar_row

from gdq.arrow import LOG_SETTINGS, Column, select_sql
from gdq.conninfo import connect, conninfo_of
from gdq.consumers.leader import Leader, lead, without_password
from gdq.consumers.relations import (
    base,
    block_ranges,
    changes,
    key_condition,
    log_columns,
    split_changes,
    table_bytes,
    weighted,
)
from gdq.era import check_position
from gdq.errors import DivergedPosition, EraEnded, GdqError, TruncatedPosition, mapped
from gdq.pgtypes import READ_SETTINGS, ColumnType
from gdq.plan import Read, RefreshPlan
from gdq.source import Position
from gdq.target import Diverged, OutputType, StoredPosition, Target, target_types
from gdq.target_merge import Merge
from gdq.view import ViewInfo, apply_settings, describe, load_plan, load_schema, view_info

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Action = Literal["full", "delta", "none"]
Point = Literal["begun", "exported", "staged", "ticked", "applied", "committed", "done"]

_KEYS_MAX = 200_000
_KEYS_EACH = 10_000
_PARTITION_BYTES = 64 * 2**20
_WORKER_ERROR = re.compile(r"(?:psycopg|gdq)\.(?:errors\.)?(\w+): (.+)")
_LONG = ColumnType("int64", "bigint", "({c})::bigint")


@dataclass(frozen=True, slots=True)
class RefreshResult:
    """One refresh: what was done and why, the rows deleted and inserted, and how long it took."""

    view_name: str
    action: Action
    reason: str | None
    rows_changed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Staged:
    """What Spark has computed: columns and rows, or the table where it wrote them; the touched keys of a recompute."""

    columns: list[str]
    rows: list[tuple[str | None, ...]]
    table: str | None
    keys: list[tuple[str | None, ...]]


class NeedsFull(GdqError):  # noqa: N818
    """The delta cannot be used."""


class Refresher:
    """Refreshes views of one source database; its Spark session starts at the first one that needs it.

    What reads at most `driver_bytes` passes its result through this process, more goes through a staging table.
    `at` is called at the points of a refresh, in order; an exception from it ends the refresh there.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        driver_bytes: int = 16 * 2**20,
        at: Callable[[Point], None] = lambda _: None,
    ) -> None:
        self._stack = ExitStack()
        self.driver_bytes = driver_bytes
        self.at = at
        self.control = self._stack.enter_context(connect(dsn, autocommit=True, application_name="gdq:refresh"))
        self.dsn = conninfo_of(self.control)
        self.worker_dsn = self._stack.enter_context(without_password(self.dsn))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def spark(self) -> SparkSession:
        """The Spark session, which knows the data source gdq."""
        from gdq.consumers.spark_session import spark_session  # noqa: PLC0415
        from gdq.consumers.spark_source import register  # noqa: PLC0415
        from gdq.consumers.spark_stage import register_stage  # noqa: PLC0415

        session = spark_session()
        register(session)
        register_stage(session)
        return session

    def refresh(
        self, name: str, *, full: bool = False, check: Callable[[ViewRefresh, Leader], None] | None = None
    ) -> RefreshResult:
        """Bring one view up to the present; `full`: by loading it afresh. `check` is called before the target commits.

        Writes the target and its position, the queue's position and a row of the view's history. PlanError when the
        view can no longer be planned, RefreshConflict when another refresh has overtaken this one.
        """
        (view,) = view_info(self.control, name)
        run = self._scalar("select gdq.start_view_run(%s)", name)
        started = time.monotonic()
        try:
            with ViewRefresh(self, view) as work:
                action, reason, rows = work.run(full=full, check=check)
        except BaseException as error:
            text = str(error).strip() or type(error).__name__
            if not self.control.closed:
                self._scalar("select gdq.finish_view_run(%s, 'failed', error => %s)", run, text.splitlines()[0])
            raise
        self._scalar(
            "select gdq.finish_view_run(%s, %s, %s, %s::pg_snapshot, %s::pg_snapshot, %s)",
            *(run, action, reason, *work.snapshots, rows),
        )
        return RefreshResult(name, action, reason, rows, time.monotonic() - started)

    def _scalar(self, query: str, *values: object) -> Any:
        with mapped(), self.control.cursor(row_factory=scalar_row) as cursor:
            return cursor.execute(query, values).fetchone()


class ViewRefresh:
    """One refresh of one view."""

    def __init__(self, refresher: Refresher, view: ViewInfo) -> None:
        self._stack = ExitStack()
        self.refresher = refresher
        self.control = refresher.control
        self.view = view
        self.snapshots: tuple[str | None, str | None] = (None, None)
        self.target = Target(view.view_name, view.source, view.target)
        self.output: Connection[Any]
        self.plan: RefreshPlan
        self.types: tuple[OutputType, ...]

    def __enter__(self) -> Self:
        dsn = self.refresher.dsn if self.view.target_dsn is None else self.view.target_dsn
        self.output = self._stack.enter_context(
            psycopg.connect(dsn, autocommit=True, application_name=f"gdq:refresh {self.view.view_name}"[:63])
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, *, full: bool, check: Callable[[ViewRefresh, Leader], None] | None) -> tuple[Action, str | None, int]:
        """The whole refresh; returns what was done, why in full, and the rows changed."""
        reason = "asked for" if full else None
        while True:
            try:
                return self._run(reason, check)
            except NeedsFull as why:
                reason = str(why)
            except Diverged as why:
                if reason is not None:
                    raise
                reason = f"the target was changed by another: {why}"

    def _run(
        self, reason: str | None, check: Callable[[ViewRefresh, Leader], None] | None
    ) -> tuple[Action, str | None, int]:
        at = self.refresher.at
        queue, consumer = self.view.queue_name, self.view.consumer_name
        with mapped():
            row = self.control.execute("select * from gdq.begin_refresh(%s, %s)", [queue, consumer]).fetchone()
        batch_id, token, _ = row or (None, None, None)
        with self.output.transaction():
            self.target.prepare(self.output)
            stored = self.target.position(self.output)
            there = self.target.exists(self.output)
        at("begun")
        with lead(self.refresher.dsn, queue, self.view.tables, batch_id=batch_id, token=token) as leader:
            at("exported")
            self._load_plan(leader.connection)
            reason = reason or self._why_full(stored, there)
            s0 = None if stored is None or reason else Position.parse(stored.position).snapshot
            self.snapshots = (s0, leader.snapshot)
            changed = True
            if s0 is not None:
                changed = self._check_delta(leader, s0)
            staged = self._computed(leader, s0) if changed else None
            at("staged")
            position = self._tick(leader.snapshot)
            at("ticked")
            with self.output.transaction():
                rows = self._apply(staged, full=s0 is None)
                self.target.move(self.output, stored, self.plan, position)
                if check is not None:
                    check(self, leader)
                at("applied")
        at("committed")
        with mapped():
            self.control.execute(
                "select gdq.set_position(%s, %s, %s, %s::pg_snapshot)", [queue, consumer, token, leader.snapshot]
            )
        with self.output.transaction():
            self.target.sweep(self.output)
        at("done")
        return ("full" if s0 is None else "delta" if changed else "none"), reason, rows

    def _load_plan(self, connection: Connection[Any]) -> None:
        """Plan under the leader's locks: the table cannot change until the refresh ends."""
        self.plan = load_plan(connection, self.view)
        self.table = self.view.tables[0]
        columns = describe(connection, self.plan.query, self.view.settings)
        self.types = target_types(columns, same_database=self.view.target_dsn is None)

    def _why_full(self, stored: StoredPosition | None, there: bool) -> str | None:
        """Why the changes since the stored position cannot do, as far as the position tells; None when they may.

        DivergedPosition when the source has lost it.
        """
        if stored is None:
            return "first load"
        if not there:
            return "the target table is gone"
        if stored.plan != self.plan.fingerprint():
            return "the plan has changed"
        try:
            check_position(self.control, self.view.queue_name, stored.position)
        except (EraEnded, TruncatedPosition, psycopg.errors.InvalidParameterValue) as error:
            return str(error).splitlines()[0]
        except DivergedPosition as error:
            # What the target holds more than the source may be all that is left of it: not to be overwritten unasked.
            hint = f"Save what you need of {stored.target}; gdq refresh --full {self.view.view_name} loads it afresh."
            raise DivergedPosition(f"view {self.view.view_name}: {error}", detail=error.detail, hint=hint) from error
        return None

    def _check_delta(self, leader: Leader, s0: str) -> bool:
        """Whether anything changed since s0. NeedsFull when something did that no log row shows."""
        connection, queue = leader.connection, self.view.queue_name
        try:
            with mapped(), connection.transaction():
                events = connection.execute(
                    """select kind, tbl from gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot,
                         %s::text[]::pg_catalog.regclass[]) where kind <> 'message' limit 1""",
                    [queue, s0, leader.snapshot, self.view.tables],
                ).fetchone()
                if events is not None:
                    raise NeedsFull(f"{events[0]} of {events[1]}")
                rows = changes(connection, queue, self.table, s0, leader.snapshot)
                connection.execute("set local enable_seqscan = off")
                found = connection.execute(f"select exists (select from ({rows}) as c)").fetchone()
        except TruncatedPosition as error:
            raise NeedsFull("the changes since the target's position are gone") from error
        return found is not None and bool(found[0])

    def _computed(self, leader: Leader, s0: str | None) -> Staged:
        """_stage(), with the errors of Spark and its workers in one line.

        An image that is gone again may raise what no row of the table does, a division by zero; then the table decides.
        """
        try:
            return self._stage(leader, s0)
        except Exception as error:
            if not type(error).__module__.startswith(("pyspark.", "py4j.")):
                raise
            cause = _WORKER_ERROR.search(str(error))
            if cause is None:
                raise GdqError(f"Spark failed: {str(error).strip().splitlines()[0]}") from error
            kind = getattr(psycopg.errors, cause[1], None)
            if s0 is not None and kind is not None and issubclass(kind, psycopg.DataError):
                raise NeedsFull(f"a changed row cannot be computed: {cause[2]}") from error
            raise GdqError(cause[2]) from error

    def _stage(self, leader: Leader, s0: str | None) -> Staged:
        """Let Spark compute, from s0 or (None) from the whole table, and write the staging table."""
        plan = self.plan
        if s0 is None and plan.rows is not None:
            return self._write(leader, self._read_rows(leader, None), [], full=True)
        data = self._compute(leader, s0)
        if plan.rows is None:
            return self._write(leader, data, [], full=s0 is None)
        keys = [tuple(row) for row in data.limit(_KEYS_MAX + 1).collect()]
        if len(keys) > _KEYS_MAX:
            raise NeedsFull(f"more than {_KEYS_MAX} keys changed")
        return self._write(leader, self._read_rows(leader, keys), keys, full=False)

    def _compute(self, leader: Leader, s0: str | None) -> DataFrame:
        """The plan's Spark statement over the delta since s0, or over the whole table as one."""
        queue = self.view.queue_name
        if s0 is None:
            ranges = block_ranges(leader.connection, self.table, _PARTITION_BYTES)
            relations = [base(self.table, part) for part in ranges]
        else:
            columns = log_columns(leader.connection, queue, self.table)
            rows = changes(leader.connection, queue, self.table, s0, leader.snapshot)
            parts = split_changes(leader.connection, queue, self.table, rows, _PARTITION_BYTES)
            relations = [weighted(part, columns) for part in parts]
        self._read(leader, self.plan.delta, relations, log=s0 is not None).createOrReplaceTempView("delta")
        return self.refresher.spark.sql(self.plan.compute.sql)

    def _read_rows(self, leader: Leader, keys: Sequence[tuple[str | None, ...]] | None) -> DataFrame:
        """The rows of the view for these keys, or (None) all of them."""
        read = self.plan.rows
        if read is None:
            raise AssertionError("the plan recomputes nothing")
        relation = base(self.table)
        if keys is None:
            if not read.group:
                parts = block_ranges(leader.connection, self.table, _PARTITION_BYTES)
                return self._read(leader, read, [base(self.table, part) for part in parts])
            return self._read(leader, read, [relation])
        schema = load_schema(leader.connection, self.view.queue_name, self.table)
        columns = [(column.name, column.type) for name in read.keys if (column := schema.column(name))]
        chunks = [keys[n : n + _KEYS_EACH] for n in range(0, len(keys), _KEYS_EACH)] or [[]]
        conditions = [key_condition(read.alias, columns, chunk) for chunk in chunks]
        return self._read(leader, read, [relation], conditions=conditions)

    def _read(
        self,
        leader: Leader,
        read: Read,
        relations: Sequence[str],
        *,
        conditions: Sequence[str] = ("",),
        log: bool = False,
    ) -> DataFrame:
        """A reading statement of the plan as a DataFrame, one partition for each relation and condition."""
        from gdq.consumers.spark_source import read_statements  # noqa: PLC0415

        columns = self._columns(leader.connection, read)
        queries = [read.render(relation, condition) for relation in relations for condition in conditions]
        settings = (LOG_SETTINGS if log else READ_SETTINGS) | self.view.settings
        return read_statements(
            self.refresher.spark,
            self.refresher.worker_dsn,
            [select_sql(f"({query}) as q", columns) for query in queries],
            columns,
            settings=settings,
            snapshot=leader.exported,
        )

    def _columns(self, connection: Connection[Any], read: Read) -> list[Column]:
        """How the columns of a statement travel: numbers that Spark adds as such, all else as PostgreSQL's text."""
        numbers = {column.name: column.spark for column in self.plan.merge.state} | {"w": "bigint"}
        described = describe(connection, read.render(base(self.table)), self.view.settings)
        query = """select t.oid, pg_catalog.format('pg_catalog.textin(%%I.%%I({c}))', n.nspname, p.proname)
                     from pg_catalog.pg_type t join pg_catalog.pg_proc p on p.oid = t.typoutput
                     join pg_catalog.pg_namespace n on n.oid = p.pronamespace where t.oid = any (%s::oid[])"""
        outputs = dict(connection.execute(query, [[oid for _, oid, _ in described]]).fetchall())
        columns = []
        for name, oid, _ in described:
            spark = numbers.get(name)
            if spark is None:
                columns.append(Column(name, ColumnType("string", "string", outputs[oid])))
            elif spark == "bigint":
                columns.append(Column(name, _LONG))
            else:
                arrow = spark.replace("decimal", "decimal128").replace(",", ", ")
                columns.append(Column(name, ColumnType(arrow, spark, "({c})::text")))
        return columns

    def _write(self, leader: Leader, data: DataFrame, keys: list[tuple[str | None, ...]], *, full: bool) -> Staged:
        """Compute `data`: a small result into this process, another into a staging table, written by Spark's tasks."""
        from gdq.consumers.spark_stage import text_rows, write_stage  # noqa: PLC0415

        if self._bytes(leader, full=full) <= self.refresher.driver_bytes:
            return Staged(data.columns, text_rows(data), None, keys)
        stage = self.target.stage(secrets.token_hex(4))
        with self.output.transaction():
            self.target.create_stage(self.output, stage, data.columns)
        dsn = self.refresher.worker_dsn if self.view.target_dsn is None else self.view.target_dsn
        write_stage(data, dsn, stage.partition(".")[2].strip('"'))
        return Staged(data.columns, [], stage, keys)

    def _bytes(self, leader: Leader, *, full: bool) -> int:
        """What a refresh reads at most: the table, or the log segments."""
        if full:
            return table_bytes(leader.connection, self.table)[1]
        query = """select coalesce(sum(pg_catalog.pg_relation_size(s)), 0)::bigint
                     from gdq.log_segments(%s, %s::text[]::pg_catalog.regclass[]) s"""
        with leader.connection.cursor(row_factory=scalar_row) as cursor:
            return int(cursor.execute(query, [self.view.queue_name, self.view.tables]).fetchone() or 0)

    def _tick(self, snapshot: str) -> str:
        """Record the refresh's snapshot as a tick; returns the position that names it."""
        with mapped():
            query = "select gdq.tick_position(%s, tick_id) from gdq.add_tick(%s, %s::pg_snapshot)"
            row = self.control.execute(query, [self.view.queue_name, self.view.queue_name, snapshot]).fetchone()
        return str(row[0]) if row else ""

    def _apply(self, staged: Staged | None, *, full: bool) -> int:
        if staged is None:
            return 0
        apply_settings(self.output, READ_SETTINGS | self.view.settings)
        table = staged.table or self.target.temporary_stage(self.output, staged.columns, staged.rows)
        merge = Merge(self.output, self.target, self.plan, self.types, table)
        return merge.full() if full else merge.difference(staged.keys)


def main(arguments: Sequence[str]) -> None:
    """spark-submit consumers/refresh.py [--dsn CONNINFO] [--full] [VIEW...]: the command `gdq refresh`."""
    from gdq.cli import main as gdq  # noqa: PLC0415

    gdq(["refresh", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
