"""The body of the function that adds the changes after a snapshot to a view's target.

    netting      the log rows of each table, if there are few, become one array for each column
    a branch     for each set of changed tables: the steps of its plan, with the keys in variables, then one statement
                 that applies the signed rows, or replaces the rows of the keys
    gdq_kept     the values of subqueries by a hash of their text, as they were kept and as they are now

It ends with the numbers of rows, or with an error whose message is the reason for a full load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import psycopg
from psycopg import Connection

from gdq.consumers.views.change_source import log_columns_of
from gdq.consumers.views.compiled_delta import CompiledDelta
from gdq.consumers.views.compiled_steps import CompiledSteps, NotCompiledError, raise_statement
from gdq.consumers.views.few_statement import FEW, ROWS_MAX, Netted
from gdq.consumers.views.target_rows import TargetRows
from gdq.errors import PlanError
from gdq.plan.postgres import PostgresPlan
from gdq.plan.steps import NO_NUMBER, PlannedValue
from gdq.view.view import ViewInfo

# As many changes as the plans for thousands serve; more are planned for how many they are.
_MANY = 10_000

# A branch for each set of changed tables, the small sets first, up to so many; and one for all tables.
_SETS_MAX = 40

_ARGUMENTS = {"gdq_xmax": "bigint", "gdq_running": "bigint[]", "gdq_most": "bigint", "gdq_rows_max": "bigint"}

_LATER = "select segment::bigint, rows_sql from gdq.later_rows_sql(%s, %s::regclass)"


@dataclass(frozen=True, slots=True)
class ChangeStatement:
    """One statement that follows changes of a table: what it does, its text, and the types of variables in it."""

    table: str
    task: str
    sql: str
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CompiledChanges:
    """The changes of a view as a function. `connection`: a session that describes queries, and writes nothing."""

    view: ViewInfo
    plan: PostgresPlan
    rows: TargetRows
    connection: Connection[Any]

    def body(self, read: str) -> str:
        """The body; empty for a view that is loaded in full after any change.

        `read`: expression of the rows that the session has read.
        """
        deltas = self._deltas()
        some = [delta.netted for delta in deltas]
        sets = [chosen for size in range(1, len(some) + 1) for chosen in combinations(some, size)]
        if len(sets) > _SETS_MAX:
            sets = [*sets[: _SETS_MAX - 1], tuple(some)]
        branches = [self._branch(chosen) for chosen in sets]
        if not any(branch.applies for branch in branches):
            return ""
        values = {key: value for branch in branches for key, value in branch.values.items()}
        texts = [branch.forgotten(values) + branch.text for branch in branches]
        masks = [_mask(some, chosen) for chosen in sets]
        tested = [f"if gdq_changed = {mask} then{text}" for mask, text in zip(masks, texts, strict=True)]
        written = "\n    els".join(tested)
        if len(sets) < 2 ** len(some) - 1:
            # the branch for changes of all tables serves any of them
            written += f"\n    else{texts[-1]}"
        return self._body(read, deltas, written)

    def statements(self) -> list[ChangeStatement]:
        """The statements that follow changes of one table, for each of them, as the function runs them."""
        listed = []
        for delta in self._deltas():
            branch = self._branch([delta.netted])
            known = {**_ARGUMENTS, **{name: f"{kind}[]" for name, kind in delta.variables}, **branch.variables}
            steps = [("net the changes", delta.select), *branch.statements]
            listed += [ChangeStatement(delta.table.name, task, sql, known) for task, sql in steps if branch.applies]
        return listed

    def _deltas(self) -> list[CompiledDelta]:
        """The changes of all tables; none for a view that is loaded in full after any change."""
        if self.plan.full and not self.plan.checked:
            return []
        try:
            with self.connection.transaction():
                deltas = [self._delta(number) for number in range(1, len(self.plan.tables) + 1)]
        except psycopg.errors.ObjectNotInPrerequisiteState:
            return []  # the log still has rows of a version with other types
        logged = "pg_temp" not in self.plan.query and all(delta.is_logged for delta in deltas)
        return deltas if logged else []

    def _body(self, read: str, deltas: Sequence[CompiledDelta], few: str) -> str:
        """The body with these branches, and once more with plans for thousands of changes."""
        many = few
        for one in (delta.netted for delta in deltas):
            many = many.replace(one.select(one.arrays), one.select(one.arrays, many=True))
        declared = "".join(f"\n  {name} {kind}[];" for delta in deltas for name, kind in delta.variables)
        return f"""
