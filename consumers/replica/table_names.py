"""Names of a replica's tables in the target, which follow those of the source.

Tables are known by their oids in the source, so it does not matter by way of which names one has come to its present
one: whenever a batch tells of a rename, and before tables are copied, all of them get the present names at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from gdq.call import scalar
from gdq.consumers.replica.source_tables import SourceTable
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table_ddl import is_missing, rename_in_target, rename_table
from gdq.errors import GdqError
from gdq.sql_text import raw


def follow_names(state: ReplicaState, taken: Mapping[int, SourceTable]) -> None:
    """Give the target's tables the names that the source has for them now, all in one transaction.

    `taken`: the tables that the replica takes, by their oids. A name that the target has for a table which is gone in
    the source stays with that: a later batch tells of it, or it was told already.
    """
    renamed = _renamed(state, taken)
    passed = [before for before in renamed if before in renamed.values()]
    if passed and state.two_ways:
        raise GdqError(
            f"{', '.join(passed)} have other names in the source, which change hands, and the target replicates back: "
            "it may have them already",
            hint="Give them back the names of before. Then rename one at a time, to names that are free, and let both "
            "replicas arrive after each.",
        )
    strangers = _strangers(state, taken, renamed)
    with state.connection.transaction():
        # names that change hands: by way of names that no other table has
        aside = {before: _aside(state, before, place) for place, before in enumerate([*passed, *strangers])}
        for before in passed:
            rename_table(state, before, aside[before])
        for before in strangers:
            rename_in_target(state.connection, before, aside[before])
        for before, after in renamed.items():
            rename_table(state, aside.get(before, before), after)
        for before, after in strangers.items():
            rename_in_target(state.connection, aside[before], after)


def _strangers(state: ReplicaState, taken: Mapping[int, SourceTable], renamed: Mapping[str, str]) -> dict[str, str]:
    """Empty tables of the target in whose place others are to come, and the names that these leave.

    Such a name is that of a table without a copy by now: it has changed hands in the source, and the target's table was
    made for it beforehand.
    """
    known = state.names.keys() | state.begun_names.keys()
    awaited = {table.table_name for relid, table in taken.items() if table.is_there and relid not in known}
    found = {}
    target = state.connection
    for left in (renamed.keys() - renamed.values()) & awaited:
        end = renamed[left]
        while end in renamed:
            end = renamed[end]
        if state.known(end) is not None or is_missing(target, left) or is_missing(target, end):
            continue
        if not target.execute(raw(f"select from {end} limit 1")).rowcount:
            found[end] = left
    return found


def require_name(state: ReplicaState, relid: int, taken: Mapping[int, SourceTable]) -> None:
    """GdqError if a table cannot get its name, since the target keeps another one under it that the source has dropped.

    One of which a later batch will tell that is no error.
    """
    name, now = state.names[relid], taken.get(relid)
    if now is not None and now.table_name != name and (holder := state.known(now.table_name)) and holder.relid is None:
        rename_table(state, name, now.table_name)


def _renamed(state: ReplicaState, taken: Mapping[int, SourceTable]) -> dict[str, str]:
    """The tables that get other names, by those that the target has for them."""
    known = state.names | state.begun_names
    living = {taken[relid].table_name for relid in known.keys() & taken.keys() if taken[relid].is_there}
    renamed = {
        before: taken[relid].table_name
        for relid, before in known.items()
        if relid in taken
        and taken[relid].table_name != before
        and (taken[relid].is_there or taken[relid].table_name not in living)
    }
    while kept := [
        before for before, after in renamed.items() if state.known(after) is not None and after not in renamed
    ]:
        for before in kept:
            del renamed[before]
    return renamed


def _aside(state: ReplicaState, table: str, place: int) -> str:
    schema = scalar(state.connection, "select quote_ident((parse_ident(%s))[1])", table)
    return f'{schema}."!gdq_renamed_{place}"'
