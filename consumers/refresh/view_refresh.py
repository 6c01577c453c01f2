"""ViewRefresh: one view's steps in a refresh, which the module refresher lists."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import psycopg
from psycopg import Connection

from gdq.call import call, rows, scalar
from gdq.consumers.lake.open import open_lake
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.views.change_source import ChangeSource, LogColumn, log_columns_of
from gdq.consumers.views.engine import CommittingEngine, EffortKind, Engine, EngineEffort, EngineTask
from gdq.consumers.views.progress import Progress
from gdq.consumers.views.signals import NeedsFull, TableWanted
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.consumers.views.target import StoredPosition, Target, TargetColumn, TargetState, target_types
from gdq.consumers.views.target_rows import TargetRows
from gdq.era import check_position
from gdq.errors import DivergedPosition, EraEnded, GdqError, TruncatedPosition, mapped_errors
from gdq.owner_sql import check_left
from gdq.qualified_sql import qualified
from gdq.source import Position
from gdq.view.cost import PastRun, choose_by_cost, rows_held
from gdq.view.current_query import with_canonical_sql
from gdq.view.table_schema import apply_view_settings, describe_query
from gdq.view.view import ViewInfo, load_plan

if TYPE_CHECKING:
    from gdq.view.view import Plan

# Past refreshes from which the cost of the next one is estimated.
_HISTORY = 100

RefreshAction = Literal["full", "delta", "none"]
RefreshPoint = Literal["begun", "exported", "staged", "ticked", "applied", "committed", "done"]


@dataclass(frozen=True, slots=True)
class PlannedView:
    """What the server said of a view: it says the same while `stamp` and `definitions` are the same.

    `stamp`: view_stamp(). `definitions`: user_definitions(), None if the query names nothing that users define; both
    are from before the view was planned. `view`: the view with its query as it was read. `columns`: those of the query.
    `logged`: the logged columns of tables that have changed so far.
    """

    stamp: str
    definitions: str | None
    view: ViewInfo
    plan: Plan
    columns: list[tuple[str, int, str]]
    logged: dict[str, list[LogColumn]] = field(default_factory=dict)

    def holds(self, view: ViewInfo, stamp: str, definitions: str | None) -> bool:
        """True if the server would say the same of the view now."""
        mine, same = self.view, (self.stamp, self.definitions) == (stamp, definitions)
        return same and (mine.definition, mine.settings) == (view.definition, view.settings)


@dataclass(frozen=True, slots=True)
class CalledResult:
    """What a refresh by CALL did, as RefreshResult has it; without arguments: nothing had changed."""

    action: RefreshAction = "none"
    kind: EffortKind = "none"
    rows: int = 0
    delta_rows: int = 0


class ViewRefresh:
    """One refresh of one view: its plan and the changed tables; after the refresh the rows changed and the effort.

    `by_tables`: few changes do not take the short way. `audited`: rows of the refresh are compared before its commit.
    `control`: an autocommit session in the tables' database. `open_target` gives a session in the target's database;
    it is not called for a lake table. `planned`: what an earlier refresh was told of the view, then what this one is.
    `run`: the refresh's number in the view's history.
    """

    def __init__(
        self,
        control: Connection[Any],
        view: ViewInfo,
        changes: ChangeSource,
        *,
        open_target: Callable[[], Connection[Any]],
        planned: PlannedView | None,
        tell: Progress,
        run: int = 0,
    ) -> None:
        stored = view.definition
        self.view = view = with_canonical_sql(control, view)
        self._redefined = "written" in view.options and view.definition != stored
        self.changes = changes
        self.run = run
        self.snapshots: tuple[str | None, str | None] = (None, None)
        self.reason: str | None = None
        self.changed: dict[str, str] = {}
        self.rows = 0
        self.seconds = 0.0
        self.effort = EngineEffort("none")
        self.choice = ""
        self.by_tables = view.engine != "postgres"
        self.audited = False
        self.plan: Plan
        self.types: tuple[TargetColumn, ...]
        self.batch: tuple[int | None, str | None]
        self._control = control
        self.planned = planned
        self._tell = tell
        self._found: TargetState
        self.lake: LakeTable | None = None
        if view.lake is not None:
            self.lake = open_lake(view.lake, f"view {view.view_name}", view.source)
            return
        owner = None if view.elsewhere else view.acts_as
        self.target = Target(view.view_name, view.source, view.target, in_source=not view.elsewhere, owner=owner)
        self.output = open_target()

    @property
    def s0(self) -> str | None:
        """Snapshot at which the changes begin; None in a full load."""
        return self.snapshots[0]

    @property
    def columns(self) -> list[tuple[str, int, str]]:
        """Name, type oid and type of the view's columns."""
        return self._told.columns

    @property
    def action(self) -> RefreshAction:
        """The kind of refresh for its result."""
        return "full" if self.s0 is None else "delta" if self.changed else "none"

    @property
    def place(self) -> TargetRows | LakeTable:
        """The target for the engine."""
        return TargetRows(self.output, self.target, self.types, self._tell) if self.lake is None else self.lake

    def task(self, holder: SnapshotHolder, *, grouped: bool, joined: bool) -> EngineTask:
        """The engine's task; `grouped` and `joined` as for EngineTask."""
        how = (self._choose, self._tell, self.changes.write, partial(self._log_columns, holder), grouped, joined)
        return EngineTask(self.view, self.plan, self.columns, holder, *how, self.audited, few=not self.by_tables)

    def transaction(self) -> AbstractContextManager[object]:
        """The target's transaction for rows and position; none for a lake table, which commits by itself."""
        return self.output.transaction() if self.lake is None else nullcontext()

    def begin(self) -> None:
        """Take the view's consumer, which fences off older refreshes, and read the target's position."""
        self.changes.begin()
        with mapped_errors():
            query = "select batch_id, token from gdq.begin_refresh(%s, %s)"
            row = self._control.execute(query, [self.view.queue_name, self.view.consumer_name]).fetchone()
        self.batch = row or (None, None)
        self._found = self._target_state()

    def look(self, holder: SnapshotHolder, stamp: str, reason: str | None) -> None:
        """Plan the view and find the changes up to the held snapshot. `reason`: a known reason for a full load.

        `stamp`: view_stamp() under the holder's locks.
        """
        self._refuse_hidden_rows(holder.connection)
        self._load_plan(holder.connection, stamp)
        self.reason = reason or self._why_full(self._found)
        incomplete = self.changes.why_full(holder)
        self.reason = self.reason or incomplete
        stored = self._found.stored
        s0 = None if stored is None or self.reason else Position.parse(stored.position).snapshot
        self.snapshots = (s0, holder.snapshot)
        self.changed = self.changes.changed(holder, s0)

    def _refuse_hidden_rows(self, connection: Connection[Any]) -> None:
        """GdqError if a policy hides rows of a table from the view's role: the log has all rows."""
        query = qualified("""select n from pg_catalog.unnest(%s::text[]) n
                    where pg_catalog.row_security_active(n::pg_catalog.regclass) limit 1""")
        with connection.transaction(force_rollback=True) if self.view.role else nullcontext():
            if self.view.role:
                apply_view_settings(connection, self.view.settings)
            row = connection.execute(query, [self.view.tables], prepare=True).fetchone()
        hidden = None if row is None else row[0]
        if hidden is not None:
            raise GdqError(
                f"row level security of {hidden} applies to the role that refreshes view {self.view.view_name}",
                hint="Refresh as a role that sees all rows: the table's owner, or one with BYPASSRLS.",
            )

    def compute(self, engine: Engine | CommittingEngine) -> None:
        """Compute without touching the target; NeedsFull if the recorded changes are not enough."""
        started = time.monotonic()
        engine.compute(self.s0, self.changed)
        self.seconds = time.monotonic() - started

    def apply(self, engine: Engine | CommittingEngine, position: str) -> None:
        """Change target and position, in one transaction or lake commit; NeedsFull if the changes are not enough."""
        started = time.monotonic()
        stored, plan = self._found.stored, self.plan.fingerprint()
        if isinstance(engine, CommittingEngine):
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
        if not isinstance(engine, CommittingEngine):
            if self.target.owner is not None:
                # the position is gdq's, not the owner's
                check_left(self.output, self.target.owner)
            self.target.move(self.output, stored, plan, position)
            if not self.view.elsewhere:
                self.changes.move(self.output)

    def finish(self, snapshot: str) -> None:
        """Move the change source and the queue's position to `snapshot`, at which the target is committed."""
        if self.view.elsewhere:
            # two databases, two transactions: after a kill here the next refresh trusts the target's position
            self.changes.move(self._control)
        self.changes.applied()
        query = qualified("select gdq.set_position(%s, %s, %s, %s::pg_snapshot)")
        scalar(self._control, query, self.view.queue_name, self.view.consumer_name, self.batch[1], snapshot)
        self._sweep()

    def _choose(self, delta_rows: int) -> None:
        """Raise NeedsFull if a full load is expected to cost less than this number of netted changes."""
        query = "select action, reason, delta_rows, rows_read, work_seconds from gdq.view_history(%s, %s)"
        runs = rows(self._control, PastRun, query, self.view.view_name, _HISTORY)
        loaded = any(run.action == "full" for run in runs)
        held = rows_held(self._control, self.view.tables) if loaded else 0
        chosen = choose_by_cost(runs, delta_rows, held, on_spark=self.view.engine == "spark")
        self.choice = chosen.why
        if chosen.full:
            raise NeedsFull(chosen.why)

    def _target_state(self) -> TargetState:
        """The target's position, and whether others have changed its rows."""
        if self.lake is not None:
            state = self.lake.state()
            gone = state.stored is None and self.view.last_refresh is not None
            return replace(state, gone=gone)
        stored, there, file = self.target.look(self.output, f"gdq:refresh {self.view.view_name}"[:63])
        if stored is None:
            return TargetState(None)
        plan, _, known = stored.plan.partition("/")
        emptied = "TRUNCATE, VACUUM FULL or CLUSTER" if known and there and known != file else None
        return TargetState(stored, emptied, gone=not there, plan=plan)

    def _sweep(self) -> None:
        if self.lake is not None:
            self.lake.sweep()
            return
        if self.view.engine == "postgres":
            return  # its staging tables end with the transaction
        with self.output.transaction():
            self.target.sweep(self.output)

    @contextmanager
    def swept(self) -> Iterator[None]:
        """Drop the staging tables if the block fails; the next refresh drops any that are locked now."""
        try:
            yield
        except BaseException:
            if self.lake is None and self.view.engine == "spark" and not self.output.closed:
                with suppress(psycopg.Error):
                    self._sweep()
            raise

    @property
    def _told(self) -> PlannedView:
        assert self.planned is not None
        return self.planned

    def _load_plan(self, connection: Connection[Any], stamp: str) -> None:
        """Plan under the holder's locks: the table cannot change until the refresh ends."""
        known, definitions = self.planned, None
        if known is None or known.definitions is not None:
            definitions = str(call(self._control, "user_definitions"))
        if known is None or not known.holds(self.view, stamp, definitions):
            self.planned = known = self._plan(connection, stamp, definitions)
        self.plan = known.plan
        self.types = target_types(known.columns, same_database=not self.view.elsewhere)

    def _plan(self, connection: Connection[Any], stamp: str, definitions: str | None) -> PlannedView:
        if definitions is None:
            definitions = str(call(self._control, "user_definitions"))
        try:
            plan = load_plan(connection, self.view, self._control)
        except psycopg.errors.LockNotAvailable as error:
            raise TableWanted(str(error).splitlines()[0]) from error
        columns = describe_query(connection, plan.query, self.view.settings)
        return PlannedView(stamp, None if getattr(plan, "is_own", False) else definitions, self.view, plan, columns)

    def _log_columns(self, holder: SnapshotHolder, tables: Sequence[str]) -> Mapping[str, Sequence[LogColumn]]:
        """The logged columns of tables, asked for once while they are the same."""
        known = self._told.logged
        missing = [table for table in tables if table not in known]
        if missing:
            known |= log_columns_of(holder.connection, self.view.queue_name, missing)
        return {table: known[table] for table in tables}

    def _why_full(self, found: TargetState) -> str | None:
        """Why the stored position rules out an incremental refresh, or None; DivergedPosition if the source lost it."""
        stored = found.stored
        if found.gone:
            return "the target table is gone"
        if stored is None:
            return "first load"
        if not stored.position:
            return found.foreign
        if (found.plan or stored.plan) != self.plan.fingerprint():
            return "a view in its query was replaced" if self._redefined else "the plan has changed"
        try:
            check_position(self._control, self.view.queue_name, stored.position)
        except (EraEnded, TruncatedPosition, psycopg.errors.InvalidParameterValue) as error:
            return str(error).splitlines()[0]
        except DivergedPosition as error:
            # The target may hold the only copy of rows that the source has lost: only --full may overwrite it.
            hint = f"Save what you need of {stored.target}; gdq refresh --full {self.view.view_name} reloads it."
            raise DivergedPosition(f"view {self.view.view_name}: {error}", detail=error.detail, hint=hint) from error
        return None if found.foreign is None else f"the target was changed by another: {found.foreign}"
