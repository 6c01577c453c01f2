"""Refreshes materialized views: the class Refresher, which `gdq refresh [VIEW...]` and spark-submit use.

One refresh:

    1. take the view's consumer, which fences older refreshes off
    2. read S0, the position in the target, and find out whether the changes since then suffice
    3. lock what will be read, take a snapshot S1 and export it: all readers import it
    4. the engine, Spark or the server itself, reads the delta (S0, S1], or the tables at S1 for a full load, and
       computes from it what changes in the view
    5. record S1 as a tick; its nonce goes into the position
    6. in one transaction of the target, or one commit of a lake table: position still S0? change the rows, write the
       position
    7. let the queue drop what is consumed

Killed anywhere, it leaves the target at S0 or at S1, and the next refresh goes on from there.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import Connection
from psycopg.rows import scalar_row

from gdq.conninfo import connect, conninfo_of, for_other_machines, is_pooled, resolve, without_password
from gdq.consumers.refresh.view_refresh import Action, Point, ViewRefresh
from gdq.consumers.views.change_source import ChangeSource, QueueChangeSource
from gdq.consumers.views.engine import Phase
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.errors import GdqError, mapped
from gdq.view.view import ViewInfo, view_info

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class RefreshResult:
    """One refresh: what was done and why, the rows deleted and inserted, and how long it took.

    `kind`: what was computed for that, `delta_rows` of how many netted changes, `rows_read` rows of the tables.
    `group_name`: the stored group that was refreshed.
    """

    view_name: str
    action: Action
    reason: str | None
    rows_changed: int
    seconds: float
    kind: str | None = None
    delta_rows: int | None = None
    rows_read: int | None = None
    group_name: str | None = None


class Refresher:
    """Refreshes views of one source database; its Spark session starts at the first one that needs it.

    Given an idle autocommit connection it works on that, which stays open at the end.
    What reads at most `driver_bytes` passes its result through this process, more goes through a staging table.
    `at` is called at the points of a refresh, in order; an exception from it ends the refresh there. `progress` is told
    of which view a refresh has come to which phase, and how many rows are written, where that is known.
    `slot_wait_seconds`: how long a refresh from a slot waits for another that reads it.
    """

    def __init__(
        self,
        source: Connection[Any] | str | None = None,
        *,
        driver_bytes: int = 16 * 2**20,
        at: Callable[[Point], None] = lambda _: None,
        progress: Callable[[str, Phase, int], None] = lambda _view, _phase, _rows: None,
        slot_wait_seconds: float = 30.0,
    ) -> None:
        self._stack = ExitStack()
        self._connections: dict[tuple[str, str], Connection[Any]] = {}
        self.described: dict[Hashable, list[tuple[str, int, str]]] = {}
        self.driver_bytes = driver_bytes
        self.at = at
        self.progress = progress
        self._slot_wait_seconds = slot_wait_seconds
        if isinstance(source, Connection):
            self.control = source
        else:
            self.control = self._stack.enter_context(connect(source, autocommit=True, application_name="gdq:refresh"))
        self.dsn = conninfo_of(self.control)
        self.worker_dsn = self._stack.enter_context(without_password(self.dsn))
        self._given = self.dsn if isinstance(source, Connection) else resolve(source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def spark(self) -> SparkSession:
        """The Spark session, which knows the data source gdq."""
        from gdq.consumers.spark.session import spark_session  # noqa: PLC0415
        from gdq.consumers.spark.source import register  # noqa: PLC0415
        from gdq.consumers.spark.stage import register_stage  # noqa: PLC0415

        handler = signal.getsignal(signal.SIGINT)
        session = spark_session()
        if not str(session.sparkContext.master).startswith("local"):
            self.worker_dsn = for_other_machines(self.worker_dsn, self._given)
        if callable(handler) and handler is not signal.default_int_handler:
            # Spark takes Ctrl-C for itself; who had asked for it goes on getting it.
            signal.signal(signal.SIGINT, handler)
        register(session)
        register_stage(session)
        return session

    def refresh(
        self,
        name: str,
        *,
        full: bool = False,
        check: Callable[[ViewRefresh, SnapshotHolder], None] | None = None,
        slot: bool = False,
    ) -> RefreshResult:
        """Bring one view up to the present; `full`: by loading it afresh. `check` is called before the target commits.

        `slot`: with changes from the logical slot gdq_QUEUE_VIEW instead of the queue.

        Writes the target and its position, the queue's position and a row of the view's history. PlanError when the
        view can no longer be planned, psycopg.errors.LockNotAvailable when another refresh of it is at work,
        RefreshConflict when one has overtaken this; GdqError when the view is refreshed with a group only.
        """
        with self.locked(name):
            return self._refresh(name, full, check, slot)

    @cached_property
    def _pooled(self) -> bool:
        return is_pooled(self.control)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Keep other refreshes of the view out. The lock ends with the connection at the latest."""
        if self._pooled:
            # a session is not ours alone there, a transaction is
            with connect(self.dsn, application_name="gdq:refresh") as holder:
                with mapped():
                    holder.execute("select gdq.lock_view(%s, true)", [name])
                yield
            return
        key = self._scalar("select gdq.lock_view(%s)", name)
        try:
            yield
        finally:
            if not self.control.closed:
                self.control.execute("select pg_catalog.pg_advisory_unlock(%s)", [key])

    def _refresh(
        self, name: str, full: bool, check: Callable[[ViewRefresh, SnapshotHolder], None] | None, slot: bool
    ) -> RefreshResult:
        (view,) = view_info(self.control, name)
        if view.group_name is not None:
            # alone it would stand at another snapshot than the others
            hint = f"gdq refresh --group {view.group_name}"
            raise GdqError(f"view {name} is refreshed with group {view.group_name} only", hint=hint)
        with self.noted(view, changes=self.changes_of(view, slot=slot)) as work:
            work.run(full=full, check=check)
        return work.result

    def changes_of(self, view: ViewInfo, *, slot: bool) -> ChangeSource:
        """Where a refresh of the view takes its changes from: its slot, or the queue."""
        if not slot:
            return QueueChangeSource(view)
        from gdq.consumers.slot.views.change_source import SlotChangeSource  # noqa: PLC0415

        return SlotChangeSource(self.control, self.dsn, view, wait_seconds=self._slot_wait_seconds)

    @contextmanager
    def noted(
        self, view: ViewInfo, group: str | None = None, changes: ChangeSource | None = None
    ) -> Iterator[ViewRefresh]:
        """A refresh of a view whose outcome the block brings about: it is noted in the history, with its `group`."""
        run = self._scalar("select gdq.start_view_run(%s, %s)", view.view_name, group)
        started = time.monotonic()
        try:
            work = ViewRefresh(self, view, changes)
            yield work
        except BaseException as error:
            text = str(error).strip() or type(error).__name__
            if not self.control.closed:
                self._scalar("select gdq.finish_view_run(%s, 'failed', error => %s)", run, text.splitlines()[0])
            raise
        effort = work.effort
        self._scalar(
            """select gdq.finish_view_run(%s, %s, %s, %s::pg_snapshot, %s::pg_snapshot, %s, null,
                 %s, %s, %s, %s, %s)""",
            *(run, work.action, work.reason, *work.snapshots, work.rows),
            *(effort.kind, effort.delta_rows, effort.rows_read, work.seconds, work.choice or None),
        )
        done = (view.view_name, work.action, work.reason, work.rows, time.monotonic() - started)
        work.result = RefreshResult(*done, effort.kind, effort.delta_rows, effort.rows_read, group)

    def connection(self, purpose: str, dsn: str, *, autocommit: bool = False) -> Connection[Any]:
        """A connection for one purpose, kept from refresh to refresh: what a session has compiled is not lost."""
        known = self._connections.get((purpose, dsn))
        if known is None or known.closed or known.broken:
            known = connect(dsn, autocommit=True, application_name=f"gdq:refresh {purpose}")
            if not is_pooled(known):
                # else the statement of a process that was killed goes on to its end, with its locks
                with suppress(psycopg.errors.InvalidParameterValue):  # a server that cannot look
                    known.execute("select pg_catalog.set_config('client_connection_check_interval', '2s', false)")
            known.autocommit = autocommit
            self._connections[purpose, dsn] = known
            self._stack.callback(known.close)
        return known

    def _scalar(self, query: str, *values: object) -> Any:
        with mapped(), self.control.cursor(row_factory=scalar_row) as cursor:
            return cursor.execute(query, values).fetchone()
