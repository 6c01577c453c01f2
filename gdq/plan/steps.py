"""What a plan of gdq.plan.delta consists of: its steps, and how the rows of the target follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Step:
    """One statement. kind delta: makes the relation `name`; keys: collects the array `name`; check: true ends the plan.

    `reason`: why a check that is true means a full load.
    """

    kind: Literal["delta", "keys", "check"]
    name: str
    sql: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Signed:
    """The view's rows change by those of the relation `rows`, each as often as its weight says."""

    rows: str


@dataclass(frozen=True, slots=True)
class Replace:
    """All rows of the view with these keys, (column, name of the keys) each, give way to what `sql` selects."""

    keys: tuple[tuple[str, str], ...]
    sql: str


@dataclass(frozen=True, slots=True)
class Recompute:
    """The view is loaded in full, for this reason, when the relation `rows` holds any; else it does not change."""

    rows: str
    reason: str
