"""The groups of views that one refresh brings up to the present, in the order of their refreshes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.view.group import group_info
from gdq.view.view import ViewInfo, view_info


@dataclass(frozen=True, slots=True)
class RefreshGroup:
    """The views that one refresh brings up to the present: all views of a stored group, or one view."""

    group_name: str | None
    views: tuple[ViewInfo, ...]

    @property
    def names(self) -> list[str]:
        return [view.view_name for view in self.views]

    @property
    def key(self) -> tuple[str, ...]:
        """The names of the group and its views: adding a view to a group changes its key."""
        return (self.group_name or "", *self.names)

    def __str__(self) -> str:
        return f"view {self.names[0]}" if self.group_name is None else f"group {self.group_name}"


def refresh_groups(
    connection: Connection[Any], names: Sequence[str] = (), groups: Sequence[str] = ()
) -> list[RefreshGroup]:
    """The groups and views to refresh, in order: these groups and the groups of these views; without both, all views.

    A group that reads another's target comes after it (circles are allowed); else the order of the arguments counts,
    or for all views that of their names. psycopg.errors.UndefinedObject for an unknown name.
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
    """The groups, each after those whose targets it reads."""
    listed = list(given)
    views = [view for group in listed for view in group.views]
    names = [name for view in views for name in (*([] if view.lake else [view.target]), *view.tables)]
    query = qualified("select n, pg_catalog.to_regclass(n)::oid from pg_catalog.unnest(%s::text[]) n")
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
