"""The body of the function that adds the changes after a snapshot to a view's target.

    netting      the log rows of each table, if there are few, become one array for each column
    a branch     for each set of changed tables: the steps of its plan, with the keys in variables, then one statement
                 that applies the signed rows, or replaces the rows of the keys
    gdq_kept     the values of subqueries by a hash of their text, as they were kept and as they are now

It ends with the numbers of rows, or with an error whose message is the reason for a full load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import md5
from itertools import combinations
from typing import Any

import psycopg
from psycopg import Connection

from gdq.consumers.views.change_source import LoggedRows, log_columns_of
from gdq.consumers.views.compiled_delta import CompiledDelta
from gdq.consumers.views.computation import KEYS_BYTES_MAX, KEYS_MAX
from gdq.consumers.views.few_statement import FEW, ROWS_MAX, FewStatement, Netted
from gdq.consumers.views.netting import as_part, old_rows_sql, with_parts
from gdq.consumers.views.target_rows import TargetRows
from gdq.errors import PlanError
from gdq.owner_sql import OwnerSql
from gdq.plan.extreme import extreme_after, net_values_sql
from gdq.plan.postgres import ChangePlan, PostgresPlan
from gdq.plan.steps import PlannedValue, PlanStep, RecomputeOutcome, ReplaceOutcome
from gdq.qualified_sql import qualified
from gdq.sql_text import is_not_null, is_null, literal, quote
from gdq.view.table_schema import apply_view_settings, describe_query
from gdq.view.view import ViewInfo

# A branch for each set of changed tables, the small sets first, up to so many; and one for all tables.
_SETS_MAX = 40

_KEYS, _VARIABLE = re.compile(r"\bgdq_keys_\d+\b"), re.compile(r"\bgdq_(?:keys|null|value)_\d+(?:_old)?\b")

_ARGUMENTS = {"gdq_xmax": "bigint", "gdq_running": "bigint[]", "gdq_most": "bigint", "gdq_rows_max": "bigint"}

_LATER = "select rows_sql, segments::bigint[] from gdq.later_rows_sql(%s, %s::regclass)"

# Names of types, since format_type's character reads as char(1).
_TYPE = qualified("""
select format('%%I.%%I', n.nspname, t.typname),
       coalesce((select format('%%I.%%I', m.nspname, a.typname)
                   from pg_catalog.pg_type a join pg_catalog.pg_namespace m on m.oid = a.typnamespace
                  where a.oid = t.typarray and t.typcategory <> 'A' and t.typcategory <> 'P'), '')
  from pg_catalog.pg_type t join pg_catalog.pg_namespace n on n.oid = t.typnamespace
 where t.oid = %s""")


class _NotCompiledError(Exception):
    """No function can add these changes."""


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
        written = "".join(f"\n  elsif gdq_changed = {mask} then{text}" for mask, text in zip(masks, texts, strict=True))
        if len(sets) < 2 ** len(some) - 1:
            # the branch for changes of all tables serves any of them
            written += f"\n  else{texts[-1]}"
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

    def _body(self, read: str, deltas: Sequence[CompiledDelta], branches: str) -> str:
        declared = "".join(f"\n  {name} {kind}[];" for delta in deltas for name, kind in delta.variables)
        return f"""
