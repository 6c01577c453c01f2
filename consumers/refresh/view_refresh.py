"""One refresh of one view, step by step: what gdq.consumers.refresh.refresher describes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import psycopg
from psycopg import Connection

from gdq.consumers.lake.engine import LakeEngine
from gdq.consumers.lake.open import open_lake
from gdq.consumers.views.change_source import ChangeSource, QueueChangeSource
from gdq.consumers.views.engine import Committing, Effort, Engine, Phase
from gdq.consumers.views.signals import Diverged, NeedsFull, TableWanted
from gdq.consumers.views.snapshot_holder import WANTED_TRIES, SnapshotHolder, hold_snapshot
from gdq.consumers.views.target import OutputType, StoredPosition, Target, TargetState, target_types
from gdq.era import check_position
from gdq.errors import DivergedPosition, EraEnded, GdqError, TruncatedPosition, mapped
from gdq.plan.table import RefreshPlan
from gdq.source import Position
from gdq.view.cost import choose, rows_held
from gdq.view.table_schema import describe
from gdq.view.view import ViewInfo, load_plan, view_history

if TYPE_CHECKING:
    from gdq.consumers.lake.types import LakeColumn
    from gdq.consumers.refresh.refresher import Refresher, RefreshResult
    from gdq.consumers.views.copy_engine import CopyEngine
    from gdq.consumers.views.postgres_engine import PostgresEngine
    from gdq.view.view import Plan

# So many past refreshes are looked at for what this one may cost.
_HISTORY = 100

Action = Literal["full", "delta", "none"]
Point = Literal["begun", "exported", "staged", "ticked", "applied", "committed", "done"]


class ViewRefresh:
    """One refresh of one view."""

    def __init__(self, refresher: Refresher, view: ViewInfo, changes: ChangeSource | None = None) -> None:
        """`changes`: where they come from; None: from the queue."""
        self.refresher = refresher
        self.control = refresher.control
        self.view = view
        self.changes: ChangeSource = changes or QueueChangeSource(view)
        self.snapshots: tuple[str | None, str | None] = (None, None)
        self.reason: str | None = None
        self.changed: dict[str, str] = {}
        self.rows = 0
        self.seconds = 0.0
        self.effort = Effort("none")
        self.choice = ""
        self.result: RefreshResult
        self.plan: Plan
        self.columns: list[tuple[str, int, str]]
        self.types: tuple[OutputType, ...]
        self.lake = None if view.lake is None else open_lake(view.lake, view.view_name, view.source)
        if self.lake is not None:
            return
        self.target = Target(view.view_name, view.source, view.target)
        dsn = refresher.dsn if view.target_dsn is None else view.target_dsn
        self.output = refresher.connection("target", dsn, autocommit=True)

    def run(self, *, full: bool, check: Callable[[ViewRefresh, SnapshotHolder], None] | None) -> None:
        """The whole refresh."""
        reason = "asked for" if full else None
        wanted = 0
        while True:
            try:
                return self._run(reason, check)
            except TableWanted as why:
                wanted += 1
                if wanted == WANTED_TRIES:
                    raise GdqError(str(why)) from why
            except NeedsFull as why:
                reason = str(why)
            except Diverged as why:
                if reason is not None:
                    raise GdqError(str(why)) from why
                reason = f"the target was changed by another: {why}"
            finally:
                self.changes.close()

    def _run(self, reason: str | None, check: Callable[[ViewRefresh, SnapshotHolder], None] | None) -> None:
        at = self.refresher.at
        self.begin()
        at("begun")
        source = self.refresher.connection("snapshot", self.refresher.dsn)
        queue, (batch_id, token) = self.view.queue_name, self.batch
        with hold_snapshot(source, queue, self.view.tables, batch_id=batch_id, token=token) as holder:
            at("exported")
            self.look(holder, reason)
            with self._swept(), self.engine(holder) as engine:
                started = time.monotonic()
                if not self._tells:
                    self.tell("computing")
                engine.compute(self.s0, self.changed)
                at("staged")
                computed = time.monotonic()
                position = self.tick(holder.snapshot)
                at("ticked")
                with nullcontext() if isinstance(engine, Committing) else self.output.transaction():
                    self.apply(engine, position)
                    self.seconds += computed - started
                    if check is not None:
                        check(self, holder)
                    if not isinstance(engine, Committing):
                        at("applied")
        at("committed")
        self.settle()
        self.finish(holder.snapshot)
        at("done")

    @property
    def s0(self) -> str | None:
        """The snapshot that the changes begin at, None in a full load."""
        return self.snapshots[0]

    @property
    def action(self) -> Action:
        """What is done."""
        return "full" if self.s0 is None else "delta" if self.changed else "none"

    def begin(self) -> None:
        """Take the view's consumer, which fences older refreshes off, and read the target's position."""
        self.changes.begin()
        with mapped():
            query = "select batch_id, token from gdq.begin_refresh(%s, %s)"
            row = self.control.execute(query, [self.view.queue_name, self.view.consumer_name]).fetchone()
        self.batch: tuple[int | None, str | None] = row or (None, None)
        self.state = self._look()

    def look(self, holder: SnapshotHolder, reason: str | None) -> None:
        """Plan, and find what changed up to the held snapshot, unless there is a reason for a full load."""
        self._load_plan(holder.connection)
        self.reason = reason or self._why_full(self.state)
        incomplete = self.changes.why_full(holder)
        self.reason = self.reason or incomplete
        stored = self.state.stored
        s0 = None if stored is None or self.reason else Position.parse(stored.position).snapshot
        self.snapshots = (s0, holder.snapshot)
        self.changed = self.changes.changed(holder, s0)

    def apply(self, engine: Engine | Committing, position: str) -> None:
        """Change the target and move its position: in the transaction of its connection, or in a lake's own commit.

        NeedsFull when the changes do not do.
        """
        started = time.monotonic()
        stored, plan = self.state.stored, self.plan.fingerprint()
        if isinstance(engine, Committing):
            self.rows = engine.commit(stored, StoredPosition(self.view.source, self.view.target, plan, position))
        else:
            if not self._tells:
                self.tell("writing")
            try:
                self.rows = engine.apply(self.s0, self.changed)
            except psycopg.errors.ProgramLimitExceeded as error:
                if self.s0 is None:
                    raise
                raise NeedsFull(f"a value is too long for an index: {error.diag.message_primary}") from error
        self.seconds = time.monotonic() - started
        self.effort = engine.effort()
        if not isinstance(engine, Committing):
            self.target.move(self.output, stored, plan, position)
            if not self.view.elsewhere:
                self.changes.move(self.output)

    @property
    def _tells(self) -> bool:
        """Whether the engine tells itself what it is at."""
        from gdq.plan.postgres import PostgresPlan  # noqa: PLC0415 (loads sqlglot)

        return isinstance(self.plan, PostgresPlan)

    def tell(self, phase: Phase, rows: int = 0) -> None:
        """Say what the refresh is at."""
        self.refresher.progress(self.view.view_name, phase, rows)

    def settle(self) -> None:
        """Tell where the changes came from that the target is committed."""
        if self.view.elsewhere:
            # no transaction has both: killed before this, the next refresh skips what the target's position shows
            self.changes.move(self.control)
        self.changes.applied()

    def finish(self, snapshot: str) -> None:
        """Tell the queue what is consumed."""
        queue, consumer = self.view.queue_name, self.view.consumer_name
        with mapped():
            query = "select gdq.set_position(%s, %s, %s, %s::pg_snapshot)"
            self.control.execute(query, [queue, consumer, self.batch[1], snapshot])
        self._sweep()

    def choose(self, delta_rows: int) -> None:
        """NeedsFull when so many changes are expected to cost more than a full load."""
        held = rows_held(self.control, self.view.tables)
        runs = view_history(self.control, self.view.view_name, _HISTORY)
        chosen = choose(runs, delta_rows, held, on_spark=self.view.engine == "spark")
        self.choice = chosen.why
        if chosen.full:
            raise NeedsFull(chosen.why)

    def _look(self) -> TargetState:
        """What the target stands for, and whether others have changed it."""
        if self.lake is not None:
            state = self.lake.state()
            gone = state.stored is None and self.view.last_refresh is not None
            return replace(state, gone=gone)
        stored, there = self.target.look(self.output, f"gdq:refresh {self.view.view_name}"[:63])
        return TargetState(stored, gone=stored is not None and not there)

    def _sweep(self) -> None:
        if self.lake is not None:
            self.lake.sweep()
            return
        if self.view.engine == "postgres":
            return  # it stages nothing outside of its transaction
        with self.output.transaction():
            self.target.sweep(self.output)

    @contextmanager
    def _swept(self) -> Iterator[None]:
        """What ends the block leaves no staging table; one that cannot be dropped now the next refresh drops."""
        try:
            yield
        except BaseException:
            if self.lake is None and self.view.engine == "spark" and not self.output.closed:
                with suppress(psycopg.Error):
                    self._sweep()
            raise

    def _load_plan(self, connection: Connection[Any]) -> None:
        """Plan under the holder's locks: the table cannot change until the refresh ends."""
        self.plan = load_plan(connection, self.view)
        self.columns = self._described(connection)
        self.types = target_types(self.columns, same_database=not self.view.elsewhere)

    def _described(self, connection: Connection[Any]) -> list[tuple[str, int, str]]:
        """describe() of the view; asked once for a query over tables of one schema where only types' names count."""
        schemas = getattr(self.plan, "schemas", None)
        if schemas is None or self.view.elsewhere:
            return describe(connection, self.plan.query, self.view.settings)
        known = (self.plan.query, schemas, tuple(self.view.settings.items()))
        if known not in self.refresher.described:
            self.refresher.described[known] = describe(connection, self.plan.query, self.view.settings)
        return self.refresher.described[known]

    def _why_full(self, look: TargetState) -> str | None:
        """Why the changes since the stored position cannot do, as far as the position tells; None when they may.

        DivergedPosition when the source has lost it.
        """
        stored = look.stored
        if look.gone:
            return "the target table is gone"
        if stored is None:
            return "first load"
        if not stored.position:
            return look.foreign
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
        return None if look.foreign is None else f"the target was changed by another: {look.foreign}"

    @contextmanager
    def engine(self, holder: SnapshotHolder) -> Iterator[Engine | Committing]:
        """What does the work, by the plan and the target."""
        if self.view.lake is not None and self.view.engine == "spark":
            from gdq.consumers.spark.lake_engine import spark_lake_engine  # noqa: PLC0415 (needs Spark)

            with spark_lake_engine(self, holder) as lake_engine:
                yield lake_engine
            return
        if isinstance(self.plan, RefreshPlan):
            from gdq.consumers.spark.jobs import SparkEngine  # noqa: PLC0415

            yield SparkEngine(
                self.refresher, holder, self.output, self.target, self.view, self.plan, self.types, self.choose
            )
            return
        from gdq.plan.spark.plan import SparkPlan  # noqa: PLC0415 (loads sqlglot)

        if isinstance(self.plan, SparkPlan):
            from gdq.consumers.spark.join_engine import SparkViews  # noqa: PLC0415

            yield SparkViews(
                self.refresher, holder, self.output, self.target, self.view, self.plan, self.types, self.choose
            )
            return
        from gdq.consumers.views.computation import Computation  # noqa: PLC0415
        from gdq.consumers.views.copy_engine import CopyEngine, folded_columns  # noqa: PLC0415
        from gdq.consumers.views.postgres_engine import PostgresEngine  # noqa: PLC0415
        from gdq.plan.spark.keys import SparkKeyPlan  # noqa: PLC0415

        # in the database of the tables what is not kept is computed beside the target's session only to be staged
        staged = isinstance(self.plan, SparkKeyPlan) and self.plan.state is None
        if not self.view.elsewhere and not staged:
            made = Computation(self.output, holder, self.view, self.plan, self.types, (), self.choose, self.tell)
            made.write = self.changes.write
            yield self._by_spark(PostgresEngine(made, self.output, self.target, self.types))
            return
        connection = self.refresher.connection("compute", self.refresher.dsn)
        types = target_types(self.columns, same_database=True)
        folded = folded_columns(holder.connection, self.columns)
        columns: Sequence[LakeColumn] = ()
        if self.view.lake is not None:
            from gdq.consumers.lake.types import compared_as_text, lake_columns  # noqa: PLC0415

            columns = lake_columns(self.columns, self.view.lake.kind)
            folded |= compared_as_text(self.columns)
        computation = Computation(connection, holder, self.view, self.plan, types, folded, self.choose, self.tell)
        computation.write = self.changes.write
        with computation.beside() as made:
            if self.lake is not None:
                yield LakeEngine(made, self.lake, columns)
                return
            yield self._by_spark(CopyEngine(made, self.output, self.target, self.types))

    def _by_spark(self, inner: PostgresEngine | CopyEngine) -> Engine:
        """What lets Spark compute rows that `inner` would, if the view is Spark's."""
        from gdq.plan.spark.keys import SparkKeyPlan  # noqa: PLC0415 (loads sqlglot)

        if not isinstance(self.plan, SparkKeyPlan):
            return inner
        from gdq.consumers.spark.key_engine import SparkKeys  # noqa: PLC0415

        return SparkKeys(self.refresher, self.plan, inner)

    def tick(self, snapshot: str) -> str:
        """Record the refresh's snapshot as a tick; returns the position that names it."""
        with mapped():
            query = "select gdq.tick_position(%s, tick_id) from gdq.add_tick(%s, %s::pg_snapshot)"
            row = self.control.execute(query, [self.view.queue_name, self.view.queue_name, snapshot]).fetchone()
        return str(row[0]) if row else ""
