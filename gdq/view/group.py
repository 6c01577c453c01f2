"""Groups of views that are refreshed at one snapshot, their targets moved in one transaction.

The functions take a connection to the source and leave the transaction to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection

from gdq.call import call, rows
from gdq.errors import GdqError
from gdq.view.view import ViewInfo, view_info


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One group with its views, and when and how its last refresh ended."""

    group_name: str
    queue_name: str | None
    views: list[str]
    created_at: datetime
    last_refresh: datetime | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Unit:
    """What is refreshed at once: all views of a stored group, or one view."""

    group_name: str | None
    views: tuple[ViewInfo, ...]

    @property
    def names(self) -> list[str]:
        """The names of the views."""
        return [view.view_name for view in self.views]

    @property
    def key(self) -> tuple[str, ...]:
        """Tells it from others, and from the same group with other views."""
        return (self.group_name or "", *self.names)

    def __str__(self) -> str:
        return f"view {self.names[0]}" if self.group_name is None else f"group {self.group_name}"


def create_group(connection: Connection[Any], name: str, views: Sequence[str]) -> bool:
    """Store a group of views; False when the very same one existed.

    psycopg.errors.FeatureNotSupported for views that do not go together, DuplicateObject for one that is in another
    group, UndefinedObject for one that is not there.
    """
    return bool(call(connection, "create_group", name, list(views)))


def alter_group(connection: Connection[Any], name: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> bool:
    """Put views into a group, take others out; False when nothing changed. Errors as for create_group()."""
    return bool(call(connection, "alter_group", name, list(add), list(remove)))


def drop_group(connection: Connection[Any], name: str) -> bool:
    """Forget a group, not its views; False when there was none."""
    return bool(call(connection, "drop_group", name))


def group_info(connection: Connection[Any], name: str | None = None) -> list[GroupInfo]:
    """All groups, or one. psycopg.errors.UndefinedObject when there is no such group."""
    return rows(connection, GroupInfo, "select * from gdq.group_info(%s)", name)


def units(connection: Connection[Any], names: Sequence[str] = (), groups: Sequence[str] = ()) -> list[Unit]:
    """What to refresh, in order: these groups and the named views, with the others of their groups; or all views.

    A unit that reads the target of another comes after that; else as views are named, or in the order of their names.
    Units that read each other's targets come too. psycopg.errors.UndefinedObject for an unknown name.
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
    found: dict[tuple[str | None, str], Unit] = {}
    for view in wanted:
        if view.group_name is None:
            found[None, view.view_name] = Unit(None, (view,))
        else:
            found[view.group_name, ""] = Unit(view.group_name, tuple(members[view.group_name]))
    return _in_order(connection, found.values())


def _in_order(connection: Connection[Any], given: Iterable[Unit]) -> list[Unit]:
    """Units so that one over the target of another comes after that."""
    listed = list(given)
    views = [view for unit in listed for view in unit.views]
    names = [name for view in views for name in (*([] if view.lake else [view.target]), *view.tables)]
    query = "select n, pg_catalog.to_regclass(n)::oid from pg_catalog.unnest(%s::text[]) n"
    oids = dict(connection.execute(query, [names]).fetchall())
    filled = {
        oids[view.target]: number
        for number, unit in enumerate(listed)
        for view in unit.views
        if not view.elsewhere and oids[view.target] is not None
    }
    ordered: list[Unit] = []
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
