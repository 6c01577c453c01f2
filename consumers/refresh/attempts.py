"""RefreshAttempts: one refresh of a group of views, in one or more attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.refresh.audit import audit_refresh, is_due
from gdq.consumers.refresh.view_refresh import RefreshPoint, ViewRefresh
from gdq.consumers.views.signals import Diverged, NeedsFull, NeedsTables, TableWanted
from gdq.consumers.views.snapshot_holder import HeldView, SnapshotHolder, hold_snapshot
from gdq.errors import GdqError
from gdq.qualified_sql import qualified

if TYPE_CHECKING:
    from gdq.consumers.refresh.engines import Engines

# Attempts of one refresh; each ended one let a statement through that waited for the snapshot holder.
_WANTED_TRIES = 10
RefreshCheck = Callable[[ViewRefresh, SnapshotHolder], None]


@dataclass(slots=True)
class RefreshAttempts:
    """One refresh of a group of views in one or more attempts; a single view is a group of one.

    `holder` gives the session of the snapshot holder. `reasons`: why a view is loaded in full, by its name.
    """

    control: Connection[Any]
    holder: Callable[[], Connection[Any]]
    engines: Engines
    at: Callable[[RefreshPoint], None]
    works: Sequence[ViewRefresh]
    reasons: dict[str, str | None]
    check: Mapping[str, RefreshCheck]
    _name: str = field(default="", init=False)

    def run(self) -> None:
        """Refresh all views; if one needs a full load, the refresh starts again for all."""
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
            except NeedsTables:
                for work in self.works:
                    work.by_tables = True
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
        views = [HeldView(work.view.view_name, *work.batch) for work in self.works]
        acting = any(work.view.acts_as is not None for work in self.works)
        with hold_snapshot(self.holder(), queue, tables, views=views, acting=acting) as holder:
            self.at("exported")
            for work, stamp in zip(self._each(), holder.stamps, strict=True):
                work.look(holder, stamp, self.reasons[self._name])
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
                work.audited = self._name not in self.check and is_due(work)
                task = work.task(holder, grouped=grouped, joined=work is not first)
                with self._named(grouped=grouped), self.engines.engine(task, work.place) as engine:
                    work.compute(engine)
                    if work is first:
                        self.at("staged")
                        position = self._tick(queue, holder.snapshot)
                        self.at("ticked")
                        moving.enter_context(work.transaction())
                    work.apply(engine, position)
                    if work.audited:
                        audit_refresh(self.control, work, engine, holder)
            for work in self._each():
                if self._name in self.check:
                    self.check[self._name](work, holder)
            if first.lake is None:
                self.at("applied")

    def _each(self) -> Iterator[ViewRefresh]:
        """Yield the views in turn and note the name, so that run() knows which view raised a signal."""
        for work in self.works:
            self._name = work.view.view_name
            yield work

    @contextmanager
    def _named(self, *, grouped: bool) -> Iterator[None]:
        """Name the view in an error in its data, if there are several views."""
        try:
            yield
        except psycopg.DataError as error:
            if not grouped:
                raise
            diag = error.diag
            message = f"view {self._name}: {diag.message_primary}"
            raise GdqError(message, detail=diag.message_detail, hint=diag.message_hint) from error

    def _tick(self, queue: str, snapshot: str) -> str:
        """Record the held snapshot as a tick; returns its position."""
        query = qualified("select gdq.tick_position(%s, tick_id) from gdq.add_tick(%s, %s::pg_snapshot)")
        return str(scalar(self.control, query, queue, queue, snapshot) or "")
