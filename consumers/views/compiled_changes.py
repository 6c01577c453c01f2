"""The body of the function that adds the changes after a snapshot to a view's target.

netting      the log rows of each table, if there are few, become one array for each column
a branch     for each set of changed tables: the steps of its plan, with the keys in variables, then one statement
             that applies the signed rows, or replaces the rows of the keys
the result   or an error, whose message is the reason for a full load
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import psycopg
from psycopg import Connection

from gdq.consumers.views.change_source import LogColumn, LoggedRows, log_columns_of
from gdq.consumers.views.computation import KEYS_BYTES_MAX, KEYS_MAX
from gdq.consumers.views.few_statement import FEW, FEW_BYTES, ROWS_MAX, FewStatement, Netted
from gdq.consumers.views.netting import as_part, netted_images_sql, old_rows_sql, with_parts
from gdq.consumers.views.target_rows import TargetRows
from gdq.errors import PlanError
from gdq.owner_sql import OwnerSql
from gdq.plan.postgres import ChangePlan, PostgresPlan
from gdq.plan.steps import PlanStep, RecomputeOutcome, ReplaceOutcome
from gdq.plan.table import WEIGHT_COLUMN, UsedTable
from gdq.qualified_sql import qualified
from gdq.sql_text import is_not_null, is_null, literal, quote
from gdq.view.table_schema import apply_view_settings, describe_query
from gdq.view.view import ViewInfo

# A branch for each set of changed tables, the small sets first, up to so many; and one for all tables.
_SETS_MAX = 40

_KEYS, _TOKEN = re.compile(r"\bgdq_keys_\d+\b"), re.compile(r"\bgdq_(keys|null)_\d+\b")

_LATER = "select rows_sql, segments::bigint[] from gdq.later_rows_sql(%s, %s::regclass)"

# The array type's own name, since format_type's character[] reads as arrays of char(1). None for keys that are arrays.
_ARRAY_OF = qualified("""
select format('%%I.%%I', n.nspname, a.typname)
  from pg_catalog.pg_type t
  join pg_catalog.pg_type a on a.oid = t.typarray
  join pg_catalog.pg_namespace n on n.oid = a.typnamespace
 where t.oid = %s and t.typcategory <> 'A' and t.typcategory <> 'P'""")


class _NotCompiledError(Exception):
    """No function can add these changes."""


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
        try:
            with self.connection.transaction():
                deltas = [self._delta(number) for number in range(1, len(self.plan.tables) + 1)]
        except psycopg.errors.ObjectNotInPrerequisiteState:
            return ""  # the log still has rows of a version with other types
        if "pg_temp" in self.plan.query or not all(delta.is_logged for delta in deltas):
            return ""
        some = [delta.netted for delta in deltas]
        sets = [chosen for size in range(1, len(some) + 1) for chosen in combinations(some, size)]
        if len(sets) > _SETS_MAX:
            sets = [*sets[: _SETS_MAX - 1], tuple(some)]
        branches = [(_mask(some, chosen), self._branch(chosen)) for chosen in sets]
        if not any(branch.applies for _, branch in branches):
            return ""
        written = "".join(f"\n  elsif gdq_changed = {mask} then{branch.text}" for mask, branch in branches)
        if len(sets) < 2 ** len(some) - 1:
            # the branch for changes of all tables serves any of them
            written += f"\n  else{branches[-1][1].text}"
        return self._body(read, deltas, written)

    def _body(self, read: str, deltas: Sequence[_Delta], branches: str) -> str:
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
        try:
            changes = self.plan.plan_changes([one.table.name for one in chosen])
            return _Branch(_Steps(self, chosen, changes).text(), applies=True)
        except (PlanError, _NotCompiledError) as error:
            return _Branch(f"\n    {_raise(str(error))}", applies=False)

    def _delta(self, number: int) -> _Delta:
        """The changes of the table with this number in the plan."""
        table, view = self.plan.tables[number - 1], self.view
        names = [schema.qualified for schema in self.plan.schemas]
        name = view.tables[names.index(table.name)]
        select, segments = self.connection.execute(_LATER, [view.queue_name, name]).fetchone() or ("", [])
        found = log_columns_of(self.connection, view.queue_name, [name])[name]
        logged = tuple(column for column in found if column.name in table.logged)
        return _Delta(number, table, LoggedRows(str(select), logged), segments)


@dataclass(frozen=True, slots=True)
class _Branch:
    """The statements for one set of changed tables. `applies`: they follow the changes, and do not only refuse them."""

    text: str
    applies: bool


@dataclass(slots=True)
class _Steps:
    """The steps of a plan as a block of PL/pgSQL, in which the keys of a step are variables of its name."""

    of: CompiledChanges
    chosen: Sequence[Netted]
    changes: ChangePlan
    _parts: dict[str, str] = field(default_factory=dict, init=False)
    _keys: dict[str, str] = field(default_factory=dict, init=False)

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
            if step.kind == "delta":
                self._parts[as_part(step.name)] = as_part(step.sql)
            elif step.kind == "check":
                statements += f"\n      if ({self._read(step.sql)}) then\n        {_raise(step.reason)}\n      end if;"
            else:
                statements += self._collected(step)
        statements += self._applied()
        outcome = self.changes.outcome
        if outcome is not None and not isinstance(outcome, RecomputeOutcome):
            by_key = by_key or isinstance(outcome, ReplaceOutcome)
            statements += f"\n      gdq_kind := '{'by-key' if by_key else 'incremental'}';"
        variables = [*self._keys.items(), *((name.replace("keys", "null"), "boolean") for name in self._keys)]
        declared = "".join(f"\n      {name} {kind};" for name, kind in variables)
        head = f"\n    declare{declared}" if declared else ""
        return f"{head}\n    begin{statements}\n    end;"

    def _read(self, select: str) -> str:
        """A SELECT of the plan with the parts that it reads."""
        return with_parts(as_part(select), self._parts)

    def _collected(self, step: PlanStep) -> str:
        """Statements that collect a step's keys. Many of them are seen by the planner."""
        name = step.name
        self._keys[name] = self._array_type(step.sql)
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
        return f"\n      {self._read(select)} into {name}, {name.replace('keys', 'null')};"

    def _worth(self, step: PlanStep) -> int:
        """The most keys that are looked up. The server takes an unknown array for one of ten."""
        return max(1, int(10 * self._cost(step.instead) / self._cost(step.sql)))

    def _applied(self) -> str:
        """Statements that follow the outcome."""
        of, outcome = self.of, self.changes.outcome
        if outcome is None:
            return "\n      gdq_many := false;"
        if isinstance(outcome, RecomputeOutcome):
            rows = self._read(f"select exists (select from {outcome.rows})")
            refused = f"\n      if ({rows}) then\n        {_raise(outcome.reason)}\n      end if;"
            return f"{refused}\n      gdq_many := false;"
        if isinstance(outcome, ReplaceOutcome):
            table, names = of.rows.target.table, ", ".join(quote(column.name) for column in of.rows.types)
            where = " and ".join(_among(quote(column), name) for column, name in outcome.keys)
            rows = self._read(f"select * from ({outcome.sql}) as r({names})")
            return f"""
      delete from {table} where {where};
      get diagnostics gdq_deleted = row_count;
      gdq_expected := gdq_deleted;
      gdq_many := false;
      insert into {table} ({of.rows.columns}) {rows};
      get diagnostics gdq_inserted = row_count;"""
        statement = FewStatement(of.plan, of.rows)
        written = statement.applied(self._parts, outcome, "gdq_rows_max")
        cut = f"\n      {statement.cut};" if statement.cut else ""
        return f"\n      {written}\n        into gdq_expected, gdq_deleted, gdq_inserted, gdq_refused, gdq_many;{cut}"

    def _described(self, select: str) -> str:
        """A SELECT of the plan for a session that has no variables; the planner knows as little of their values."""
        parts = {one.name: one.select(["null"] * len(one.arrays)) for one in self.chosen}
        found = with_parts(as_part(select), self._parts | parts)
        return _TOKEN.sub(lambda token: self._unknown(token[0]), found)

    def _unknown(self, token: str) -> str:
        kind = self._keys.get(token, "boolean")
        return f"((select null::{kind})::{kind})"

    def _array_type(self, keys: str) -> str:
        connection, view = self.of.connection, self.of.view
        ((_, oid, _),) = describe_query(connection, self._described(keys), view.settings)
        row = connection.execute(_ARRAY_OF, [oid]).fetchone()
        if row is None:
            raise _NotCompiledError("a key is an array")
        return str(row[0])

    def _cost(self, keys: str) -> float:
        connection = self.of.connection
        with connection.transaction(force_rollback=True):
            apply_view_settings(connection, self.of.view.settings)
            return OwnerSql(connection, None).cost(self._described(keys))


