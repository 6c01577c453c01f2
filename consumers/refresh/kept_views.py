"""Views that this process has refreshed before: one statement refreshes them again.

What a whole refresh has found out is kept in its process: the view, its plan's fingerprint, and stamps of everything
that both depend on. While the stamps, the target and the logs are the same, another whole refresh would do nothing, and
one statement finds that. A view whose target is in the tables' database has functions as well (`compiled_view`): the
same statement, CALL gdq.refresh(), also follows few changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import call
from gdq.consumers.refresh.audit import is_auditable
from gdq.consumers.refresh.view_refresh import CalledResult, PlannedView, RefreshPoint, ViewRefresh
from gdq.consumers.views.own_objects import check_own_tables
from gdq.consumers.views.target_rows import TargetRows
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.view.view import ViewInfo

log = logging.getLogger(__name__)

# The position of a target that is as the last refresh left it; NULL for another. NUMBER: of the view.
_POSITION = """
(select p.position
   from gdq_target.position p
   join pg_catalog.pg_class c on c.oid = pg_catalog.to_regclass(%(target_NUMBER)s)
   join pg_catalog.pg_description d
     on d.objoid = c.oid and d.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass and d.objsubid = 0
  where p.view = %(view_NUMBER)s and p.source = %(source_NUMBER)s and d.description = %(comment_NUMBER)s
    and p.plan = pg_catalog.concat_ws('/', %(plan_NUMBER)s::text, pg_catalog.pg_relation_filenode(c.oid)::text))"""
_UNCHANGED = """
select gdq.refresh_unchanged(%(views)s::text[], POSITIONS::text[], %(stamps)s::text[], %(definitions)s::text[],
                             %(audited)s::bool[], %(group)s::text)"""

_CALL, _CALL_GROUP = "call gdq.refresh(%s, false)", "call gdq.refresh_group(%s, false)"

# After two calls that took longer, a whole refresh chooses by the history whether to go on from changes. The first call
# finds the values of subqueries, which the second one has.
_SECONDS_MAX = 1.0


@dataclass(slots=True)
class _Kept:
    """What the last refresh of a view has found out. `comment`: the target's, None for a lake table.

    `compiled`: whether the view has functions that refresh it. `slow`: whether the last of these calls was.
    """

    view: ViewInfo
    planned: PlannedView
    comment: str | None
    compiled: bool = False
    slow: bool = False

    @property
    def target(self) -> dict[str, str | None]:
        """What is compared with the target."""
        view = self.view
        found = {"view": view.view_name, "target": view.target, "source": view.source}
        return found | {"plan": self.planned.plan.fingerprint(), "comment": self.comment}

    @property
    def told(self) -> dict[str, Any]:
        """What the server compares with what it would tell now."""
        planned = self.planned
        found = {"view": self.view.view_name, "stamp": planned.stamp, "definitions": planned.definitions}
        return found | {"audited": is_auditable(planned.plan)}


@dataclass(slots=True)
class KeptViews:
    """The views that the refreshes of this process have found out about.

    `control`: a session in the tables' database. `open_target` gives that in a target's. `at`: as for Refresher.
    """

    control: Connection[Any]
    open_target: Callable[[str | None], Connection[Any]]
    at: Callable[[RefreshPoint], None]
    _kept: dict[str, _Kept] = field(default_factory=dict, init=False)

    def planned(self, name: str) -> PlannedView | None:
        """What the last refresh was told of a view, for a whole one, which keeps anew what it finds."""
        kept = self._kept.pop(name, None)
        return None if kept is None else kept.planned

    def keep(self, work: ViewRefresh, view: ViewInfo) -> None:
        """Keep what a whole refresh of a view has found out. `view`: as view_info() gave it."""
        if work.planned is not None:
            comment = None if work.lake is not None else work.target.comment
            kept = _Kept(view, work.planned, comment)
            kept.compiled = self._compiled(work, kept)
            self._kept[view.view_name] = kept

    def _compiled(self, work: ViewRefresh, kept: _Kept) -> bool:
        """Make the functions of the view, unless it has them; True if a CALL can follow changes of it.

        Its code must be the session's, and so its target.
        """
        view, planned = kept.view, kept.planned
        if view.engine != "postgres" or kept.comment is None or view.elsewhere or view.acts_as is not None:
            return False
        plan, session = planned.plan, self.open_target(None)
        known = [view.view_name, planned.stamp, planned.definitions, plan.fingerprint()]
        changes = call(self.control, "is_compiled", *known)
        if changes is None:
            # they load sqlglot, an extra
            from gdq.consumers.views.compiled_view import CompiledView  # noqa: PLC0415
            from gdq.plan.postgres import PostgresPlan  # noqa: PLC0415

            assert isinstance(plan, PostgresPlan)
            assert isinstance(work.place, TargetRows)
            try:
                with session.transaction():
                    compiled = CompiledView(view, plan, work.place)
                    changes = compiled.store(session, planned.stamp, planned.definitions, auditable=is_auditable(plan))
            except psycopg.Error as error:
                log.info("view %s is not compiled: %s", view.view_name, error)
                return False
        return bool(changes)

    def refreshed(
        self, names: Sequence[str], group: str | None, check: Callable[[ViewInfo], object]
    ) -> list[CalledResult] | None:
        """Refresh views of which nothing has changed, or a view or a stored group with few; None if that takes more.

        `check` is called with each view, and may raise. Writes their histories.
        """
        kept = [self._kept[name] for name in names if name in self._kept]
        if len(kept) < len(names) or any(one.view.group_name not in (None, group) for one in kept):
            return None
        if any(one.comment is None for one in kept):
            return None  # a lake's history is read as a whole
        with suppress(GdqError, psycopg.Error):  # the whole refresh says it, and notes it
            for one in kept:
                check(one.view)
            if len(kept) > 1 or group is not None:
                call(self.control, "check_group", names)
            if all(one.compiled for one in kept) and (group is not None or len(kept) == 1):
                return self._called(names, group)
            return [CalledResult()] * len(kept) if self._is_noted(kept, group) else None
        return None

    def _called(self, names: Sequence[str], group: str | None) -> list[CalledResult] | None:
        """Refresh a view, or all views of a stored group, by their functions."""
        session = self.open_target(None)
        check_own_tables(session, "position", in_source=True)
        started = time.monotonic()
        done: dict[str, CalledResult] = {}
        if group is None:
            row = session.execute(_CALL, names, prepare=True).fetchone()
            if row is not None and row[0] is not None:
                action, _, rows, delta_rows, kind = row
                done[names[0]] = CalledResult(action, kind, rows, delta_rows)
        else:
            _, results = session.execute(_CALL_GROUP, [group], prepare=True).fetchone() or (None, None)
            for one in results or ():
                told = (one[name] for name in ("action", "kind", "rows_changed", "delta_rows"))
                done[one["view_name"]] = CalledResult(*told)
        slow = time.monotonic() - started > _SECONDS_MAX
        for name in names:
            if slow and self._kept[name].slow:
                self._kept.pop(name)
            else:
                self._kept[name].slow = slow
        if any(one.action != "none" for one in done.values()):
            self.at("committed")
            self.at("done")
        return [done[name] for name in names] if done else None

    def _is_noted(self, kept: Sequence[_Kept], group: str | None) -> bool:
        view = kept[0].view
        target = self.open_target(view.target_dsn)
        check_own_tables(target, "position", in_source=not view.elsewhere)
        positions = f"array[{', '.join(_POSITION.replace('NUMBER', str(n)) for n in range(len(kept)))}]"
        told = [one.told for one in kept]
        values: dict[str, Any] = {
            "views": [one["view"] for one in told],
            "stamps": [one["stamp"] for one in told],
            "definitions": [one["definitions"] for one in told],
            "audited": [one["audited"] for one in told],
            "group": group,
        }
        for number, one in enumerate(kept):
            values |= {f"{name}_{number}": value for name, value in one.target.items()}
        if view.elsewhere:
            values["positions"] = _first(target, f"select {positions}", values)
            return bool(_first(self.control, _UNCHANGED.replace("POSITIONS", "%(positions)s"), values))
        return bool(_first(target, _UNCHANGED.replace("POSITIONS", positions), values))


def _first(connection: Connection[Any], query: str, values: Mapping[str, Any]) -> Any:
    """The first value of a prepared statement."""
    row = connection.execute(qualified(query), values, prepare=True).fetchone()
    return None if row is None else row[0]
