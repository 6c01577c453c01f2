"""Changes brought to a target whose foreign keys fire: all tables that these join are changed in one statement.

PostgreSQL looks at a foreign key when the statement that changed a row ends. So one statement that changes all tables
of a batch needs no order of tables, no deferrable keys, and may go in a circle. What a key does by itself when a row
goes, ON DELETE CASCADE and its like, finds nothing left to do then; where it would, the change is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import psycopg
from psycopg import errors

from gdq.consumers.replica.changes import PLACE_TAKEN, STAGE_NAME, Applied, Staged, kept_name, truncate_tables
from gdq.consumers.replica.conflicts import settle_conflicts, settle_differing
from gdq.consumers.replica.dead_letters import DeadLetters
from gdq.consumers.replica.foreign_keys import ForeignKey, foreign_keys, joined_tables, parents_first
from gdq.consumers.replica.joint_sql import StagedTable, old_keys_sql
from gdq.consumers.replica.joint_statement import JointStatement
from gdq.consumers.replica.policy import Policies
from gdq.consumers.replica.refusal import (
    WHOLE,
    Refused,
    RowsLackingError,
    number_rows,
    refusal_error,
    refuses_rows,
    stage_part,
    try_in_parts,
)
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import Fires, ReplicaTable
from gdq.consumers.replica.table_apply import TableApplier
from gdq.errors import GdqError
from gdq.sql_text import quote, raw

_SWAPPED = (
    "If two rows have swapped the values of a unique key: make its constraint deferrable in the target, or have a "
    "superuser there say: grant set on parameter session_replication_role to ROLE"
)


def table_applier(state: ReplicaState, policies: Policies, letters: DeadLetters, fires: Fires) -> TableApplier:
    """What brings changes to the tables of a replica's target, where some triggers fire or none."""
    if fires == "nothing":
        return TableApplier(state.name, state.connection, policies, letters)
    return JointApplier(state.name, state.connection, policies, letters, lambda: state.tables)


