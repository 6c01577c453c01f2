"""Refreshes materialized views: the class Refresher, which `gdq refresh [VIEW...]` and spark-submit use.

A refresh brings one view or several up to the present, each with a target of its own:

    1. take the consumer of each view, which fences older refreshes off, and read S0, the position in its target
    2. lock what will be read, take a snapshot S1 and export it: all readers import it
    3. plan each view, and find out whether the changes since S0 suffice
    4. the view's engine reads the changes in (S0, S1], or the tables at S1 for a full load, and computes what changes
       in the view
    5. record S1 as a tick; its nonce goes into the position
    6. in one transaction of the targets, or one commit of a lake table: position still S0? change the rows, write the
       position
    7. let the queue drop what is consumed

Killed anywhere, it leaves all targets at S0 or all at S1, and the next refresh goes on from there. Whoever reads two
targets of a group in one statement sees them at the same point of their tables' history.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import Connection

from gdq.call import call, scalar
from gdq.conninfo import connect, conninfo_of, is_pooled, resolve
from gdq.consumers.refresh.engines import Engines
from gdq.consumers.refresh.view_refresh import Action, Check, Described, Point, RefreshLoop, ViewRefresh
from gdq.consumers.views.change_source import ChangeSource, QueueChangeSource
from gdq.consumers.views.engine import Phase
from gdq.errors import GdqError
from gdq.view.group import group_info
from gdq.view.view import ViewInfo, view_info

if TYPE_CHECKING:
    from gdq.consumers.spark.session import SparkRun


@dataclass(frozen=True, slots=True)
class RefreshResult:
    """One refresh of one view: what was done and why, the rows deleted and inserted, and how long it took.

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


@dataclass(frozen=True, slots=True)
class RefreshGroup:
    """The views that one refresh brings up to the present: all views of a stored group, or one view."""

    group_name: str | None
    views: tuple[ViewInfo, ...]

    @property
    def names(self) -> list[str]:
        """The names of the views."""
        return [view.view_name for view in self.views]

    @property
    def key(self) -> tuple[str, ...]:
        """The name of the group and of its views: a group that gets another view has another key."""
        return (self.group_name or "", *self.names)

    def __str__(self) -> str:
        return f"view {self.names[0]}" if self.group_name is None else f"group {self.group_name}"


class Refresher:
    """Refreshes views of one source database; its Spark session starts at the first one that needs it.

    Given an idle autocommit connection it works on that, which stays open at the end.
    What reads at most `driver_bytes` passes its result through this process, more goes through a staging table.
    `at` is called at the points of a refresh, in order; an exception from it ends the refresh there. `progress` is
    called with the view, the phase that its refresh has come to, and the rows written, where that number is known.
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
        self._described: Described = {}
        self.at = at
        self._progress = progress
        self._slot_wait_seconds = slot_wait_seconds
        if isinstance(source, Connection):
            self.control = source
        else:
            self.control = self._stack.enter_context(connect(source, autocommit=True, application_name="gdq:refresh"))
        self.dsn = conninfo_of(self.control)
        given = self.dsn if isinstance(source, Connection) else resolve(source)
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
        self, name: str, *, full: bool = False, check: Check | None = None, slot: bool = False
    ) -> RefreshResult:
        """Bring one view up to the present; `full`: by loading it afresh. `check` is called before the target commits.

        `slot`: with changes from the logical slot gdq_QUEUE_VIEW instead of the queue.

        Writes the target and its position, the queue's position and a row of the view's history. PlanError when the
        view can no longer be planned, psycopg.errors.LockNotAvailable when another refresh of it is at work,
        RefreshConflict when one has overtaken this; GdqError when the view is refreshed with a group only.
        """
        checks = {} if check is None else {name: check}
        (result,) = self.refresh_together([name], full=[name] if full else (), check=checks, slot=slot)
        return result

    def refresh_group(
        self,
        group: RefreshGroup,
        *,
        full: Collection[str] = (),
        check: Mapping[str, Check] | None = None,
        slot: bool = False,
    ) -> list[RefreshResult]:
        """Bring a stored group or a view up to the present. Arguments and errors as of refresh_together()."""
        return self.refresh_together(group.names, full=full, check=check, group=group.group_name, slot=slot)

    def refresh_together(
        self,
        names: Sequence[str],
        *,
        full: Collection[str] = (),
        check: Mapping[str, Check] | None = None,
        group: str | None = None,
        slot: bool = False,
    ) -> list[RefreshResult]:
        """Bring these views up to the same present; those in `full` by loading them afresh.

        `group`: the stored one that they are. `check` is called for the views that it names before all are committed.
        `slot`: with changes from the logical slot of each view instead of the queue.
        Writes what the refresh of each writes. psycopg.errors.FeatureNotSupported for views that do not go together,
        GdqError for one that a stored group has; all else as for one view.
        """
        names = list(dict.fromkeys(names))
        results: dict[str, RefreshResult] = {}
        with ExitStack() as stack:
            # in one order, so that two groups never wait for each other
            for name in sorted(names):
                stack.enter_context(self._locked(name))
            if group is not None or len(names) > 1:
                call(self.control, "check_group", names)
            views = [view_info(self.control, name)[0] for name in names]
            for view in views:
                if view.group_name not in (None, group):
                    # without the others it would stand at another snapshot than they
                    hint = f"gdq refresh --group {view.group_name}"
                    raise GdqError(f"view {view.view_name} is refreshed with group {view.group_name} only", hint=hint)
            works = [stack.enter_context(self._noted(view, group, slot, results)) for view in views]
            reasons = {name: "asked for" if name in full else None for name in names}
            holder = partial(self.connection, "snapshot", self.dsn)
            RefreshLoop(self.control, holder, self._engines, self.at, works, reasons, check or {}).run()
        return [results[name] for name in names]

    @cached_property
    def _pooled(self) -> bool:
        return is_pooled(self.control)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Keep other refreshes of the view out. The lock ends with the connection at the latest."""
        if self._pooled:
            # a session is not ours alone there, a transaction is
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
        """A refresh of a view that the block carries out; its result goes into the view's history and `results`."""
        run = scalar(self.control, "select gdq.start_view_run(%s, %s)", view.view_name, group)
        started = time.monotonic()
        try:
            dsn = self.dsn if view.target_dsn is None else view.target_dsn
            work = ViewRefresh(
                self.control,
                view,
                self._change_source(view, slot=slot),
                open_target=partial(self.connection, "target", dsn, autocommit=True),
                described=self._described,
                tell=partial(self._progress, view.view_name),
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
            """select gdq.finish_view_run(%s, %s, %s, %s::pg_snapshot, %s::pg_snapshot, %s, null,
                 %s, %s, %s, %s, %s)""",
            *(run, work.action, work.reason, *work.snapshots, work.rows),
            *(effort.kind, effort.delta_rows, effort.rows_read, work.seconds, work.choice or None),
        )
        done = (view.view_name, work.action, work.reason, work.rows, time.monotonic() - started)
        results[view.view_name] = RefreshResult(*done, effort.kind, effort.delta_rows, effort.rows_read, group)

    def _change_source(self, view: ViewInfo, *, slot: bool) -> ChangeSource:
        if not slot:
            return QueueChangeSource(view)
        from gdq.consumers.slot.views.change_source import SlotChangeSource  # noqa: PLC0415 (few refreshes need it)

        return SlotChangeSource(self.control, self.dsn, view, wait_seconds=self._slot_wait_seconds)

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


