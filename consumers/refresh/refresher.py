"""Refreshes materialized views: the class Refresher, used by `gdq refresh [VIEW...]` and spark-submit.

A refresh brings one or several views up to the present, each with its own target:

    1. take each view's consumer, which fences off older refreshes, and read S0, the position in its target
    2. lock the tables and logs to read, take a snapshot S1 and export it: all readers import it
    3. plan each view, and check whether the changes since S0 are enough
    4. the view's engine reads the changes in (S0, S1], or the tables at S1 for a full load, and computes the view's
       changes
    5. record S1 as a tick; its nonce goes into the position
    6. in one transaction of the targets, or one commit of a lake table: if the position is still S0, change the rows
       and write the position
    7. let the queue drop the consumed changes

A refresh killed at any point leaves all targets at S0 or all at S1; the next refresh goes on from there. A statement
that reads two targets of a group sees both at the same point of their tables' history.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import Connection

from gdq.call import call, scalar
from gdq.conninfo import Connectable, connect, conninfo_of, is_pooled, resolve_conninfo, target_conninfo
from gdq.consumers.refresh.attempts import RefreshAttempts, RefreshCheck
from gdq.consumers.refresh.groups import RefreshGroup
from gdq.consumers.refresh.kept_views import KeptViews
from gdq.consumers.refresh.view_refresh import RefreshAction, RefreshPoint, ViewRefresh
from gdq.consumers.views.change_source import ChangeSource, QueueChangeSource
from gdq.consumers.views.progress import EnginePhase, Progress
from gdq.errors import GdqError
from gdq.extra import extra_named
from gdq.qualified_sql import qualified
from gdq.shown import Shown
from gdq.sql_text import PINNED_SETTINGS, pin_session
from gdq.view.view import ViewInfo, view_info

if TYPE_CHECKING:
    from gdq.consumers.spark.session import SparkRun


@dataclass(frozen=True, slots=True, repr=False)
class RefreshResult(Shown):
    """Result of one refresh of one view: the action and its reason, the rows deleted plus inserted, and the seconds.

    `kind`: the way of computing (none, incremental, by-key, full); `delta_rows`: netted changes used; `rows_read`: rows
    read from the tables. `group_name`: the stored group that was refreshed.
    """

    view_name: str
    action: RefreshAction
    reason: str | None
    rows_changed: int
    seconds: float
    kind: str | None = None
    delta_rows: int | None = None
    rows_read: int | None = None
    group_name: str | None = None


class Refresher:
    """Refreshes views of one source database; its Spark session starts with the first view that needs it.

    `connection`: a connection string, or an idle autocommit connection, which stays open at the end.
    `driver_bytes`: Spark's result passes through this process if at most this much was read, else a staging table.
    `at` is called at the points of a refresh, in order; an exception from it ends the refresh there.
    `progress` is called with the view, the phase of its refresh, the rows read or written so far (0 if unknown), and
    about how many there will be (None if unknown), by the planner's or the tables' statistics.
    `slot_wait_seconds`: how long a refresh from a slot waits for another reader of the slot.
    """

    @extra_named()
    def __init__(
        self,
        connection: Connectable = None,
        *,
        driver_bytes: int = 16 * 2**20,
        at: Callable[[RefreshPoint], None] = lambda _: None,
        progress: Callable[[str, EnginePhase, int, int | None], None] | None = None,
        slot_wait_seconds: float = 30.0,
    ) -> None:
        from gdq.consumers.refresh.engines import Engines  # noqa: PLC0415 (loads sqlglot, an extra)

        self._stack = ExitStack()
        self._connections: dict[tuple[str, str], Connection[Any]] = {}
        self.at = at
        self._progress = progress
        self._slot_wait_seconds = slot_wait_seconds
        self._opened = not isinstance(connection, Connection)
        self._own_role: str | None = None
        if isinstance(connection, Connection):
            self.control = connection
        else:
            opened = connect(connection, autocommit=True, application_name="gdq:refresh")
            self.control = self._stack.enter_context(opened)
        if self.control.info.parameter_status("in_hot_standby") == "on":
            self._stack.close()
            # the server would refuse each view of a refresh by itself
            raise GdqError("a refresh needs the primary server, this is a standby", hint="Connect to the primary.")
        self.dsn = conninfo_of(self.control)
        self._kept = KeptViews(self.control, self._target, at)
        self._stack.enter_context(_pinned(self.control, pooled=self._pooled, kept=isinstance(connection, Connection)))
        given = self.dsn if isinstance(connection, Connection) else resolve_conninfo(connection)
        self._engines = Engines(lambda: self.connection("compute", self.dsn), self.dsn, given, driver_bytes)
        self._stack.callback(self._engines.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def spark_run(self) -> SparkRun:
        """The Spark session and what its tasks need to know; asking starts Spark."""
        return self._engines.spark_run

    def refresh(
        self, name: str, *, full: bool = False, check: RefreshCheck | None = None, slot: bool = False
    ) -> RefreshResult:
        """Bring one view up to the present. `full`: reload all rows. `check` is called before the target commits.

        `slot`: read changes from the logical slot gdq_QUEUE_VIEW instead of the queue.
        Writes the target and its position, the queue's position and a row of the view's history. PlanError if the view
        can no longer be planned, psycopg.errors.LockNotAvailable while another refresh of the view runs,
        RefreshConflict if another refresh has moved the position, GdqError if the view belongs to a group.
        """
        checks = {} if check is None else {name: check}
        (result,) = self.refresh_together([name], full=[name] if full else (), check=checks, slot=slot)
        return result

    def refresh_group(
        self,
        group: RefreshGroup,
        *,
        full: Collection[str] = (),
        check: Mapping[str, RefreshCheck] | None = None,
        slot: bool = False,
    ) -> list[RefreshResult]:
        """Bring a stored group or a view up to the present; arguments and errors as for refresh_together()."""
        return self.refresh_together(group.names, full=full, check=check, group=group.group_name, slot=slot)

    def refresh_together(
        self,
        names: Sequence[str],
        *,
        full: Collection[str] = (),
        check: Mapping[str, RefreshCheck] | None = None,
        group: str | None = None,
        slot: bool = False,
    ) -> list[RefreshResult]:
        """Bring these views up to the same snapshot; the views in `full` are reloaded.

        `group`: the stored group of these views. `check`: functions by view, called before the targets commit.
        `slot`: read changes from the logical slot of each view instead of the queue.
        Writes and errors as for refresh(); psycopg.errors.FeatureNotSupported for views that cannot be refreshed
        together, GdqError for a view of another stored group.
        """
        names = list(dict.fromkeys(names))
        started = time.monotonic()
        done = None if full or check or slot else self._kept.refreshed(names, group, self._as_owner)
        if done is not None:
            seconds = time.monotonic() - started
            return [
                RefreshResult(name, one.action, None, one.rows, seconds, one.kind, one.delta_rows, 0, group)
                for name, one in zip(names, done, strict=True)
            ]
        results: dict[str, RefreshResult] = {}
        with ExitStack() as stack:
            # in one order, so that two groups never wait for each other
            for name in sorted(names):
                stack.enter_context(self._locked(name))
            if group is not None or len(names) > 1:
                call(self.control, "check_group", names)
            views = [self._as_owner(view_info(self.control, name)[0]) for name in names]
            for view in views:
                if view.group_name not in (None, group):
                    # alone it would move to another snapshot than the rest of its group
                    hint = f"gdq refresh --group {view.group_name}"
                    raise GdqError(f"view {view.view_name} is refreshed with group {view.group_name} only", hint=hint)
            works = [stack.enter_context(self._noted(view, group, slot, results)) for view in views]
            reasons = {view.view_name: _why_full(view, asked=view.view_name in full) for view in views}
            holder = partial(self.connection, "snapshot", self.dsn)
            RefreshAttempts(self.control, holder, self._engines, self.at, works, reasons, check or {}).run()
            for work, view in zip(works, views, strict=True):
                if not slot:
                    self._kept.keep(work, view)
        return [results[name] for name in names]

    @property
    def _role(self) -> str:
        """The role that the control session acts as; a caller may give his own session another one."""
        if self._own_role is None or not self._opened:
            self._own_role = str(scalar(self.control, "select current_user::pg_catalog.text"))
        return self._own_role

    @cached_property
    def _pooled(self) -> bool:
        return is_pooled(self.control)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Keep other refreshes of the view out. The lock ends with the connection at the latest."""
        if self._pooled:
            # a pooler shares sessions, not transactions
            with connect(self.dsn, application_name="gdq:refresh") as holder:
                call(holder, "lock_view", name, True)
                yield
            return
        key = scalar(self.control, "select gdq.lock_view(%s)", name)
        try:
            yield
        finally:
            if not self.control.closed:
                self.control.execute("select pg_catalog.pg_advisory_unlock(%s)", [key])

    @contextmanager
    def _noted(
        self, view: ViewInfo, group: str | None, slot: bool, results: dict[str, RefreshResult]
    ) -> Iterator[ViewRefresh]:
        """A refresh that the block carries out; its result goes into the view's history and into `results`."""
        run = scalar(self.control, "select gdq.start_view_run(%s, %s)", view.view_name, group)
        started = time.monotonic()
        try:
            work = ViewRefresh(
                self.control,
                view,
                self._change_source(view, slot=slot),
                open_target=partial(self._target, view.target_dsn),
                planned=self._kept.planned(view.view_name),
                tell=self._progress_of(view.view_name),
                run=run,
            )
            yield work
        except BaseException as error:
            text = str(error).strip() or type(error).__name__
            if not self.control.closed:
                failed = "select gdq.finish_view_run(%s, 'failed', error => %s)"
                scalar(self.control, failed, run, text.splitlines()[0])
            raise
        effort = work.effort
        scalar(
            self.control,
            qualified("""select gdq.finish_view_run(%s, %s, %s, %s::pg_snapshot, %s::pg_snapshot, %s, null,
                 %s, %s, %s, %s, %s)"""),
            *(run, work.action, work.reason, *work.snapshots, work.rows),
            *(effort.kind, effort.delta_rows, effort.rows_read, work.seconds, work.choice or None),
        )
        done = (view.view_name, work.action, work.reason, work.rows, time.monotonic() - started)
        results[view.view_name] = RefreshResult(*done, effort.kind, effort.delta_rows, effort.rows_read, group)

    def _progress_of(self, name: str) -> Progress:
        return Progress(None if self._progress is None else partial(self._progress, name))

    def _change_source(self, view: ViewInfo, *, slot: bool) -> ChangeSource:
        if not slot:
            return QueueChangeSource(view)
        from gdq.consumers.slot.views.change_source import SlotChangeSource  # noqa: PLC0415 (few refreshes need it)

        return SlotChangeSource(self.control, self.dsn, view, wait_seconds=self._slot_wait_seconds)

    def _as_owner(self, view: ViewInfo) -> ViewInfo:
        """The view with the role that its code runs as; GdqError if this session may not act as the view's owner."""
        me = self._role
        if view.owner in (None, me):
            return view
        try:
            with self.control.transaction(force_rollback=True):
                scalar(self.control, "select pg_catalog.set_config('role', %s, true)", view.owner)
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidParameterValue) as error:
            name, owner = view.view_name, view.owner
            raise GdqError(
                f"view {name} is refreshed with the rights of {owner}, and {me} may not act as {owner}",
                hint=f"GRANT {owner} TO {me}, or take the view: gdq alter-view {name} --owner {me}",
            ) from error
        return replace(view, acts_as=view.owner)

    def _target(self, dsn: str | None) -> Connection[Any]:
        """The session in the target's database; `dsn` None: in the tables' own."""
        if dsn is None:
            return self.connection("target", self.dsn, autocommit=True)
        with target_conninfo(dsn) as safe:
            return self.connection("target", safe, autocommit=True)

    def connection(self, purpose: str, dsn: str, *, autocommit: bool = False) -> Connection[Any]:
        """A connection for one purpose, kept between refreshes because sessions cache prepared plans."""
        known = self._connections.get((purpose, dsn))
        if known is None or known.closed or known.broken:
            known = connect(dsn, autocommit=True, application_name=f"gdq:refresh {purpose}")
            if not is_pooled(known):
                pin_session(known)
                # else the statement of a killed process runs to its end and keeps its locks
                with suppress(psycopg.errors.InvalidParameterValue):  # not supported on all platforms
                    known.execute("select pg_catalog.set_config('client_connection_check_interval', '2s', false)")
            known.autocommit = autocommit
            # a few for each view that is refreshed again and again
            known.prepared_max = 300
            self._connections[purpose, dsn] = known
            self._stack.callback(known.close)
        return known


@contextmanager
def _pinned(control: Connection[Any], *, pooled: bool, kept: bool) -> Iterator[None]:
    """Pin the settings of the control session; `kept`: the session goes on afterwards, with its own settings."""
    if pooled:  # its statements name every operator and function with a schema
        yield
        return
    names = list(PINNED_SETTINGS)
    query = "select n, pg_catalog.current_setting(n) from pg_catalog.unnest(%s::pg_catalog.text[]) n"
    own = control.execute(query, [names]).fetchall() if kept else []
    pin_session(control)
    try:
        yield
    finally:
        if not control.closed:
            for name, value in own:
                control.execute("select pg_catalog.set_config(%s, %s, false)", [name, value])


def _why_full(view: ViewInfo, *, asked: bool) -> str | None:
    """Why a view is loaded in full whatever has changed; None if nothing says so."""
    if asked:
        return "asked for"
    return None if view.diverged is None else f"an audit found other rows than the query's: {view.diverged}"
