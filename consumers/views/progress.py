"""What a refresh is at: its phase, the rows so far and about how many there will be, told to whoever watches.

Nobody else can see the rows of one INSERT ... SELECT before it is committed: its table is locked and in no catalog yet.
So the statement itself tells its rows, by messages of level INFO, which reach the session while it runs. A watcher that
PostgreSQL refuses, or that is wrong, makes no load fail: what cannot be told is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import psycopg
from psycopg import sql
from psycopg.errors import Diagnostic

from gdq.call import scalar
from gdq.owner_sql import OwnerSql

# The phases of a refresh. A full load in the database of the tables computes and writes in one statement: writing.
EnginePhase = Literal["netting", "computing", "writing", "indexing"]

# Called with the phase, the rows so far (0 if unknown), and about how many there will be (None if unknown).
TellProgress = Callable[[EnginePhase, int, int | None], None]

# Errors of a server that does not explain a statement, or makes no function; a cancelled statement raises none of them.
_REFUSED = (psycopg.ProgrammingError, psycopg.NotSupportedError, psycopg.DataError, psycopg.InternalError)

# Rows look at the counter by chance, 200 of those expected, and at most one of 20. Beyond the expected rows ever fewer
# looks are told. So a load of any size sends some hundred messages, which cost less than can be measured.
_LOOKS, _SHARE_MOST = 200, 0.05
_TOLD = "gdq_rows"
_MAKE_TOLD = f"""
create function pg_temp.told_{_TOLD}(target pg_catalog.oid, expected pg_catalog.float8)
returns pg_catalog.bool language plpgsql as $$
declare
  inserted pg_catalog.int8 := pg_catalog.pg_stat_get_xact_tuples_inserted(target);
begin
  if pg_catalog.random() operator(pg_catalog.*) inserted::pg_catalog.float8 operator(pg_catalog.<) expected then
    raise info '{_TOLD} %', inserted;
  end if;
  return true;
end $$"""
_DROP_TOLD = f"drop function pg_temp.told_{_TOLD}(pg_catalog.oid, pg_catalog.float8)"
_INSERTED = "select pg_catalog.pg_stat_get_xact_tuples_inserted(%s::pg_catalog.regclass)"
_MESSAGE = re.compile(rf"{_TOLD} (\d+)")


class Progress:
    """Progress of one view's refresh, told by its engine; without `tell` nobody watches, and nothing is asked for."""

    def __init__(self, tell: TellProgress | None = None) -> None:
        self._tell = tell
        self._expected: int | None = None
        self._expected_phase: EnginePhase = "writing"
        self._phase: EnginePhase = "computing"

    def __call__(self, phase: EnginePhase, rows: int = 0) -> None:
        """Tell the phase, and the rows that it has read or written so far."""
        self._phase = phase
        if self._tell is not None:
            self._tell(phase, rows, self._expected if phase == self._expected_phase else None)

    @property
    def watched(self) -> bool:
        """True if somebody is told."""
        return self._tell is not None

    def at(self, rows: int) -> None:
        """Tell the rows so far of the phase told last."""
        self(self._phase, rows)

    def expect(self, rows: int | None, phase: EnginePhase = "writing") -> None:
        """Note about how many rows a phase that follows will read or write; None or 0 if it is unknown."""
        self._expected, self._expected_phase = rows or None, phase

    def expect_rows_of(self, owned: OwnerSql, query: str, phase: EnginePhase = "writing") -> None:
        """Note how many rows the planner expects of a SELECT, which a phase that follows will read or write."""
        self._expected = None
        if self._tell is None:
            return
        with suppress(*_REFUSED, LookupError, TypeError), owned.connection.transaction():
            self.expect(int(owned.explain(query)[0]["Plan"]["Plan Rows"]), phase)

    @contextmanager
    def counted(self, owned: OwnerSql, table: str, rows: str) -> Iterator[str]:
        """The SELECT `rows`, which tells how many of them are in `table` while the block inserts them there."""
        connection = owned.connection
        before = self._made_told(owned, table)
        if before is None:
            yield rows
            return

        def told(message: Diagnostic) -> None:
            found = _MESSAGE.fullmatch(message.message_primary or "")
            if found is not None and message.severity_nonlocalized == "INFO" and int(found[1]) > before:
                self(self._phase, int(found[1]) - before)

        connection.add_notice_handler(told)
        try:
            target = f"{sql.Literal(table).as_string(None)}::pg_catalog.regclass"
            expected = max(self._expected or 0, int(_LOOKS / _SHARE_MOST))
            call = f"pg_temp.told_{_TOLD}({target}, {expected})"
            sometimes = f"pg_catalog.random() operator(pg_catalog.<) {_LOOKS / expected:.12f}"
            yield f"select * from ({rows}) as r where case when {sometimes} then {call} else true end"
        finally:
            connection.remove_notice_handler(told)
        owned.run(_DROP_TOLD)

    def _made_told(self, owned: OwnerSql, table: str) -> int | None:
        """Make the function that tells rows; returns the rows inserted before, None if nothing can be told."""
        if self._tell is None:
            return None
        with suppress(*_REFUSED), owned.connection.transaction():
            owned.run(_MAKE_TOLD)
            return int(scalar(owned.connection, _INSERTED, table))
        return None
