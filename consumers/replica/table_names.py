"""Names of a replica's tables in the target, which follow those of the source.

Tables are known by their oids in the source, so it does not matter by way of which names one has come to its present
one: whenever a batch tells of a rename, and before tables are copied, all of them get the present names at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from gdq.call import scalar
from gdq.consumers.replica.source_tables import SourceTable
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table_ddl import rename_table
from gdq.errors import GdqError


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
    with state.connection.transaction():
        # names that change hands: by way of names that no other table has
        aside = {before: _aside(state, before, place) for place, before in enumerate(passed)}
        for before, between in aside.items():
            rename_table(state, before, between)
        for before, after in renamed.items():
            rename_table(state, aside.get(before, before), after)


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
