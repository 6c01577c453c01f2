"""Functions of a view that refresh it in the server, without Python: CALL gdq.refresh() runs them.

    gdq_target.refresh_0123456789ab(xmax, running, segments, most)    adds the changes after a snapshot
    gdq_target.load_0123456789ab()                                    loads the target in full

What Python has found out about a view is in their text, so a session plans each statement once. Their owner is the
view's. They are good for one view_stamp(), which the server compares before it runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.views.change_source import LoggedRows, log_columns_of
from gdq.consumers.views.few_statement import FEW, FEW_BYTES, ROWS_MAX, FewStatement, Netted
from gdq.consumers.views.kept_state import KeptSums, KeptTop
from gdq.consumers.views.netting import netted_images_sql
from gdq.consumers.views.snapshot_holder import log_segments
from gdq.consumers.views.target_rows import TargetRows
from gdq.plan.postgres import PostgresPlan
from gdq.plan.table import WEIGHT_COLUMN, UsedTable
from gdq.sql_text import literal, quote, raw
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.view import ViewInfo

# A statement for each set of changed tables, up to so many sets; else one for each table, and one for all.
_SETS_MAX = 15

# Logs are read by their index, see BEGIN_NETTING. A plan made for the ten rows that PostgreSQL expects of an array is
# good for all that are few.
_SETTINGS = {"enable_seqscan": "off", "jit": "off", "plan_cache_mode": "force_generic_plan"}

_LATER = "select rows_sql, segments::bigint[] from gdq.later_rows_sql(%s, %s::regclass)"

# The counters of ROWS_READ_SQL, for the indexes that there are by now.
_COUNTERS = """
select pg_catalog.string_agg(c.counter, ' + ')
  from (select n::regclass::oid as oid from pg_catalog.unnest(%s::text[]) n
        union select p.relid from pg_catalog.unnest(%s::text[]) n,
                                  pg_catalog.pg_partition_tree(n::regclass) p) t
  cross join lateral (
    select pg_catalog.format('pg_catalog.pg_stat_get_xact_tuples_%%s(%%s)', w, t.oid) as counter
      from pg_catalog.unnest(array['returned', 'fetched']) w
    union all
    select pg_catalog.format('pg_catalog.pg_stat_get_xact_tuples_fetched(%%s)', i.indexrelid)
      from pg_catalog.pg_index i where i.indrelid = t.oid) c"""

_STORE = """
select gdq.compile_view(%s, row(0, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)::gdq.compiled_view)"""


@dataclass(frozen=True, slots=True)
class CompiledView:
    """The text of a view's functions."""

    view: ViewInfo
    plan: PostgresPlan
    rows: TargetRows

    @property
    def changes_name(self) -> str:
        """The function that adds changes."""
        return self.rows.target.function("refresh")

    @property
    def load_name(self) -> str:
        """The function that loads the target in full."""
        return self.rows.target.function("load")

    def store(self, connection: Connection[Any], stamp: str, definitions: str | None, *, auditable: bool) -> bool:
        """Make the functions in schema gdq_target, and note them for the view; in a transaction of the caller.

        Arguments: as compiled_view has them. False for a view whose changes take several statements: it gets no
        function for them.
        """
        target = self.rows.target
        read = self._rows_read(connection)
        changes = self._changes_sql(connection, read)
        for statement in (changes, self._load_sql(read)):
            if statement:
                connection.execute(raw(statement))
        locks = self._locks(log_segments(connection, self.view.queue_name, self.view.tables))
        names = self.changes_name if changes else None, self.load_name
        found = [stamp, definitions, auditable, self.plan.fingerprint(), target.table, target.state, target.comment]
        scalar(connection, _STORE, self.view.view_name, *found, locks, *names)
        return bool(changes)

    def _locks(self, segments: Sequence[str]) -> str:
        target = self.rows.target
        written = [target.table] if self._kept is None else [target.table, target.state]
        return (
            f"lock table {', '.join([*self.view.tables, *segments])} in access share mode; "
            f"lock table only {', only '.join(written)} in row exclusive mode"
        )

    @property
    def _kept(self) -> KeptSums | KeptTop | None:
        plan, state = self.plan, self.rows.target.state
        if plan.state is not None:
            return KeptSums(plan.state, plan.state.loose)
        return KeptTop(plan.top, state) if plan.top is not None else None

    def _load_sql(self, read: str) -> str:
        """CREATE FUNCTION of the full load. `read`: expression of the rows that the session has read."""
        target, kept, rows = self.rows.target, self._kept, f"select * from ({self.plan.query}) as r"
        filled = ""
        if kept is not None:
            filled = f"""
  delete from {target.state};
  insert into {target.state} {kept.whole()};
  analyze {target.state};"""
            rows = kept.loaded(target.state)
        body = f"""
declare
  gdq_deleted bigint;
begin
  gdq_read := - ({read});{filled}
  delete from {target.table};
  get diagnostics gdq_deleted = row_count;
  insert into {target.table} ({self.rows.columns}) {rows};
  get diagnostics gdq_rows = row_count;
  analyze {target.table};
  gdq_rows := gdq_rows + gdq_deleted;
  gdq_read := gdq_read + ({read});
end"""
        return _function(f"{self.load_name}(out gdq_rows bigint, out gdq_read bigint)", self._settings, body)

    def _changes_sql(self, connection: Connection[Any], read: str) -> str:
        """CREATE FUNCTION that adds changes; empty for a view whose changes take several statements."""
        statement = FewStatement(self.plan, self.rows)
        try:
            with connection.transaction():
                deltas = [self._delta(connection, number) for number in range(1, len(self.plan.tables) + 1)]
        except psycopg.errors.ObjectNotInPrerequisiteState:
            return ""  # the log still has rows of a version with other types
        if not all(delta.is_logged for delta in deltas) or not statement.is_suited([delta.rows for delta in deltas]):
            return ""
        some = [delta.netted for delta in deltas]
        sets = [chosen for size in range(1, len(some) + 1) for chosen in combinations(some, size)]
        if len(sets) > _SETS_MAX:
            sets = [chosen for chosen in sets if len(chosen) in (1, len(some))]
        cases = [(_mask(some, chosen), self._applied(statement, chosen)) for chosen in sets]
        known = [(mask, applied) for mask, applied in cases if applied]
        if not known:
            return ""
        branches = "".join(f"\n  elsif gdq_changed = {mask} then\n    {applied};" for mask, applied in known)
        if len(sets) < 2 ** len(some) - 1 and known[-1][0] == _mask(some, some):
            # the statement for changes of all tables serves any of them
            branches += f"\n  else\n    {known[-1][1]};"
        declared = "".join(f"\n  {name} {kind}[];" for delta in deltas for name, kind in delta.variables)
        body = f"""
#variable_conflict use_column
declare
  gdq_seen bigint;
  gdq_net bigint;
  gdq_small boolean;
  gdq_changed bigint := 0;
  gdq_netted bigint := 0;
  gdq_expected bigint;
  gdq_deleted bigint := 0;
  gdq_inserted bigint := 0;
  gdq_refused boolean := false;
  gdq_many boolean;
  gdq_rows_max bigint := {ROWS_MAX};{declared}
begin
  gdq_read := - ({read});{"".join(delta.netting(1 << bit) for bit, delta in enumerate(deltas))}
  perform pg_catalog.set_config('enable_seqscan', 'on', true);
  if gdq_most > {FEW} then
    -- the planner sees how many changes there are
    perform pg_catalog.set_config('plan_cache_mode', 'force_custom_plan', true);
    gdq_rows_max := {2**62};
  end if;
  if gdq_changed = 0 then
    gdq_many := false;{branches}
  end if;
  if gdq_many is distinct from false then
    raise exception 'one statement is not enough';
  elsif gdq_refused then
    raise exception 'NaN or infinity came into or went from a sum';
  elsif gdq_deleted <> gdq_expected then
    raise exception 'the target lacks rows that went';
  end if;
  gdq_rows := gdq_deleted + gdq_inserted;
  gdq_delta := gdq_netted;
  gdq_read := gdq_read + ({read});
end"""
        arguments = "gdq_xmax bigint, gdq_running bigint[], gdq_segments oid[], gdq_most bigint"
        head = f"{self.changes_name}({arguments}, out gdq_delta bigint, out gdq_rows bigint, out gdq_read bigint)"
        return _function(head, _SETTINGS | self._settings, body)

    def _applied(self, statement: FewStatement, chosen: Sequence[Netted]) -> str:
        """The statement for changes of these tables; empty if there is none."""
        changes = statement.planned([one.table.name for one in chosen])
        if changes is None:
            return ""
        arrays = [name for one in chosen for name in one.arrays]
        into = "gdq_expected, gdq_deleted, gdq_inserted, gdq_refused, gdq_many"
        written = statement.written(chosen, changes, arrays, "gdq_rows_max")
        return f"{written} into {into}"

    def _delta(self, connection: Connection[Any], number: int) -> _Delta:
        """The changes of the table with this number in the plan."""
        table, view = self.plan.tables[number - 1], self.view
        names = [schema.qualified for schema in self.plan.schemas]
        name = view.tables[names.index(table.name)]
        select, segments = connection.execute(_LATER, [view.queue_name, name]).fetchone() or ("", [])
        found = log_columns_of(connection, view.queue_name, [name])[name]
        logged = tuple(column for column in found if column.name in table.logged)
        return _Delta(number, table, LoggedRows(str(select), logged), segments)

    def _rows_read(self, connection: Connection[Any]) -> str:
        """Expression of the rows of the view's tables that the session has read."""
        tables = list(self.view.tables)
        return str(scalar(connection, _COUNTERS, tables, tables))

    @property
    def _settings(self) -> dict[str, str]:
        return {**READ_SETTINGS, **self.view.settings}


