"""Engine for targets in the tables' own database: computes and writes in one transaction, with the position.

The counts and sums of a GROUP BY are kept in a state table beside the target. Few changes take one statement
(`few_changes`), others temporary tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gdq.consumers.views.computation import Computation
from gdq.consumers.views.difference import Difference
from gdq.consumers.views.engine import EngineEffort
from gdq.consumers.views.few_changes import FewChanges
from gdq.consumers.views.kept_state import KeptState, KeptSums, KeptTop, kept_beside
from gdq.consumers.views.signals import NeedsFull
from gdq.consumers.views.target_rows import TargetRows
from gdq.plan.steps import SignedOutcome


@dataclass(slots=True)
class PostgresEngine:
    """Engine of one refresh of one view, which computes in the target's transaction."""

    computation: Computation
    rows: TargetRows

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Raise NeedsFull for a plan without incremental steps; apply() does all work."""
        plan = self.computation.plan
        if s0 is not None and changed and plan.full and not plan.checked:
            raise NeedsFull(plan.full)

    def effort(self) -> EngineEffort:
        return self.computation.effort()

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:
        """Load the target in full, or bring it from s0 to the held snapshot; returns the rows deleted plus inserted.

        Must come first in its transaction. NeedsFull if the changes are not enough, Diverged if rows to delete are
        missing in the target, NeedsTables if the refresh is to begin again.
        """
        if s0 is not None and not changed:
            if self.computation.task.grouped or self.computation.task.audited:
                self.computation.join()
            return 0
        self.computation.begin()
        if s0 is None:
            return self._load()
        with self.computation.computing():
            few = FewChanges(self.computation, self.rows) if self.computation.task.few else None
            rows = None if few is None else few.apply(changed)
            if rows is None:
                rows = self._write(self._difference(changed))
            self.computation.end()
        return rows

    def clear(self) -> None:
        """As Computation.clear()."""
        self.computation.clear()

    def _write(self, difference: Difference) -> int:
        self.computation.task.tell("writing")
        return self.rows.change(difference)

    def _difference(self, changed: Mapping[str, str]) -> Difference:
        plan = self.computation.plan
        outcome = self.computation.outcome(changed, once=plan.state is None or not plan.state.extremes)
        kept = self._kept
        if kept is None or not isinstance(outcome, SignedOutcome):
            return self.computation.difference_of(outcome)
        return self._add_to_state(kept, outcome.rows)

    def _load(self) -> int:
        """Fill the target with all rows of the view; returns the rows deleted plus inserted."""
        kept = self._kept
        if kept is None:
            return self._write(self.computation.full())
        self.computation.full()
        self.computation.task.tell("computing")
        return self._write(self._state(kept).load(kept.whole()))

    def _add_to_state(self, kept: KeptSums | KeptTop, rows: str) -> Difference:
        """Add signed rows to the state; returns the change of the view's rows."""
        if isinstance(kept, KeptTop):
            return self._state(kept).add(kept.sums(rows), kept.settle())
        after = kept.plan.follow_extremes(self.rows.target.state, rows)
        return self._state(kept).add(kept.sums(rows), after, kept.plan.unnumbered)

    @property
    def _kept(self) -> KeptSums | KeptTop | None:
        return kept_beside(self.computation.plan, self.rows.target.state)

    def _state(self, kept: KeptSums | KeptTop) -> KeptState:
        made = self.computation
        return KeptState(self.rows, made.plan.match, kept, made.temporary)