#variable_conflict use_column
declare
  gdq_seen bigint;
  gdq_all bigint := 0;
  gdq_one bigint := 1;
  gdq_net bigint;
  gdq_small boolean;
  gdq_changed bigint := 0;
  gdq_netted bigint := 0;
  gdq_expected bigint := 0;
  gdq_deleted bigint := 0;
  gdq_inserted bigint := 0;
  gdq_refused boolean := false;
  gdq_many boolean;
  gdq_rows_max bigint := {ROWS_MAX};{declared}
begin
  gdq_kind := 'none';
  gdq_kept := coalesce(gdq_kept, '{{}}');
  gdq_read := - ({read});{"".join(delta.netting(1 << bit) for bit, delta in enumerate(deltas))}
  perform pg_catalog.set_config('enable_seqscan', 'on', true);
  if gdq_all > gdq_few then
    gdq_rows_max := gdq_most * {ROWS_MAX // FEW};
  end if;
  if gdq_changed = 0 then
    gdq_many := false;
  elsif gdq_all between gdq_few + 1 and {_MANY} and gdq_few > 0 then
    {many}
    end if;
  else
    if gdq_all > gdq_few then
      -- the planner sees how many changes there are
      perform pg_catalog.set_config('plan_cache_mode', 'force_custom_plan', true);
    end if;
    {few}
    end if;
  end if;
  -- NULL: no branch has followed the changes
  if gdq_many is distinct from false then
    raise exception 'the changes take more than one statement'
      using errcode = case when gdq_all > gdq_few then 'raise_exception' else 'program_limit_exceeded' end;
  elsif gdq_refused then
    {raise_statement(NO_NUMBER)}
  elsif gdq_deleted <> gdq_expected then
    raise exception 'the target lacks rows that went';
  end if;
  gdq_rows := gdq_deleted + gdq_inserted;
  gdq_delta := gdq_netted;
  gdq_read := gdq_read + ({read});
end"""

    def _branch(self, chosen: Sequence[Netted]) -> _Branch:
        """The branch for changes of these tables; one that raises the reason if they take a full load."""
        changed = frozenset(one.table.name for one in chosen)
        try:
            steps = CompiledSteps(
                self.view, self.plan, self.rows, self.connection, chosen, self.plan.plan_changes(changed, local=True)
            )
            return _Branch(changed, steps.text(), steps.values, steps.statements, steps.variables)
        except (PlanError, NotCompiledError) as error:
            return _Branch(changed, f"\n    {raise_statement(str(error))}", {}, [], {}, applies=False)

    def _delta(self, number: int) -> CompiledDelta:
        """The changes of the table with this number in the plan."""
        table, view = self.plan.tables[number - 1], self.view
        names = [schema.qualified for schema in self.plan.schemas]
        name = view.tables[names.index(table.name)]
        parts = dict(self.connection.execute(_LATER, [view.queue_name, name]).fetchall())
        found = log_columns_of(self.connection, view.queue_name, [name])[name]
        logged = tuple(column for column in found if column.name in table.logged)
        return CompiledDelta(number, table, logged, parts)


@dataclass(frozen=True, slots=True)
class _Branch:
    """The statements for one set of changed tables. `values`: what they keep, by the hash of its text.

    `statements`: the same with what each does; `variables`: the types of what they read. `applies`: they follow the
    changes, and do not only refuse them.
    """

    changed: frozenset[str]
    text: str
    values: Mapping[str, PlannedValue]
    statements: Sequence[tuple[str, str]]
    variables: Mapping[str, str]
    applies: bool = True

    def forgotten(self, known: Mapping[str, PlannedValue]) -> str:
        """The statement that forgets those of the known values that the changes may have changed."""
        lost = [key for key, value in known.items() if value.tables & self.changed and key not in self.values]
        return f"\n    gdq_kept := gdq_kept - '{{{','.join(lost)}}}'::text[];" if lost else ""


def _mask(all_of: Sequence[Netted], chosen: Sequence[Netted]) -> int:
    """The bits of the chosen tables."""
    return sum(1 << bit for bit, one in enumerate(all_of) if one in chosen)
