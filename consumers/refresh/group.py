"""Refreshes several views as one: a stored group, `gdq refresh --group NAME`, or `gdq refresh --together VIEW VIEW...`.

All are computed at one snapshot, and all targets move in one transaction: whoever reads two of them in one statement
sees them at the same point of their tables' history. Killed anywhere, all are as before or all are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import psycopg

from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.consumers.refresh.view_refresh import ViewRefresh
from gdq.consumers.views.copy_engine import CopyEngine
from gdq.consumers.views.postgres_engine import PostgresEngine
from gdq.consumers.views.signals import Diverged, NeedsFull, TableWanted
from gdq.consumers.views.snapshot_holder import WANTED_TRIES, SnapshotHolder, hold_snapshot
from gdq.errors import GdqError, mapped
from gdq.view.group import Unit
from gdq.view.view import view_info

Check = Callable[[ViewRefresh, SnapshotHolder], None]


def refresh_unit(
    refresher: Refresher,
    unit: Unit,
    *,
    full: Collection[str] = (),
    check: Mapping[str, Check] | None = None,
    slot: bool = False,
) -> list[RefreshResult]:
    """Bring a view or a group up to the present. Errors as of Refresher.refresh() and refresh_group()."""
    if unit.group_name is not None:
        return refresh_group(refresher, unit.names, full=full, check=check, group=unit.group_name, slot=slot)
    (name,) = unit.names
    return [refresher.refresh(name, full=name in full, check=(check or {}).get(name), slot=slot)]


def refresh_group(
    refresher: Refresher,
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
    with ExitStack() as stack:
        # in one order, so that two groups never wait for each other
        for name in sorted(names):
            stack.enter_context(refresher.locked(name))
        with mapped():
            refresher.control.execute("select gdq.check_group(%s)", [names])
        views = [view_info(refresher.control, name)[0] for name in names]
        for view in views:
            if view.group_name not in (None, group):
                # without the others it would stand at another snapshot than they
                hint = f"gdq refresh --group {view.group_name}"
                raise GdqError(f"view {view.view_name} is refreshed with group {view.group_name} only", hint=hint)
        works = [
            stack.enter_context(refresher.noted(view, group, refresher.changes_of(view, slot=slot))) for view in views
        ]
        reasons = {name: "asked for" if name in full else None for name in names}
        _Group(refresher, works, reasons, check or {}).run()
    return [work.result for work in works]


@dataclass(slots=True)
class _Group:
    """One refresh of several views. `reasons`: why they are loaded in full."""

    refresher: Refresher
    works: Sequence[ViewRefresh]
    reasons: dict[str, str | None]
    check: Mapping[str, Check]
    _name: str = field(default="", init=False)

    def run(self) -> None:
        """The whole refresh; one view that needs a full load starts it again for all."""
        wanted = 0
        while True:
            try:
                return self._run()
            except TableWanted as why:
                wanted += 1
                if wanted == WANTED_TRIES:
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

    def _run(self) -> None:
        at = self.refresher.at
        for work in self.works:
            work.begin()
        at("begun")
        first = self.works[0]
        source = self.refresher.connection("snapshot", self.refresher.dsn)
        tables = sorted({table for work in self.works for table in work.view.tables})
        with hold_snapshot(source, first.view.queue_name, tables) as holder:
            for work in self.works:
                with mapped():
                    holder.connection.execute("select gdq.batch_tables(%s, %s)", work.batch)
            at("exported")
            for work in self.works:
                self._name = work.view.view_name
                work.look(holder, self.reasons[self._name])
            position = first.tick(holder.snapshot)
            at("ticked")
            with first.output.transaction():
                for work in self.works:
                    self._apply(work, holder, position)
                for work in self.works:
                    if work.view.view_name in self.check:
                        self.check[work.view.view_name](work, holder)
                at("applied")
        at("committed")
        for work in self.works:
            work.settle()
            work.finish(holder.snapshot)
        at("done")

    def _apply(self, work: ViewRefresh, holder: SnapshotHolder, position: str) -> None:
        """Change one target in the transaction that all share."""
        self._name = work.view.view_name
        with work.engine(holder) as engine:
            if not isinstance(engine, (PostgresEngine, CopyEngine)):
                raise AssertionError("only views of engine postgres with targets in one database come here")
            if isinstance(engine, PostgresEngine):
                engine.computation.joined = work is not self.works[0]
            try:
                engine.compute(work.s0, work.changed)
                work.apply(engine, position)
            except psycopg.DataError as error:
                diag = error.diag
                message = f"view {self._name}: {diag.message_primary}"
                raise GdqError(message, detail=diag.message_detail, hint=diag.message_hint) from error
            engine.clear()