@dataclass(frozen=True, slots=True)
class JointApplier(TableApplier):
    """Applies the changes of a replica's tables when all of them are staged, in a target whose foreign keys fire.

    `kept`: the names of the replica's tables: their rows are the source's, so that no foreign key may change them.
    """

    kept: Callable[[], Collection[str]] = tuple
    _staged: dict[str, StagedTable] = field(default_factory=dict)
    _cleared: set[str] = field(default_factory=set)

    @property
    def jointly(self) -> bool:
        """True: all that a batch has of a table is staged once."""
        return True

    def begin(self) -> None:
        """Forget what was staged in a transaction that has failed."""
        self._staged.clear()
        self._cleared.clear()

    def empty(self, tables: Sequence[str]) -> None:
        """Delete all rows of some tables; by key with the changes where the server refuses TRUNCATE for others."""
        if tables and not truncate_tables(self.target, tables):
            self._cleared.update(tables)

    @property
    def cleared(self) -> Collection[str]:
        """The tables whose rows are to be deleted with their changes, also if there are none."""
        return self._cleared

    def apply(
        self,
        table: ReplicaTable,
        stage: Callable[[], Iterable[Staged]],
        tick: int,
        stage_all: Callable[[], Iterable[Staged]] | None = None,  # noqa: ARG002 (old rows are never left out)
    ) -> Applied:
        """Stage a table's changes of the batch that ends with a tick; finish() applies them.

        What is staged of the same table already is applied before, with all else.
        """
        applied = self.finish() if table.name in self._staged else Applied()
        answers = self.answers(table)
        staged = StagedTable(table, _own_stage(table), tick)
        self._rename(staged.own_name, kept_name(table))
        (filled,) = stage()
        staged.paired = filled.paired
        if table.name in self._cleared:
            self._cleared.remove(table.name)
            staged.paired = False
            self.target.execute(raw(old_keys_sql(table)))
        else:
            staged.conflicts = settle_differing(self.target, table, answers, self.replica, tick)
        staged.met = self.letters.meet_stage(table)
        staged.paired = staged.paired and not staged.met and not staged.conflicts
        self._rename(STAGE_NAME, staged.own_name)
        self._staged[table.name] = staged
        return applied

    def finish(self) -> Applied:
        """Apply all that is staged, in the open transaction; GdqError if the target refuses a row that must not die."""
        if not self._staged:
            return Applied()
        staged = dict(self._staged)
        self._staged.clear()
        # whatever is deferred would fail at the commit only, without a table that could be told
        self.target.execute("set constraints all immediate")
        keys = foreign_keys(self.target, {*self.kept(), *staged})
        applied = Applied()
        for names in joined_tables(staged, keys):
            applied += _Group(self, [staged[name] for name in names], keys).apply()
        return applied

    def settle(self, staged: StagedTable, refused: str | None) -> int:
        """Settle the conflicts of a staged table; their number."""
        table = staged.table
        with self.current(staged):
            try:
                return settle_conflicts(
                    self.target, table, self.answers(table), self.replica, staged.tick, refused=refused
                )
            except errors.ForeignKeyViolation as error:
                raise refusal_error(table, error) from error

    @contextmanager
    def current(self, staged: StagedTable) -> Iterator[None]:
        """Have a table's staging table be STAGE."""
        self._rename(staged.own_name, STAGE_NAME)
        yield
        self._rename(STAGE_NAME, staged.own_name)

    def _rename(self, name: str, to: str) -> None:
        """Rename a temporary table, if it exists, in the place of another one."""
        self.target.execute(
            raw(f"""do $do$ begin
                      if pg_catalog.to_regclass('pg_temp.{name}') is not null then
                        drop table if exists pg_temp.{to};
                        alter table pg_temp.{name} rename to {to};
                      end if;
                    end $do$""")
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Staged tables that foreign keys join. `keys`: those from and to them."""

    applier: JointApplier
    tables: list[StagedTable]
    keys: list[ForeignKey]

    def apply(self) -> Applied:
        """Apply what is staged, but for rows that are put aside; GdqError if the target refuses others."""
        applier = self.applier
        applied, refused = None, dict[str, list[Refused]]()
        while applied is None:
            try:
                applied = self._statement.attempt()
            except (psycopg.Error, RowsLackingError) as error:
                if not refuses_rows(error):
                    raise
                if self._settle():
                    continue
                if applier.policies.on_error == "stop":
                    raise self._failure(error) from error
                applied, refused = self._apply_in_parts()
        for staged in self.tables:
            letters = refused.get(staged.table.name, [])
            if letters:
                applier.target.execute(raw(f"drop table if exists {WHOLE}"))
                applier.target.execute(raw(f"alter table {staged.whole} rename to {WHOLE.removeprefix('pg_temp.')}"))
            with applier.current(staged):
                applier.letters.settle(staged.table, staged.met, letters, staged.tick)
        conflicts = sum(staged.conflicts for staged in self.tables)
        return replace(applied, conflicts=conflicts, dead_letters=sum(map(len, refused.values())))

    @property
    def _statement(self) -> JointStatement:
        return JointStatement(self.applier.target, self.tables, self.keys)

    def _settle(self) -> int:
        """Settle the conflicts of all tables; their number."""
        number = 0
        for staged in self.tables:
            settled = self.applier.settle(staged, self.applier.letters.keys_sql(staged.table))
            staged.conflicts += settled
            staged.paired = staged.paired and not settled
            number += settled
        return number

    def _apply_in_parts(self) -> tuple[Applied, dict[str, list[Refused]]]:
        """Apply the rows but for those that the target refuses, which are returned by table."""
        target = self.applier.target
        order, _ = parents_first([staged.table.name for staged in self.tables], self.keys)
        self.tables.sort(key=lambda staged: order.index(staged.table.name))
        offsets, coming, going = list[int](), list[int](), list[list[int]]()
        offset = 0
        for staged in self.tables:
            offsets.append(offset)
            with self.applier.current(staged):
                numbers = number_rows(target, staged.table)
            target.execute(raw(f"drop table if exists {staged.whole}"))
            target.execute(raw(f"alter table {WHOLE} rename to {staged.whole.removeprefix('pg_temp.')}"))
            gone = f"select number from {staged.whole} group by 1 having not bool_or(is_new) order by 1"
            left = {number for (number,) in target.execute(raw(gone))}
            coming += [offset + number for number in numbers if number not in left]
            going.append([offset + number for number in sorted(left)])
            offset += len(numbers)
            staged.paired = False

        def of_table(numbers: Sequence[int], place: int) -> list[int]:
            end = offsets[place + 1] if place + 1 < len(offsets) else offset
            return [number - offsets[place] for number in numbers if offsets[place] < number <= end]

        def attempt(part: Sequence[int]) -> Applied:
            for place, staged in enumerate(self.tables):
                stage_part(target, staged.table, of_table(part, place), staged.stage, staged.whole)
            return self._statement.attempt()

        # what goes comes last, of children first: a row that is refused keeps those that it points to
        waiting = coming + [number for numbers in reversed(going) for number in numbers]
        applied, refused = try_in_parts(waiting, attempt, self._failure)
        by_table: dict[str, list[Refused]] = {}
        for place, staged in enumerate(self.tables):
            found = [replace(one, number=number) for one in refused for number in of_table([one.number], place)]
            if found:
                by_table[staged.table.name] = found
        return applied, by_table

    def _failure(self, error: Exception, hint: str = "") -> GdqError:
        """The error that stops the replica, with the table that the target's error names."""
        diagnosis = error.diag if isinstance(error, psycopg.Error) else None
        named = None if diagnosis is None else (diagnosis.schema_name, diagnosis.table_name)
        at_fault = [
            staged.table
            for staged in self.tables
            if named is not None and None not in named and staged.table.name in _spellings(named)
        ]
        table = (at_fault or [staged.table for staged in self.tables])[0]
        if isinstance(error, PLACE_TAKEN) and table.more_keys and not self._statement.may_replace(table):
            hint = hint or _SWAPPED
        return refusal_error(table, error, hint)


def _spellings(named: tuple[str | None, ...]) -> list[str]:
    """A schema and a table as %I.%I may write them."""
    schemas, tables = ((str(part), quote(str(part))) for part in named)
    return [f"{schema}.{table}" for schema in schemas for table in tables]


def _own_stage(table: ReplicaTable) -> str:
    """The name of a table's own staging table."""
    kept = f"{table.name} {kept_name(table)}"
    return f"gdq_replica_joint_{hashlib.sha256(kept.encode()).hexdigest()[:16]}"
