"""Functions of a view that refresh it in the server, without Python: CALL gdq.refresh() runs them.

    gdq_target.refresh_0123456789ab(xmax, running, ...)    adds the changes after a snapshot
    gdq_target.load_0123456789ab()                         loads the target in full
    gdq_target.look_0123456789ab(since)                    finds the logs with changes

What Python has found out about a view is in their text, so a session plans each statement once. Their owner is the
view's. They are good for one view_stamp(), which the server compares before it runs them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.views.compiled_changes import ChangeStatement, CompiledChanges
from gdq.consumers.views.kept_state import KeptSums, KeptTop, kept_beside, made_state
from gdq.consumers.views.snapshot_holder import log_segments
from gdq.consumers.views.target_rows import TargetRows
from gdq.plan.postgres import PostgresPlan
from gdq.sql_text import literal, quote, raw
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.view import ViewInfo

log = logging.getLogger(__name__)

# Logs are read by their index, see BEGIN_NETTING. A plan made for the ten rows that PostgreSQL expects of an array is
# good for all that are few.
_SETTINGS = {"enable_seqscan": "off", "jit": "off", "plan_cache_mode": "force_generic_plan"}

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

# With any arguments: those of an older gdq are others.
_MADE = """
select p.oid::pg_catalog.regprocedure::text
  from pg_catalog.pg_proc p
 where p.pronamespace = pg_catalog.to_regnamespace('gdq_target')
   and pg_catalog.format('gdq_target."%%s"', p.proname) = any (%s)"""

_STORE = """
select gdq.compile_view(%s, row(0, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, null, null, %s)::gdq.compiled_view)"""


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

    def statements(self, connection: Connection[Any]) -> list[ChangeStatement]:
        """The statements by which the functions follow changes, and those of a full load, whose table is empty."""
        target, kept = self.rows.target, self._kept
        rows = f"select * from ({self.plan.query}) as r" if kept is None else kept.loaded(target.state)
        loads = [] if kept is None else [("fill the state", f"insert into {target.state} {kept.whole()}")]
        loads.append(("fill the target", f"insert into {target.table} ({self.rows.columns}) {rows}"))
        changes = CompiledChanges(self.view, self.plan, self.rows, connection).statements()
        return [*changes, *(ChangeStatement("", task, sql, {}) for task, sql in loads)]

    def store(self, connection: Connection[Any], stamp: str, definitions: str | None, *, auditable: bool) -> bool:
        """Make the functions in schema gdq_target, and note them for the view; in a transaction of the caller.

        Arguments: as compiled_view has them. False for a view whose changes take several statements: it gets no
        function for them.
        """
        target = self.rows.target
        for (made,) in connection.execute(_MADE, [target.functions]).fetchall():
            connection.execute(raw(f"drop function {made}"))
        read = self._rows_read(connection)
        changes = self._made_changes(connection, read)
        connection.execute(raw(self._load_sql(read)))
        locks = self._locks(log_segments(connection, self.view.queue_name, self.view.tables))
        names = changes, self.load_name, self._made_look(connection)
        found = [stamp, definitions, auditable, self.plan.fingerprint(), target.table, target.state, target.comment]
        scalar(connection, _STORE, self.view.view_name, *found, locks, *names)
        return bool(changes)

    def _locks(self, segments: Sequence[str]) -> str:
        return f"lock table {', '.join([*self.view.tables, *segments])} in access share mode"

    @property
    def _kept(self) -> KeptSums | KeptTop | None:
        return kept_beside(self.plan, self.rows.target.state)

    def _load_sql(self, read: str) -> str:
        """CREATE FUNCTION of the full load. `read`: expression of the rows that the session has read."""
        target, rows = self.rows.target, f"select * from ({self.plan.query}) as r"
        filled, index = "", target.made_index(", ".join(map(quote, self.plan.match))) if self.plan.match else []
        if self._kept is not None:
            filled, rows = self._filled(self._kept), self._kept.loaded(target.state)
        held = ", ".join(map(literal, (self.view.view_name, target.source, target.table, target.state, target.comment)))
        body = f"""
