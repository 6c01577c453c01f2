"""One refresh: the loop, and the steps for each view, which gdq.consumers.refresh.refresher lists."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.lake.open import open_lake
from gdq.consumers.lake.table import Lake
from gdq.consumers.refresh.engines import Engines
from gdq.consumers.views.change_source import ChangeSource
from gdq.consumers.views.engine import Committing, Effort, Engine, Task, Tell
from gdq.consumers.views.signals import Diverged, NeedsFull, TableWanted
from gdq.consumers.views.snapshot_holder import SnapshotHolder, hold_snapshot
from gdq.consumers.views.target import OutputType, StoredPosition, Target, TargetRows, TargetState, target_types
from gdq.era import check_position
from gdq.errors import DivergedPosition, EraEnded, GdqError, TruncatedPosition, mapped
from gdq.source import Position
from gdq.view.cost import choose, rows_held
from gdq.view.table_schema import describe
from gdq.view.view import ViewInfo, load_plan, view_history, with_canonical_sql

if TYPE_CHECKING:
    from gdq.view.view import Plan

# The number of past refreshes that tell what this one may cost.
_HISTORY = 100

# How many attempts of one refresh end to let a statement through that waits for the snapshot holder.
_WANTED_TRIES = 10

Action = Literal["full", "delta", "none"]
Point = Literal["begun", "exported", "staged", "ticked", "applied", "committed", "done"]

# What describe() said of the columns of views, by what it was asked.
Described = dict[Hashable, list[tuple[str, int, str]]]


class ViewRefresh:
    """One refresh of one view: its plan and what changed, after the refresh the rows and the effort.

    `control`: an autocommit session in the tables' database; `open_target`: gives one in the database of the target,
    and is called unless that is a lake table.
    """

    def __init__(
        self,
        control: Connection[Any],
        view: ViewInfo,
        changes: ChangeSource,
        *,
        open_target: Callable[[], Connection[Any]],
        described: Described,
        tell: Tell,
    ) -> None:
        self.view = view = with_canonical_sql(control, view)
        self.changes = changes
        self.snapshots: tuple[str | None, str | None] = (None, None)
        self.reason: str | None = None
        self.changed: dict[str, str] = {}
        self.rows = 0
        self.seconds = 0.0
        self.effort = Effort("none")
        self.choice = ""
        self.plan: Plan
        self.columns: list[tuple[str, int, str]]
        self.types: tuple[OutputType, ...]
        self.batch: tuple[int | None, str | None]
        self._control = control
        self._described = described
        self._tell = tell
        self._found: TargetState
        self.lake: Lake | None = None
        if view.lake is not None:
            self.lake = open_lake(view.lake, view.view_name, view.source)
            return
        self.target = Target(view.view_name, view.source, view.target)
        self.output = open_target()

    @property
    def s0(self) -> str | None:
        """The snapshot that the changes begin at, None in a full load."""
        return self.snapshots[0]

    @property
    def action(self) -> Action:
        """The kind of refresh, as its result names it."""
        return "full" if self.s0 is None else "delta" if self.changed else "none"

    @property
    def place(self) -> TargetRows | Lake:
        """The target as the engine writes to it."""
        return TargetRows(self.output, self.target, self.types) if self.lake is None else self.lake

    def task(self, holder: SnapshotHolder, *, grouped: bool, joined: bool) -> Task:
        """The engine's task; `grouped` and `joined` as for Task."""
        how = (self._choose, self._tell, self.changes.write, grouped, joined)
        return Task(self.view, self.plan, self.columns, holder, *how)

    def transaction(self) -> AbstractContextManager[object]:
        """The transaction of the target in which rows and position change; none for a lake, which commits by itself."""
        return self.output.transaction() if self.lake is None else nullcontext()

    def begin(self) -> None:
        """Take the view's consumer, which fences older refreshes off, and read the target's position."""
        self.changes.begin()
        with mapped():
            query = "select batch_id, token from gdq.begin_refresh(%s, %s)"
            row = self._control.execute(query, [self.view.queue_name, self.view.consumer_name]).fetchone()
        self.batch = row or (None, None)
        self._found = self._target_state()

    def look(self, holder: SnapshotHolder, reason: str | None) -> None:
        """Plan, and find what changed up to the held snapshot. `reason`: for a full load, if there is one already."""
        self._load_plan(holder.connection)
        self.reason = reason or self._why_full(self._found)
        incomplete = self.changes.why_full(holder)
        self.reason = self.reason or incomplete
        stored = self._found.stored
        s0 = None if stored is None or self.reason else Position.parse(stored.position).snapshot
        self.snapshots = (s0, holder.snapshot)
        self.changed = self.changes.changed(holder, s0)

    def compute(self, engine: Engine | Committing) -> None:
        """Do what takes long and leaves the target alone. NeedsFull when the recorded changes are not enough."""
        started = time.monotonic()
        engine.compute(self.s0, self.changed)
        self.seconds = time.monotonic() - started

    def apply(self, engine: Engine | Committing, position: str) -> None:
        """Change the target and move its position: in its open transaction, or in the commit of a lake.

        NeedsFull when the recorded changes are not enough.
        """
        started = time.monotonic()
        stored, plan = self._found.stored, self.plan.fingerprint()
        if isinstance(engine, Committing):
            self.rows = engine.commit(stored, StoredPosition(self.view.source, self.view.target, plan, position))
        else:
            try:
                self.rows = engine.apply(self.s0, self.changed)
            except psycopg.errors.ProgramLimitExceeded as error:
                if self.s0 is None:
                    raise
                raise NeedsFull(f"a value is too long for an index: {error.diag.message_primary}") from error
        self.seconds += time.monotonic() - started
        self.effort = engine.effort()
        if not isinstance(engine, Committing):
            self.target.move(self.output, stored, plan, position)
            if not self.view.elsewhere:
                self.changes.move(self.output)

    def finish(self, snapshot: str) -> None:
        """Let the change source and the queue go on: the target is committed at `snapshot`."""
        if self.view.elsewhere:
            # no transaction has both: killed before this, the next refresh skips what the target's position shows
            self.changes.move(self._control)
        self.changes.applied()
        query = "select gdq.set_position(%s, %s, %s, %s::pg_snapshot)"
        scalar(self._control, query, self.view.queue_name, self.view.consumer_name, self.batch[1], snapshot)
        self._sweep()

    def _choose(self, delta_rows: int) -> None:
        """NeedsFull when a full load is expected to cost less than this number of netted changes."""
        held = rows_held(self._control, self.view.tables)
        runs = view_history(self._control, self.view.view_name, _HISTORY)
        chosen = choose(runs, delta_rows, held, on_spark=self.view.engine == "spark")
        self.choice = chosen.why
        if chosen.full:
            raise NeedsFull(chosen.why)

    def _target_state(self) -> TargetState:
        """The position of the target, and whether others have changed its rows."""
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
    def swept(self) -> Iterator[None]:
        """Drop the staging tables when the block fails; the next refresh drops those that cannot be dropped now."""
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
        self.columns = self._describe(connection)
        self.types = target_types(self.columns, same_database=not self.view.elsewhere)

    def _describe(self, connection: Connection[Any]) -> list[tuple[str, int, str]]:
        """The columns of the view, as describe() said; asked once for a query over tables of one schema."""
        schemas = getattr(self.plan, "schemas", None)
        if schemas is None or self.view.elsewhere:
            return describe(connection, self.plan.query, self.view.settings)
        known = (self.plan.query, schemas, tuple(self.view.settings.items()))
        if known not in self._described:
            self._described[known] = describe(connection, self.plan.query, self.view.settings)
        return self._described[known]

    def _why_full(self, found: TargetState) -> str | None:
        """Why the stored position rules out an incremental refresh; None if it does not.

        DivergedPosition when the source has lost it.
        """
        stored = found.stored
        if found.gone:
            return "the target table is gone"
        if stored is None:
            return "first load"
        if not stored.position:
            return found.foreign
        if stored.plan != self.plan.fingerprint():
            return "the plan has changed"
        try:
            check_position(self._control, self.view.queue_name, stored.position)
        except (EraEnded, TruncatedPosition, psycopg.errors.InvalidParameterValue) as error:
            return str(error).splitlines()[0]
        except DivergedPosition as error:
            # What the target holds more than the source may be all that is left of it: not to be overwritten unasked.
            hint = f"Save what you need of {stored.target}; gdq refresh --full {self.view.view_name} loads it afresh."
            raise DivergedPosition(f"view {self.view.view_name}: {error}", detail=error.detail, hint=hint) from error
        return None if found.foreign is None else f"the target was changed by another: {found.foreign}"


