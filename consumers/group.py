"""Refreshes several views as one: `gdq refresh --group VIEW VIEW...`.

All are computed at one snapshot, and all targets move in one transaction: whoever reads two of them in one statement
sees them at the same point of their tables' history. Killed anywhere, all are as before or all are moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from psycopg import Connection

from gdq.consumers.leader import Leader, lead
from gdq.consumers.postgres_engine import PostgresEngine
from gdq.consumers.refresh import Refresher, RefreshResult
from gdq.consumers.view_refresh import ViewRefresh
from gdq.errors import GdqError, mapped
from gdq.target import Diverged, NeedsFull
from gdq.view import ViewInfo, view_info


def refresh_group(refresher: Refresher, names: Sequence[str], *, full: bool = False) -> list[RefreshResult]:
    """Bring these views up to the same present; `full`: by loading them afresh.

    Writes what the refresh of each writes. GdqError for views that cannot be refreshed together; all else as for one.
    """
    views = [view_info(refresher.control, name)[0] for name in dict.fromkeys(names)]
    _check(refresher.control, views)
    with ExitStack() as stack:
        # in one order, so that two groups never wait for each other
        for view in sorted(views, key=lambda view: view.view_name):
            stack.enter_context(refresher.locked(view.view_name))
        works = [stack.enter_context(refresher.noted(view)) for view in views]
        _Group(refresher, works, dict.fromkeys(names, "asked for" if full else None)).run()
    return [work.result for work in works]


def _check(connection: Connection[Any], views: Sequence[ViewInfo]) -> None:
    for view in views:
        if view.engine != "postgres" or view.elsewhere:
            raise GdqError(
                f"view {view.view_name} cannot be refreshed in a group",
                hint="A group takes views of engine postgres whose targets are in the database of their tables.",
            )
        if view.queue_name != views[0].queue_name:
            raise GdqError(f"views {views[0].view_name} and {view.view_name} are of two queues: no group")
    query = (
        "select pg_catalog.to_regclass(n)::oid from pg_catalog.unnest(%s::text[]) with ordinality u(n, i) order by i"
    )

    def oids(tables: list[str]) -> list[int | None]:
        return [oid for (oid,) in connection.execute(query, [tables])]

    filled = dict(zip(oids([view.target for view in views]), views, strict=True))
    for view in views:
        below = next((filled[oid] for oid in oids(view.tables) if oid is not None and oid in filled), None)
        if below is not None:
            raise GdqError(
                f"view {view.view_name} reads the target of view {below.view_name}: they cannot be in one group",
                hint=f"Refresh {view.view_name} after the group.",
            )


@dataclass(slots=True)
class _Group:
    """One refresh of several views. `reasons`: why they are loaded in full."""

    refresher: Refresher
    works: Sequence[ViewRefresh]
    reasons: dict[str, str | None]
    _name: str = field(default="", init=False)

    def run(self) -> None:
        """The whole refresh; one view that needs a full load starts it again for all."""
        while True:
            try:
                return self._run()
            except NeedsFull as why:
                self.reasons[self._name] = str(why)
            except Diverged as why:
                if self.reasons[self._name] is not None:
                    raise
                self.reasons[self._name] = f"the target was changed by another: {why}"

    def _run(self) -> None:
        at = self.refresher.at
        for work in self.works:
            work.begin()
        at("begun")
        first = self.works[0]
        source = self.refresher.connection("leader", self.refresher.dsn)
        tables = sorted({table for work in self.works for table in work.view.tables})
        with lead(source, first.view.queue_name, tables) as leader:
            for work in self.works:
                with mapped():
                    leader.connection.execute("select gdq.batch_tables(%s, %s)", work.batch)
            at("exported")
            for work in self.works:
                self._name = work.view.view_name
                work.look(leader, self.reasons[self._name])
            position = first.tick(leader.snapshot)
            at("ticked")
            with first.output.transaction():
                for work in self.works:
                    self._apply(work, leader, position)
                at("applied")
        at("committed")
        for work in self.works:
            work.finish(leader.snapshot)
        at("done")

    def _apply(self, work: ViewRefresh, leader: Leader, position: str) -> None:
        """Change one target in the transaction that all share."""
        self._name = work.view.view_name
        with work.engine(leader) as engine:
            if not isinstance(engine, PostgresEngine):
                raise AssertionError("only views of engine postgres come here")
            engine.computation.joined = work is not self.works[0]
            engine.compute(work.s0, work.changed)
            work.apply(engine, position)
            engine.computation.clear()
