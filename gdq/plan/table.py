"""The planner: a view's SQL text and the schema of its table in, a frozen refresh plan out.

A pure function: it knows neither Apache Spark nor a connection. A plan speaks of named relations:

    <table>__delta   the signed changes of the table: its columns and `__gdq_weight`, +1 for an image that came and
                     -1 for one that went; a table's first load is the same relation with weight 1 throughout
    <table>__new     the table itself, as it is at the end of the delta
    <table>__keys    the key values that the delta touched

Expressions of the view are evaluated by PostgreSQL in the statements that read a relation, so a view's rows are
PostgreSQL's own to the last digit; Spark nets and adds what was read. Columns have positional names between the two
(c1, c2, ...), since Spark does not tell "a" from "A".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gdq.errors import PlanError as PlanError  # noqa: PLC0414 (its importers)
from gdq.sql_text import quote

Strategy = Literal["projection-delta", "projection-recompute", "group-delta", "group-recompute"]
Engine = Literal["postgres", "spark"]
Rule = Literal["keys", "bag", "state"]

WEIGHT = "__gdq_weight"


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a captured table. `type` as format_type() prints it.

    `images`: the log holds its old and its new value. `key`: it is part of the table's key. `folded`: its collation
    takes different values for equal.
    """

    name: str
    type: str
    not_null: bool = False
    key: bool = False
    images: bool = True
    folded: bool = False


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A captured table: all its columns in order, and the mode in which they are logged."""

    schema: str
    name: str
    mode: Literal["full", "pk"]
    columns: tuple[TableColumn, ...]

    @property
    def qualified(self) -> str:
        """Schema and name, quoted."""
        return f"{quote(self.schema)}.{quote(self.name)}"

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the key columns, none when the table has no key."""
        return tuple(column.name for column in self.columns if column.key)

    def column(self, name: str) -> TableColumn | None:
        """The column of that name, None when there is none."""
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, slots=True)
class Read:
    """A statement that PostgreSQL runs on one relation, in parts: `relation` stands for what the engine reads.

    `keys` names the columns by which the engine restricts the relation to keys, none when it reads all of it.
    """

    name: str
    select: str
    relation: str
    alias: str
    where: str
    group: str
    keys: tuple[str, ...] = ()

    def render(self, relation: str, keys: str = "") -> str:
        """The statement over `relation`, SQL that may stand in FROM, restricted by the condition `keys`."""
        conditions = " and ".join(f"({part})" for part in (self.where, keys) if part)
        return (
            f"select {self.select} from {relation} as {quote(self.alias)}"
            + (f" where {conditions}" if conditions else "")
            + (f" group by {self.group}" if self.group else "")
        )

    @property
    def sql(self) -> str:
        """The statement with the names of the relations, for people."""
        columns = ", ".join(f"{quote(self.alias)}.{quote(key)}" for key in self.keys)
        keys = f"({columns}) in (table {quote(self.relation.removesuffix('__new') + '__keys')})" if self.keys else ""
        return self.render(quote(self.relation), keys)


@dataclass(frozen=True, slots=True)
class Compute:
    """A statement that Spark runs on the rows of the statement `source`, in Spark's SQL."""

    name: str
    source: str
    sql: str


@dataclass(frozen=True, slots=True)
class StateColumn:
    """A number kept per group: its name between the engines and in the state, and its Spark type."""

    name: str
    spark: str


@dataclass(frozen=True, slots=True)
class MergeSpec:
    """How computed rows get into the target.

    rule keys: rows of the target with a touched key are replaced. rule state: the sums are added to the state kept
    beside the target, and the touched groups are replaced from it. rule bag: exactly as many equal rows go as left.
    `keys` are output columns that identify a row, `nullable` those of them that may hold NULL. `state` holds the
    numbers of a group and `visible` the target's columns as expressions over the state, in column order.
    """

    rule: Rule
    keys: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
    state: tuple[StateColumn, ...] = ()
    visible: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RefreshPlan:
    """How one view is refreshed. `columns` are the names of its columns, `query` the whole view in PostgreSQL's SQL.

    `delta` reads the changes; `compute` is what Spark makes of them: rows for the target, or for the recompute
    strategies the touched keys, by which `rows` then reads the rows from the table. `key_columns` are the columns of
    the table that the touched keys hold. `aggregates` are the names of output columns that PostgreSQL adds up in an
    order of its own, which matters to floats only. `expressions` are all that the view computes row by row, over
    the alias of its table. `reason` says why this strategy.
    """

    strategy: Strategy
    reason: str
    table: str
    columns: tuple[str, ...]
    query: str
    delta: Read
    compute: Compute
    rows: Read | None
    key_columns: tuple[str, ...]
    aggregates: tuple[str, ...]
    expressions: tuple[str, ...]
    merge: MergeSpec

    def as_dict(self) -> dict[str, object]:
        """The plan as plain values that json takes, with the reading statements also printed in one piece."""
        plan = dataclasses.asdict(self)
        plan["statements"] = [{"name": s.name, "engine": e, "sql": s.sql} for e, s in self.statements()]
        return plan

    def statements(self) -> list[tuple[Engine, Read | Compute]]:
        """The statements in the order in which they run, each with the engine that runs it."""
        steps: list[tuple[Engine, Read | Compute]] = [("postgres", self.delta), ("spark", self.compute)]
        if self.rows is not None:
            steps.append(("postgres", self.rows))
        return steps

    def fingerprint(self) -> str:
        """Changes when the plan does: a target that was filled by another plan is filled afresh."""
        text = json.dumps(dataclasses.asdict(self) | {"reason": ""}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [f"strategy: {self.strategy}", f"reason: {self.reason}", f"table: {self.table}"]
        lines += [f"{step.name} ({engine}): {step.sql}" for engine, step in self.statements()]
        keys = f" by {', '.join(self.merge.keys)}" if self.merge.keys else ""
        return "\n".join([*lines, f"merge: {self.merge.rule}{keys}"])


def plan_view(sql: str, tables: Sequence[TableSchema], *, kept: bool = True) -> RefreshPlan:
    """The refresh plan of the view `sql`, one SELECT in PostgreSQL's SQL over one of `tables`.

    `kept`: whether sums can be kept beside the target. A table's name without a schema must mean one of `tables` alone.
    PlanError, whose code names the construct, for what cannot be refreshed from changes. Nothing is written.
    """
    from gdq.plan.group import plan_group  # noqa: PLC0415 (the shapes build on this module)
    from gdq.plan.parse import parse_view  # noqa: PLC0415
    from gdq.plan.projection import plan_projection  # noqa: PLC0415

    view = parse_view(sql, tables)
    return plan_group(view, kept=kept) if view.grouped else plan_projection(view)


def referenced_table(sql: str) -> tuple[str | None, str]:
    """Schema (None when not given) and name of the table in the FROM of the view `sql`. PlanError as plan_view()."""
    from gdq.plan.parse import from_table, parse_select  # noqa: PLC0415

    return from_table(parse_select(sql))