Check = Callable[[ViewRefresh, SnapshotHolder], None]


@dataclass(slots=True)
class RefreshLoop:
    """One refresh of a group of views, in as many attempts as it takes; one view is a group of one.

    `holder`: gives the session of the snapshot holder. `reasons`: why views are loaded in full.
    """

    control: Connection[Any]
    holder: Callable[[], Connection[Any]]
    engines: Engines
    at: Callable[[Point], None]
    works: Sequence[ViewRefresh]
    reasons: dict[str, str | None]
    check: Mapping[str, Check]
    _name: str = field(default="", init=False)

    def run(self) -> None:
        """The whole refresh; one view that needs a full load starts it again for all."""
        wanted = 0
        while True:
            try:
                return self._attempt()
            except TableWanted as why:
                wanted += 1
                if wanted == _WANTED_TRIES:
                    raise GdqError(str(why)) from why
            except NeedsFull as why:
                self.reasons[self._name] = str(why)
            except Diverged as why:
                if self.reasons[self._name] is not None:
                    raise GdqError(str(why)) from why
                self.reasons[self._name] = f"the target was changed by another: {why}"
            finally:
                for work in self.works:
                    work.changes.close()

    def _attempt(self) -> None:
        for work in self.works:
            work.begin()
        self.at("begun")
        queue = self.works[0].view.queue_name
        tables = sorted({table for work in self.works for table in work.view.tables})
        batches = [work.batch for work in self.works]
        with hold_snapshot(self.holder(), queue, tables, batches=batches) as holder:
            self.at("exported")
            for work in self._each():
                work.look(holder, self.reasons[self._name])
            with ExitStack() as swept:
                for work in self.works:
                    swept.enter_context(work.swept())
                self._move(queue, holder)
        self.at("committed")
        for work in self.works:
            work.finish(holder.snapshot)
        self.at("done")

    def _move(self, queue: str, holder: SnapshotHolder) -> None:
        """Move all targets to the held snapshot, in one transaction that begins when the first view is computed."""
        position, first, grouped = "", self.works[0], len(self.works) > 1
        with ExitStack() as moving:
            for work in self._each():
                task = work.task(holder, grouped=grouped, joined=work is not first)
                with self._named(grouped=grouped), self.engines.engine(task, work.place) as engine:
                    work.compute(engine)
                    if work is first:
                        self.at("staged")
                        position = self._tick(queue, holder.snapshot)
                        self.at("ticked")
                        moving.enter_context(work.transaction())
                    work.apply(engine, position)
            for work in self._each():
                if self._name in self.check:
                    self.check[self._name](work, holder)
            if first.lake is None:
                self.at("applied")

    def _each(self) -> Iterator[ViewRefresh]:
        """The views one after the other, with the name of the one at work: a signal is about that view."""
        for work in self.works:
            self._name = work.view.view_name
            yield work

    @contextmanager
    def _named(self, *, grouped: bool) -> Iterator[None]:
        """Let an error in the data of one view of several say which view it is."""
        try:
            yield
        except psycopg.DataError as error:
            if not grouped:
                raise
            diag = error.diag
            message = f"view {self._name}: {diag.message_primary}"
            raise GdqError(message, detail=diag.message_detail, hint=diag.message_hint) from error

    def _tick(self, queue: str, snapshot: str) -> str:
        """Record the held snapshot as a tick; returns the position that names it."""
        query = "select gdq.tick_position(%s, tick_id) from gdq.add_tick(%s, %s::pg_snapshot)"
        return str(scalar(self.control, query, queue, queue, snapshot) or "")