@dataclass(frozen=True, slots=True)
class _Delta:
    """The changes of one table: the log rows of all `segments`, and the variables that get their netted columns."""

    number: int
    table: UsedTable
    rows: LoggedRows
    segments: Sequence[int]

    @property
    def is_logged(self) -> bool:
        """True if the log has all columns of the delta."""
        return {*self.table.logged} == {column.name for column in self.rows.columns}

    @property
    def variables(self) -> list[tuple[str, str]]:
        """Name and type of the elements of each array: a column's values, and at the end the weights."""
        types = {column.name: column.type for column in self.rows.columns}
        kinds = [*(types[name] for name in self.table.logged), "bigint"]
        return [(f"gdq_{self.number}_{place}", kind) for place, kind in enumerate(kinds)]

    @property
    def netted(self) -> Netted:
        """The changes as FewStatement takes them."""
        columns = {column.name: column for column in self.rows.columns}
        logged = tuple(columns[name] for name in self.table.logged)
        return Netted(self.number, self.table, logged, 0, tuple(name for name, _ in self.variables))

    def netting(self, bit: int) -> str:
        """Statements that fill the variables and set this bit of gdq_changed; many changes end the function."""
        values = [f"d.{quote(name)}" for name in (*self.table.logged, WEIGHT_COLUMN)]
        size = " + ".join(f"coalesce(pg_catalog.pg_column_size({value}), 0)" for value in values[:-1]) or "0"
        names = [name for name, _ in self.variables]
        arrays = ", ".join(
            f"pg_catalog.array_agg({value}) as {name}" for value, name in zip(values, names, strict=True)
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


def _mask(all_of: Sequence[Netted], chosen: Sequence[Netted]) -> int:
    """The bits of the chosen tables."""
    return sum(1 << bit for bit, one in enumerate(all_of) if one in chosen)


def _function(head: str, settings: Mapping[str, str], body: str) -> str:
    """CREATE FUNCTION in PL/pgSQL that runs under these settings."""
    # a list of schemas is no string
    values = {name: value if name == "search_path" else literal(value) for name, value in settings.items()}
    clauses = "".join(f" set {name} = {value}" for name, value in values.items())
    return f"create or replace function {head} language plpgsql volatile{clauses} as {literal(body)}"
