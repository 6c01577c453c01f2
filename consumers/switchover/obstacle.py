"""What stands in the way of a switchover, and how to mend it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from gdq.errors import GdqError
from gdq.shown import Shown

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, repr=False)
class Obstacle(Shown):
    """Something that stands in the way of a switchover (error), or that is worth a thought before it (warning).

    `code`: what kind it is, `object`: what it concerns, `cure`: how to mend it, mostly a statement or command.
    """

    severity: Severity
    code: str
    object: str
    problem: str
    cure: str


def error(code: str, thing: str, problem: str, cure: str) -> Obstacle:
    """What stands in the way."""
    return Obstacle("error", code, thing, problem, cure)


def warning(code: str, thing: str, problem: str, cure: str) -> Obstacle:
    """What is worth a thought."""
    return Obstacle("warning", code, thing, problem, cure)


class ObstaclesFound(GdqError):  # noqa: N818 (as in gdq.errors)
    """Something stands in the way of the switchover; nothing was changed."""

    def __init__(self, obstacles: list[Obstacle]) -> None:
        number = sum(one.severity == "error" for one in obstacles)
        super().__init__(
            f"{number} {'obstacle stands' if number == 1 else 'obstacles stand'} in the way of the switchover",
            hint="Mend what is listed, or go on all the same: --accept CODE or --accept CODE:OBJECT.",
        )
        self.obstacles = obstacles


def left(obstacles: Iterable[Obstacle], accepted: Collection[str]) -> list[Obstacle]:
    """The obstacles without the accepted ones, named as CODE or CODE:OBJECT; errors first.

    GdqError for a name in `accepted` that is no code.
    """
    known = {one for name in accepted for one in (name, name.partition(":")[0])}
    if unknown := sorted({name.partition(":")[0] for name in accepted} - CODES):
        raise GdqError(f"{', '.join(unknown)} is no code of an obstacle", hint="gdq switchover --check shows them.")
    found = [one for one in obstacles if one.code not in accepted and f"{one.code}:{one.object}" not in known]
    return sorted(found, key=lambda one: (one.severity, one.code, one.object))


# What may be found.
CODES = frozenset(
    (
        *("not_prepared", "gdq_missing", "gdq_outdated", "event_triggers_missing"),
        *("replica_running", "lag", "conflicts", "dead_letters", "skipped_changes", "consumer_stays"),
        *("table_not_taken", "root_not_taken", "unlogged_table", "table_not_copied", "capture_gap"),
        *("captured_always", "column_not_captured", "table_missing", "table_unlogged_there"),
        *("large_objects", "prepared_transaction", "lacking_rights"),
        *("column_missing", "column_differs", "constraint_missing", "index_missing", "trigger_missing"),
        *("trigger_fires", "sequence_missing", "sequence_differs", "sequence_not_published", "view_missing"),
        *("view_not_filled", "function_missing", "type_missing", "extension_missing", "role_missing", "grant_missing"),
        *("owner_differs", "encoding_differs", "collation_differs", "collation_outdated"),
    )
)