declare
  gdq_deleted bigint := 0;
  gdq_there text[] := gdq.hold_target({held});
begin
  gdq_read := - ({read});{filled}
  if {literal(target.table)} = any (gdq_there) then
    delete from {target.table};
    get diagnostics gdq_deleted = row_count;
  else
    {_each(target.made(self.rows.types))}
  end if;
  insert into {target.table} ({self.rows.columns}) {rows};
  get diagnostics gdq_rows = row_count;
  if not {literal(target.table)} = any (gdq_there) then{_tried(index)}
  end if;
  analyze {target.table};
  gdq_rows := gdq_rows + gdq_deleted;
  gdq_read := gdq_read + ({read});
end"""
        return _function(f"{self.load_name}(out gdq_rows bigint, out gdq_read bigint)", self._settings, body)

    def _filled(self, kept: KeptSums | KeptTop) -> str:
        """Statements that fill the state."""
        state, whole = self.rows.target.state, kept.whole()
        create, indexes = made_state(kept, state, whole)
        return f"""
  if {literal(state)} = any (gdq_there) then
    delete from {state};
    insert into {state} {whole};
  else
    {_each(create)}{"".join(_tried([index]) for index in indexes)}
  end if;
  analyze {state};"""

    def _made_look(self, connection: Connection[Any]) -> str:
        """Make the function that finds the logs with changes; its name."""
        name = self.rows.target.function("look")
        body = str(scalar(connection, "select gdq.look_body(%s)", self.view.view_name))
        head = f"{name}(since pg_catalog.pg_snapshot) returns pg_catalog.oid[]"
        connection.execute(raw(_function(head, _SETTINGS | {"search_path": "pg_catalog, pg_temp"}, body)))
        return name

    def _made_changes(self, connection: Connection[Any], read: str) -> str | None:
        """Make the function that adds changes; None for a view that is loaded in full after any change."""
        arguments = (
            "gdq_xmax bigint, gdq_running bigint[], gdq_segments oid[], "
            "gdq_most bigint, gdq_few bigint, inout gdq_kept jsonb"
        )
        results = "out gdq_delta bigint, out gdq_rows bigint, out gdq_read bigint, out gdq_kind text"
        try:
            with connection.transaction():
                body = CompiledChanges(self.view, self.plan, self.rows, connection).body(read)
                if not body:
                    return None
                head = f"{self.changes_name}({arguments}, {results})"
                connection.execute(raw(_function(head, _SETTINGS | self._settings, body)))
                return self.changes_name
        except psycopg.Error as error:
            log.info("changes of view %s are not compiled: %s", self.view.view_name, error)
            return None

    def _rows_read(self, connection: Connection[Any]) -> str:
        """Expression of the rows of the view's tables that the session has read."""
        tables = list(self.view.tables)
        return str(scalar(connection, _COUNTERS, tables, tables))

    @property
    def _settings(self) -> dict[str, str]:
        return {**READ_SETTINGS, **self.view.settings}


def _each(statements: Sequence[str]) -> str:
    return "\n    ".join(f"{statement};" for statement in statements)


def _tried(index: Sequence[str]) -> str:
    """Statements that create an optional index, as try_index() does."""
    if not index:
        return ""
    return f"""
    begin
      {_each(index)}
    exception when program_limit_exceeded or too_many_columns or invalid_object_definition or undefined_object then
      null;
    end;"""


def _function(head: str, settings: Mapping[str, str], body: str) -> str:
    """CREATE FUNCTION in PL/pgSQL that runs under these settings."""
    # a list of schemas is no string
    values = {name: value if name == "search_path" else literal(value) for name, value in settings.items()}
    clauses = "".join(f" set {name} = {value}" for name, value in values.items())
    return f"create function {head} language plpgsql volatile{clauses} as {literal(body)}"
