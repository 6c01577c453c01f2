"""Changed rows that the target refuses, found by halving: the others are applied, and few of many cost few attempts.

A CHECK that the source does not have refuses one row of a batch. Half of the rows are applied, and if that fails half
of these, until single rows are left. A row that needs a place which another one has yet to leave is tried again after
the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
from psycopg import Connection, errors

from gdq.consumers.replica.changes import PLACE_TAKEN, STAGE, Applied
from gdq.consumers.replica.table import ReplicaTable
from gdq.errors import GdqError
from gdq.sql_text import raw

# What was staged, while STAGE holds the part of it that is tried. The rows of one key have one number, or each has one.
WHOLE = "pg_temp.gdq_replica_whole"

# Rows of one table and batch that may be refused: what refuses more of them is no matter of single rows.
REJECT_LIMIT = 1_000

_REFUSED = "Change the target, or put such rows aside: gdq replicate ... --on-error dead-letter"
_KEPT = "Has it triggers that are ENABLE ALWAYS or ENABLE REPLICA and keep rows as they are?"

# Classes of SQLSTATE that tell of a row and its values: data, constraints, triggers and the code they run, sizes.
_CLASSES = frozenset(("09", "22", "23", "27", "38", "39", "44", "54", "P0"))

# Errors that may vanish when other rows have been changed.
_BY_OTHERS = (*PLACE_TAKEN, errors.ForeignKeyViolation)


class RowsLackingError(Exception):
    """The target did not take some changes: it lacks the rows, or a trigger of its own keeps them as they are."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The staged rows of one key that the target refuses: their number in WHOLE, and the error of their attempt."""

    number: int
    error: Exception

    @property
    def sqlstate(self) -> str | None:
        """None if the target raised no error, but did not take the row."""
        return self.error.sqlstate if isinstance(self.error, psycopg.Error) else None

    @property
    def reason(self) -> str:
        """The error's message, without control over lines."""
        message = self.error.diag.message_primary if isinstance(self.error, psycopg.Error) else None
        return message or str(self.error)


def refuses_rows(error: Exception) -> bool:
    """True if an error tells of the rows: not of the session, the server, locks or the role's rights.

    A SQLSTATE that PostgreSQL does not have comes from a trigger.
    """
    if not isinstance(error, psycopg.Error):
        return isinstance(error, RowsLackingError)
    if error.sqlstate is None:
        return False
    try:
        errors.lookup(error.sqlstate)
    except KeyError:
        return True
    return error.sqlstate[:2] in _CLASSES


def refusal_error(table: ReplicaTable, error: Exception, hint: str = "") -> GdqError:
    """The error that stops a replica, for one of the target that refuses rows."""
    if not isinstance(error, psycopg.Error):
        return GdqError(f"table {table.name} of the target {error}", hint=hint or _KEPT)
    return GdqError(
        f"table {table.name} of the target refuses a row: {error.diag.message_primary or error}",
        detail=error.diag.message_detail,
        hint=hint or _REFUSED,
    )


def apply_in_parts(
    target: Connection[Any], table: ReplicaTable, attempt: Callable[[Connection[Any], ReplicaTable], Applied]
) -> tuple[Applied, list[Refused]]:
    """Apply the staged rows, which failed as a whole, but for those that the target refuses; these are returned.

    `attempt` applies what STAGE holds, or raises and leaves the target as it was. WHOLE keeps all that was staged.
    GdqError if more than REJECT_LIMIT rows are refused.
    """

    def attempt_part(part: Sequence[int]) -> Applied:
        stage_part(target, table, part)
        return attempt(target, table)

    return try_in_parts(number_rows(target, table), attempt_part, partial(refusal_error, table))


def try_in_parts(
    waiting: Sequence[int],
    attempt: Callable[[Sequence[int]], Applied],
    failure: Callable[[Exception, str], GdqError],
) -> tuple[Applied, list[Refused]]:
    """Apply the rows of these numbers but for those that are refused, which are returned.

    `attempt` applies those of some numbers, or raises and leaves the target as it was. `failure` makes an error of the
    last refusal and a hint, if there are more than REJECT_LIMIT.
    """
    applied, refused = Applied(), list[Refused]()
    parts = _halves(waiting)
    while True:
        done, failed = _try_parts(parts, attempt, failure)
        applied += done
        again = [one for one in failed if isinstance(one.error, _BY_OTHERS)]
        refused += [one for one in failed if one not in again]
        if len(again) in (0, len(waiting)):
            return applied, refused + again
        waiting = [one.number for one in again]
        parts = [waiting]


def _try_parts(
    parts: list[Sequence[int]],
    attempt: Callable[[Sequence[int]], Applied],
    failure: Callable[[Exception, str], GdqError],
) -> tuple[Applied, list[Refused]]:
    """Apply the rows with these numbers, part by part; those that fail are halved."""
    applied, failed = Applied(), list[Refused]()
    left = parts[::-1]
    while left:
        part = left.pop()
        try:
            applied += attempt(part)
        except (psycopg.Error, RowsLackingError) as error:
            if not refuses_rows(error):
                raise
            if len(part) > 1:
                left += _halves(part)[::-1]
                continue
            failed.append(Refused(part[0], error))
            if len(failed) > REJECT_LIMIT:
                hint = f"More than {REJECT_LIMIT} rows are refused: change the target, then start again."
                raise failure(error, hint) from error
    return applied, failed


def _halves(numbers: Sequence[int]) -> list[Sequence[int]]:
    """Two halves of some rows; one row is no half."""
    middle = (len(numbers) + 1) // 2
    return [part for part in (numbers[:middle], numbers[middle:]) if part]


def stage_part(
    target: Connection[Any], table: ReplicaTable, part: Sequence[int], stage: str = STAGE, whole: str = WHOLE
) -> None:
    """Have the staging table hold those of its rows that have these numbers in `whole`, which keeps all of them."""
    columns = ", ".join(f"c{place}" for place in range(1, len(table.columns) + 1))
    target.execute(raw(f"truncate {stage}"))
    target.execute(
        raw(f"insert into {stage} select is_new, {columns} from {whole} where number = any (%s)"), [list(part)]
    )


def number_rows(target: Connection[Any], table: ReplicaTable) -> Sequence[int]:
    """Keep all that is staged in WHOLE, with a number for each key, or each row without a key; the numbers."""
    key = ", ".join(column.staged("s", place) for place, column in enumerate(table.columns, 1) if column.is_key)
    number = f"dense_rank() over (order by {key})" if key else "row_number() over (order by is_new)"
    target.execute(f"drop table if exists {WHOLE}")
    target.execute(
        raw(
            f"create temp table gdq_replica_whole on commit drop as "
            f"select ({number})::int as number, s.* from {STAGE} s"
        )
    )
    target.execute(f"create index on {WHOLE} (number)")
    row = target.execute(f"select coalesce(max(number), 0) from {WHOLE}").fetchone()
    assert row is not None
    return range(1, row[0] + 1)
