"""The plan of the engine spark for views that Spark does not join itself: the server finds keys, tasks compute rows.

It reuses the plan of the engine postgres. The driver's session in the source nets the changes and finds the keys; each
of Spark's tasks runs the view's statement for a share of the keys, at the refresh's snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from gdq.errors import PlanError
from gdq.plan.postgres import PostgresPlan, plan_postgres
from gdq.plan.steps import ReplaceOutcome
from gdq.plan.table import TableSchema
from gdq.plan.whitelist import UNREAD, QueryReading


@dataclass(frozen=True, slots=True)
class SparkKeyPlan(PostgresPlan):
    """How one view is refreshed by tasks that run its statement by key. `refused`: why Spark does not join it."""

    refused: str = ""

    @property
    def divided_by(self) -> Sequence[str]:
        """Columns of the view that divide its rows into parts that can be computed apart; may be empty."""
        if self.full:
            return ()
        if self.state is not None:
            return self.state.group_columns
        for names in [[table.name for table in self.tables], *([table.name] for table in self.tables)]:
            try:
                outcome = self.plan_changes(names).outcome
            except PlanError:
                continue
            if isinstance(outcome, ReplaceOutcome):
                return [column for column, _ in outcome.keys]
        return ()

    def as_dict(self) -> dict[str, object]:
        """The plan as plain values for JSON."""
        plan = PostgresPlan.as_dict(self)
        return plan | {"engine": "spark", "way": "keys", "why": self.refused}

    def __str__(self) -> str:
        way = "way: keys; PostgreSQL finds the keys that changed, tasks of Spark run the view's statement for them"
        return "\n".join([way, f"why not joined by Spark: {self.refused}", PostgresPlan.__str__(self)])


def plan_spark_keys(
    canonical: str,
    tables: Sequence[TableSchema],
    refused: str,
    *,
    elsewhere: bool = False,
    reading: QueryReading = UNREAD,
) -> SparkKeyPlan:
    """The plan of a view by its canonical SQL. PlanError as plan_postgres()."""
    plan = plan_postgres(canonical, tables, elsewhere=elsewhere, tops=False, reading=reading)
    return SparkKeyPlan(**{field.name: getattr(plan, field.name) for field in fields(plan)}, refused=refused)