def refresh_groups(
    connection: Connection[Any], names: Sequence[str] = (), groups: Sequence[str] = ()
) -> list[RefreshGroup]:
    """The groups and views to refresh, in order: these groups and the groups of these views; without any, all views.

    A group that reads the target of another comes after that one; else as views are named, or in the order of their
    names. Groups that read each other's targets come too. psycopg.errors.UndefinedObject for an unknown name.
    """
    known = {view.view_name: view for view in view_info(connection)}
    members: dict[str | None, list[ViewInfo]] = {}
    for view in known.values():
        members.setdefault(view.group_name, []).append(view)
    wanted: list[ViewInfo] = []
    for group in groups:
        if group not in members:
            group_info(connection, group)
            raise GdqError(f"group {group} has no views", hint=f"gdq alter-group {group} --add VIEW")
        wanted += members[group]
    for name in names or ([] if groups else known):
        wanted += [known[name]] if name in known else view_info(connection, name)
    found: dict[tuple[str | None, str], RefreshGroup] = {}
    for view in wanted:
        if view.group_name is None:
            found[None, view.view_name] = RefreshGroup(None, (view,))
        else:
            found[view.group_name, ""] = RefreshGroup(view.group_name, tuple(members[view.group_name]))
    return _in_order(connection, found.values())


def _in_order(connection: Connection[Any], given: Iterable[RefreshGroup]) -> list[RefreshGroup]:
    """The groups so that one over the target of another comes after that one."""
    listed = list(given)
    views = [view for group in listed for view in group.views]
    names = [name for view in views for name in (*([] if view.lake else [view.target]), *view.tables)]
    query = "select n, pg_catalog.to_regclass(n)::oid from pg_catalog.unnest(%s::text[]) n"
    oids = dict(connection.execute(query, [names]).fetchall())
    filled = {
        oids[view.target]: number
        for number, group in enumerate(listed)
        for view in group.views
        if not view.elsewhere and oids[view.target] is not None
    }
    ordered: list[RefreshGroup] = []
    seen: set[int] = set()

    def visit(number: int) -> None:
        if number not in seen:
            seen.add(number)
            for view in listed[number].views:
                for table in view.tables:
                    if oids[table] in filled:
                        visit(filled[oids[table]])
            ordered.append(listed[number])

    for number in range(len(listed)):
        visit(number)
    return ordered