#variable_conflict use_column
declare
  gdq_seen bigint;
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
  if gdq_most > {FEW} then
    -- the planner sees how many changes there are
    perform pg_catalog.set_config('plan_cache_mode', 'force_custom_plan', true);
    gdq_rows_max := gdq_most * {ROWS_MAX // FEW};
  end if;
  if gdq_changed = 0 then
    gdq_many := false;{branches}
  end if;
  -- NULL: no branch has followed the changes
  if gdq_many is distinct from false then
    raise exception 'the changes take more than one statement';
  elsif gdq_refused then
    raise exception 'NaN or infinity came into or went from a sum';
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
            steps = _Steps(self, chosen, self.plan.plan_changes(changed, local=True))
            return _Branch(changed, steps.text(), steps.values, steps.statements, steps.variables)
        except (PlanError, _NotCompiledError) as error:
            return _Branch(changed, f"\n    {_raise(str(error))}", {}, [], {}, applies=False)

    def _delta(self, number: int) -> CompiledDelta:
        """The changes of the table with this number in the plan."""
        table, view = self.plan.tables[number - 1], self.view
        names = [schema.qualified for schema in self.plan.schemas]
        name = view.tables[names.index(table.name)]
        select, segments = self.connection.execute(_LATER, [view.queue_name, name]).fetchone() or ("", [])
        found = log_columns_of(self.connection, view.queue_name, [name])[name]
        logged = tuple(column for column in found if column.name in table.logged)
        return CompiledDelta(number, table, LoggedRows(str(select), logged), segments)


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


@dataclass(slots=True)
class _Steps:
    """The steps of a plan as a block of PL/pgSQL, in which the keys of a step are variables of its name."""

    of: CompiledChanges
    chosen: Sequence[Netted]
    changes: ChangePlan
    _parts: dict[str, str] = field(default_factory=dict, init=False)
    variables: dict[str, str] = field(default_factory=dict, init=False)
    statements: list[tuple[str, str]] = field(default_factory=list, init=False)
    values: dict[str, PlannedValue] = field(default_factory=dict, init=False)

    def text(self) -> str:
        self._parts = {one.name: one.select(one.arrays) for one in self.chosen}
        statements, by_key = "", False
        read = " ".join(step.sql for step in self.changes.steps)
        for one in self.chosen:
            names = f"gdq_old_{one.number}", f"gdq_any_{one.number}"
            if any(name in read for name in names):
                by_key = True
                self._parts |= dict(zip(names, old_rows_sql(one.table, one.name), strict=True))
        for step in self.changes.steps:
            statements += self._taken(step)
        statements += self._applied()
        outcome = self.changes.outcome
        if outcome is not None and not isinstance(outcome, RecomputeOutcome):
            by_key = by_key or isinstance(outcome, ReplaceOutcome)
            statements += f"\n      gdq_kind := '{'by-key' if by_key else 'incremental'}';"
        declared = "".join(f"\n      {name} {kind};" for name, kind in self.variables.items())
        head = f"\n    declare{declared}" if declared else ""
        return f"{head}\n    begin{statements}\n    end;"

    def _taken(self, step: PlanStep) -> str:
        """The statements of a step. A relation is a part of the statements that read it."""
        if step.kind == "keys":
            return self._collected(step)
        if step.kind == "check":
            if step.value is not None:
                return ""  # the step of the value has compared it
            return _raise_if(self._noted("check", self._read(step.sql)), step.reason)
        self._parts[as_part(step.name)] = as_part(step.sql)
        return "" if step.value is None else self._valued(step, step.value)

    def _valued(self, step: PlanStep, value: PlannedValue) -> str:
        """Statements that take a value from those that are kept, or compute it, and keep it."""
        name = as_part(step.name).replace("rows", "value")
        key, kind = md5(value.new.encode(), usedforsecurity=False).hexdigest(), self._type(f"select ({value.new})")[0]
        self.values[key] = value
        self.variables[name] = kind
        kept = f"(gdq_kept ->> '{key}')::{kind}"
        if not value.old:
            read = self._noted("find a value", self._read(f"select ({value.new})"))
            taken, anew = f"{name} := {kept};", f"{read} into {name};"
            compared = ""
        else:
            before = f"{name}_old"
            self.variables[before] = kind
            net = {"gdq_net": net_values_sql(as_part(value.rows), "c1")}
            after = f"select {extreme_after(value.extreme, before, 'gdq_net', value.new)}"
            followed = self._noted("follow a value", with_parts(as_part(after), self._parts | net))
            read = self._noted("find a value", self._read(f"select ({value.new}), ({value.old})"))
            taken = f"{before} := {kept};\n        {followed} into {name};"
            anew = f"{read} into {name}, {before};"
            reason = _raise("the value of a subquery changed [subquery-value]")
            compared = f"\n      if {name}::text is distinct from {before}::text then\n        {reason}\n      end if;"
        self._parts[as_part(step.name)] = f"select {name} as c1, 1 as w"
        return f"""
      if gdq_kept ? '{key}' then
        {taken}
      else
        {anew}
      end if;{compared}
      gdq_kept := gdq_kept || pg_catalog.jsonb_build_object('{key}', {name}::text);"""

    def _noted(self, task: str, statement: str) -> str:
        self.statements.append((task, statement))
        return statement

    def _read(self, select: str) -> str:
        """A SELECT of the plan with the parts that it reads."""
        return with_parts(as_part(select), self._parts)

    def _collected(self, step: PlanStep) -> str:
        """Statements that collect a step's keys. Many of them are seen by the planner."""
        name = step.name
        kind = self._type(step.sql)[1]
        if not kind:
            raise _NotCompiledError("a key is an array")
        self.variables |= {name: kind, name.replace("keys", "null"): "boolean"}
        collected = self._into(name, step.sql)
        if step.instead:
            # the first looks up each key that was collected before, the other reads all
            few = f"pg_catalog.cardinality({_KEYS.findall(step.sql)[0]}) <= {self._worth(step)}"
            collected = f"\n      if {few} then{collected}\n      else{self._into(name, step.instead)}\n      end if;"
        return f"""{collected}
      if pg_catalog.cardinality({name}) > {KEYS_MAX} then
        {_raise(f"more than {KEYS_MAX} keys changed")}
      elsif pg_catalog.pg_column_size({name}) > {KEYS_BYTES_MAX} then
        {_raise(f"the keys that changed take more than {KEYS_BYTES_MAX} bytes")}
      elsif pg_catalog.cardinality({name}) > {FEW} then
        perform pg_catalog.set_config('plan_cache_mode', 'force_custom_plan', true);
      end if;"""

    def _into(self, name: str, keys: str) -> str:
        """The statement that fills the variables of a step."""
        listed = f"coalesce(pg_catalog.array_agg(k) filter (where {is_not_null('k')}), '{{}}')"
        select = (
            f"select {listed}, coalesce(pg_catalog.bool_or({is_null('k')}), false) "
            f"from (select distinct k from ({keys}) as q(k) limit {KEYS_MAX + 1}) as q"
        )
        read = self._noted("collect keys", self._read(select))
        return f"\n      {read} into {name}, {name.replace('keys', 'null')};"

    def _worth(self, step: PlanStep) -> int:
        """The most keys that are looked up.

        The server takes an unknown array for one of ten, and counts the start of scans, which is not paid for each.
        """
        return max(1, int(20 * self._cost(step.instead) / self._cost(step.sql)))

    def _applied(self) -> str:
        """Statements that follow the outcome."""
        of, outcome = self.of, self.changes.outcome
        if outcome is None:
            return "\n      gdq_many := false;"
        if isinstance(outcome, RecomputeOutcome):
            rows = self._noted("check", self._read(f"select exists (select from {outcome.rows})"))
            return f"{_raise_if(rows, outcome.reason)}\n      gdq_many := false;"
        if isinstance(outcome, ReplaceOutcome):
            table, names = of.rows.target.table, ", ".join(quote(column.name) for column in of.rows.types)
            where = " and ".join(_among(quote(column), name) for column, name in outcome.keys)
            rows = self._read(f"select * from ({outcome.sql}) as r({names})")
            delete = self._noted("delete the rows of the keys", f"delete from {table} where {where}")
            insert = self._noted("insert the rows of the keys", f"insert into {table} ({of.rows.columns}) {rows}")
            return f"""
      {delete};
      get diagnostics gdq_deleted = row_count;
      gdq_expected := gdq_deleted;
      gdq_many := false;
      {insert};
      get diagnostics gdq_inserted = row_count;"""
        statement = FewStatement(of.plan, of.rows)
        written = self._noted("change the target", statement.applied(self._parts, outcome, "gdq_rows_max"))
        cut = f"\n      {self._noted('cut the state', statement.cut)};" if statement.cut else ""
        return f"\n      {written}\n        into gdq_expected, gdq_deleted, gdq_inserted, gdq_refused, gdq_many;{cut}"

    def _described(self, select: str) -> str:
        """A SELECT of the plan for a session that has no variables; the planner knows as little of their values."""
        parts = {one.name: one.select(["null"] * len(one.arrays)) for one in self.chosen}
        found = with_parts(as_part(select), self._parts | parts)
        return _VARIABLE.sub(
            lambda name: f"((select null::{self.variables[name[0]]})::{self.variables[name[0]]})", found
        )

    def _type(self, select: str) -> tuple[str, str]:
        """The type of the one column of a SELECT, and that of arrays of it; the last is empty if it is one itself."""
        connection = self.of.connection
        ((_, oid, _),) = describe_query(connection, self._described(select), self.of.view.settings)
        kind, array = connection.execute(_TYPE, [oid]).fetchone() or ("", "")
        return kind, array

    def _cost(self, keys: str) -> float:
        connection = self.of.connection
        with connection.transaction(force_rollback=True):
            apply_view_settings(connection, self.of.view.settings)
            return OwnerSql(connection, None).cost(self._described(keys))


def _among(column: str, keys: str) -> str:
    """Condition that a column of the target is one of the keys."""
    return f"({column} = any ({keys}) or ({keys.replace('keys', 'null')} and {is_null(column)}))"


def _raise(reason: str) -> str:
    return f"raise exception using message = {literal(reason)};"


def _raise_if(condition: str, reason: str) -> str:
    return f"\n      if ({condition}) then\n        {_raise(reason)}\n      end if;"


def _mask(all_of: Sequence[Netted], chosen: Sequence[Netted]) -> int:
    """The bits of the chosen tables."""
    return sum(1 << bit for bit, one in enumerate(all_of) if one in chosen)
