"""The parts of a plan of gdq.plan.delta: its steps, and how the target's rows follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Why a view is loaded in full whose sums cannot be taken back.
NO_NUMBER = "NaN or infinity came into or went from a sum"


@dataclass(frozen=True, slots=True)
class PlannedValue:
    """The value of a subquery over `tables`, which can be kept until the next refresh: `new` is its SELECT.

    `old`: the SELECT at the old state, if tables changed; then the value is the extreme of the kind `extreme`, and the
    relation `rows` has the signed rows c1, w of what it is over. `shown`: the column of the view that equals it in
    every row; empty for none.
    """

    new: str
    tables: frozenset[str]
    old: str = ""
    extreme: Literal["min", "max", ""] = ""
    rows: str = ""
    shown: str = ""


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One statement. kind delta: makes the relation `name`; keys: collects the array `name`; check: tests a condition.

    `reason`: why the view is loaded in full if the check is true. `instead`: SQL of the same keys, which is run if the
    server estimates that it costs less. `value`: of a delta, the value that is its one row; of a check, the value that
    it tests for a change.
    """

    kind: Literal["delta", "keys", "check"]
    name: str
    sql: str
    reason: str = ""
    instead: str = ""
    value: PlannedValue | None = None


@dataclass(frozen=True, slots=True)
class SignedOutcome:
    """The view's rows change by the signed rows of the relation `rows`."""

    rows: str


@dataclass(frozen=True, slots=True)
class ReplaceOutcome:
    """All rows of the view with these keys, (column, name of the keys) each, are replaced by the rows of `sql`."""

    keys: tuple[tuple[str, str], ...]
    sql: str


@dataclass(frozen=True, slots=True)
class RecomputeOutcome:
    """The view is loaded in full, for this reason, if the relation `rows` is not empty; else it does not change."""

    rows: str
    reason: str
