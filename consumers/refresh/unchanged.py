"""Views of which nothing has changed: one statement finds that out, and is their refresh.

What a whole refresh has found out is kept in its process: the view, its plan's fingerprint, and stamps of everything
that both depend on. While the stamps, the target and the logs are the same, another whole refresh would do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import call
from gdq.consumers.refresh.audit import is_auditable
from gdq.consumers.refresh.view_refresh import PlannedView, ViewRefresh
from gdq.consumers.views.own_objects import check_own_tables
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.view.view import ViewInfo

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


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the last refresh of a view has found out. `comment`: the target's, None for a lake table."""

    view: ViewInfo
    planned: PlannedView
    comment: str | None

    @property
    def target(self) -> dict[str, str | None]:
        """What is compared with the target."""
        view = self.view
        found = {"view": view.view_name, "target": view.target, "source": view.source}
        return found | {"plan": self.planned.plan.fingerprint(), "comment": self.comment}


@dataclass(slots=True)
class KeptViews:
    """The views that the refreshes of this process have found out about.

    `control`: a session in the tables' database. `open_target` gives that in a target's.
    """

    control: Connection[Any]
    open_target: Callable[[str | None], Connection[Any]]
    _kept: dict[str, _Kept] = field(default_factory=dict, init=False)

    def planned(self, name: str) -> PlannedView | None:
        """What the last refresh was told of a view, for a whole one, which keeps anew what it finds."""
        kept = self._kept.pop(name, None)
        return None if kept is None else kept.planned

    def keep(self, work: ViewRefresh, view: ViewInfo) -> None:
        """Keep what a whole refresh of a view has found out. `view`: as view_info() gave it."""
        if work.planned is not None:
            comment = None if work.lake is not None else work.target.comment
            self._kept[view.view_name] = _Kept(view, work.planned, comment)

    def refreshed(self, names: Sequence[str], group: str | None, check: Callable[[ViewInfo], object]) -> bool:
        """Refresh views of which nothing has changed, and note it in their histories; False if that takes more.

        `check` is called with each view, and may raise.
        """
        kept = [self._kept[name] for name in names if name in self._kept]
        if len(kept) < len(names) or any(one.view.group_name not in (None, group) for one in kept):
            return False
        if any(one.comment is None for one in kept):
            return False  # a lake's history is read as a whole
        with suppress(GdqError, psycopg.Error):  # the whole refresh says it, and notes it
            for one in kept:
                check(one.view)
            if group is not None or len(kept) > 1:
                call(self.control, "check_group", names)
            return self._is_noted(kept, group)
        return False

    def _is_noted(self, kept: Sequence[_Kept], group: str | None) -> bool:
        view = kept[0].view
        target = self.open_target(view.target_dsn)
        check_own_tables(target, "position", in_source=not view.elsewhere)
        positions = f"array[{', '.join(_POSITION.replace('NUMBER', str(n)) for n in range(len(kept)))}]"
        values: dict[str, Any] = {
            "views": [one.view.view_name for one in kept],
            "stamps": [one.planned.stamp for one in kept],
            "definitions": [one.planned.definitions for one in kept],
            "audited": [is_auditable(one.planned.plan) for one in kept],
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
