"""The steps of a plan as statements of PL/pgSQL, which follow the changes of some tables.

Keys become variables, what a step makes of rows is a part of the statements that read it, a check raises its reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import md5
from typing import Any

from psycopg import Connection

from gdq.consumers.views.computation import KEYS_BYTES_MAX, KEYS_MAX
from gdq.consumers.views.few_statement import FEW, FewStatement, Netted
from gdq.consumers.views.netting import as_part, old_rows_sql, with_parts
from gdq.consumers.views.target_rows import TargetRows
from gdq.owner_sql import OwnerSql
from gdq.plan.extreme import extreme_after, net_values_sql
from gdq.plan.postgres import ChangePlan, PostgresPlan
from gdq.plan.steps import PlannedValue, PlanStep, RecomputeOutcome, ReplaceOutcome
from gdq.qualified_sql import qualified
from gdq.sql_text import is_not_null, is_null, literal, quote
from gdq.view.table_schema import apply_view_settings, describe_query
from gdq.view.view import ViewInfo

_KEYS, _VARIABLE = re.compile(r"\bgdq_keys_\d+\b"), re.compile(r"\bgdq_(?:keys|null|value)_\d+(?:_old)?\b")

# Names of types, since format_type's character reads as char(1).
_TYPE = qualified("""
select format('%%I.%%I', n.nspname, t.typname),
       coalesce((select format('%%I.%%I', m.nspname, a.typname)
                   from pg_catalog.pg_type a join pg_catalog.pg_namespace m on m.oid = a.typnamespace
                  where a.oid = t.typarray and t.typcategory <> 'A' and t.typcategory <> 'P'), '')
  from pg_catalog.pg_type t join pg_catalog.pg_namespace n on n.oid = t.typnamespace
 where t.oid = %s""")


class NotCompiledError(Exception):
    """No function can add these changes."""


@dataclass(slots=True)
class CompiledSteps:
    """The steps of a plan as a block of PL/pgSQL, in which the keys of a step are variables of its name."""

    view: ViewInfo
    plan: PostgresPlan
    rows: TargetRows
    connection: Connection[Any]
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
            if self._is_shown(value, kind):
                # each row that the view had shows it, and no table is read
                shown = f"select t.{quote(value.shown)} from {self.rows.target.table} as t limit 1"
                anew = f"""{self._noted("take a value from the target", shown)} into {before};
        if found then
          {followed} into {name};
        else
          {anew}
        end if;"""
            reason = raise_statement("the value of a subquery changed [subquery-value]")
            compared = f"\n      if {name}::text is distinct from {before}::text then\n        {reason}\n      end if;"
        self._parts[as_part(step.name)] = f"select {name} as c1, 1 as w"
        return f"""
      if gdq_kept ? '{key}' then
        {taken}
      else
        {anew}
      end if;{compared}
      gdq_kept := gdq_kept || pg_catalog.jsonb_build_object('{key}', {name}::text);"""

    def _is_shown(self, value: PlannedValue, kind: str) -> bool:
        """True if a column of the view, of the same type, has the value in every row."""
        if not value.shown:
            return False
        return self._type(f"select q.{quote(value.shown)} from ({self.plan.query}) as q")[0] == kind

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
            raise NotCompiledError("a key is an array")
        self.variables |= {name: kind, name.replace("keys", "null"): "boolean"}
        collected = self._into(name, step.sql)
        if step.instead:
            # the first looks up each key that was collected before, the other reads all
            few = f"pg_catalog.cardinality({_KEYS.findall(step.sql)[0]}) <= {self._worth(step)}"
            collected = f"\n      if {few} then{collected}\n      else{self._into(name, step.instead)}\n      end if;"
        return f"""{collected}
      if pg_catalog.cardinality({name}) > {KEYS_MAX} then
        {raise_statement(f"more than {KEYS_MAX} keys changed")}
      elsif pg_catalog.pg_column_size({name}) > {KEYS_BYTES_MAX} then
        {raise_statement(f"the keys that changed take more than {KEYS_BYTES_MAX} bytes")}
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
        outcome = self.changes.outcome
        if outcome is None:
            return "\n      gdq_many := false;"
        if isinstance(outcome, RecomputeOutcome):
            rows = self._noted("check", self._read(f"select exists (select from {outcome.rows})"))
            return f"{_raise_if(rows, outcome.reason)}\n      gdq_many := false;"
        if isinstance(outcome, ReplaceOutcome):
            table, names = self.rows.target.table, ", ".join(quote(column.name) for column in self.rows.types)
            where = " and ".join(_among(quote(column), name) for column, name in outcome.keys)
            rows = self._read(f"select * from ({outcome.sql}) as r({names})")
            delete = self._noted("delete the rows of the keys", f"delete from {table} where {where}")
            insert = self._noted("insert the rows of the keys", f"insert into {table} ({self.rows.columns}) {rows}")
            return f"""
      {delete};
      get diagnostics gdq_deleted = row_count;
      gdq_expected := gdq_deleted;
      gdq_many := false;
      {insert};
      get diagnostics gdq_inserted = row_count;"""
        statement = FewStatement(self.plan, self.rows)
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
        connection = self.connection
        ((_, oid, _),) = describe_query(connection, self._described(select), self.view.settings)
        kind, array = connection.execute(_TYPE, [oid]).fetchone() or ("", "")
        return kind, array

    def _cost(self, keys: str) -> float:
        connection = self.connection
        with connection.transaction(force_rollback=True):
            apply_view_settings(connection, self.view.settings)
            return OwnerSql(connection, None).cost(self._described(keys))


def _among(column: str, keys: str) -> str:
    """Condition that a column of the target is one of the keys."""
    return f"({column} = any ({keys}) or ({keys.replace('keys', 'null')} and {is_null(column)}))"


def raise_statement(reason: str) -> str:
    """The statement that ends the function, with the reason for a full load."""
    return f"raise exception using message = {literal(reason)};"


def _raise_if(condition: str, reason: str) -> str:
    return f"\n      if ({condition}) then\n        {raise_statement(reason)}\n      end if;"