@dataclass(frozen=True, slots=True)
class _Delta:
    """The changes of one table: the log rows of all `segments`, and the variables that get their netted columns."""

    number: int
    table: UsedTable
    rows: LoggedRows
    segments: Sequence[int]

    @property
    def _logged(self) -> Mapping[str, LogColumn]:
        return {column.name: column for column in self.rows.columns}

    @property
    def is_logged(self) -> bool:
        """True if the log has all columns of the delta."""
        return {*self.table.logged} == {*self._logged}

    @property
    def variables(self) -> list[tuple[str, str]]:
        """Name and type of the elements of each array: a column's values, and at the end the weights."""
        kinds = [*(self._logged[name].element for name in self.table.logged), "bigint"]
        return [(f"gdq_{self.number}_{place}", kind) for place, kind in enumerate(kinds)]

    @property
    def netted(self) -> Netted:
        """The changes as FewStatement takes them."""
        logged = tuple(self._logged[name] for name in self.table.logged)
        return Netted(self.number, self.table, logged, 0, tuple(name for name, _ in self.variables))

    def netting(self, bit: int) -> str:
        """Statements that fill the variables and set this bit of gdq_changed; many changes end the function."""
        values = [f"d.{quote(name)}" for name in (*self.table.logged, WEIGHT_COLUMN)]
        size = " + ".join(f"coalesce(pg_catalog.pg_column_size({value}), 0)" for value in values[:-1]) or "0"
        names = [name for name, _ in self.variables]
        arrays = ", ".join(
            f"pg_catalog.array_agg({value}::{kind}) as {name}"
            for value, (name, kind) in zip(values, self.variables, strict=True)
        )
        select = self.rows.select.replace("$1", "gdq_xmax").replace("$2", "gdq_running")
        rows = LoggedRows(select, self.rows.columns)
        net = netted_images_sql(self.table, rows.images, exact=rows.is_exact(self.table.logged))
        listed = "{" + ",".join(map(str, self.segments)) + "}"
        return f"""
  if gdq_segments && '{listed}'::oid[] then
    with gdq_s as materialized (select count(*) as n from (select from ({select}) as r limit gdq_most + 1) as r),
         gdq_n as materialized (select * from ({net}) as d where (select n from gdq_s) <= gdq_most),
         gdq_z as (select count(*) as n, coalesce(sum({size}), 0) <= gdq_most * {FEW_BYTES // FEW} as small
                     from gdq_n as d),
         gdq_a as (select {arrays} from gdq_n as d where (select small from gdq_z))
    select (select n from gdq_s), gdq_z.n, gdq_z.small, gdq_a.*
      from gdq_z, gdq_a into gdq_seen, gdq_net, gdq_small, {", ".join(names)};
    if gdq_seen > gdq_most or not gdq_small then
      return;
    elsif gdq_net > 0 then
      gdq_changed := gdq_changed + {bit};
      gdq_netted := gdq_netted + gdq_net;
    end if;
  end if;"""


def _among(column: str, keys: str) -> str:
    """Condition that a column of the target is one of the keys."""
    return f"({column} = any ({keys}) or ({keys.replace('keys', 'null')} and {is_null(column)}))"


def _raise(reason: str) -> str:
    return f"raise exception using message = {literal(reason)};"


def _mask(all_of: Sequence[Netted], chosen: Sequence[Netted]) -> int:
    """The bits of the chosen tables."""
    return sum(1 << bit for bit, one in enumerate(all_of) if one in chosen)
