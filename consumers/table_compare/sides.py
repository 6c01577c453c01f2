"""The two sides of a comparison: one snapshot of a table in each database, and the rows as they were at one tick.

The target of a replica is the source as of its position. So the target's snapshot is taken first, and a later one of
the source is moved back to that position: the images that the log has between the two count with the opposite sign.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.conninfo import connect
from gdq.consumers.copy.leader import COPY_SETTINGS, lead_copy
from gdq.consumers.copy.pieces import CopyChoice, Piece, SourceTable, describe_source_table
from gdq.consumers.replica.state import StoredPosition, stored_position
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.consumers.table_compare.shape import BUCKETS, TableShape, compared_shape, key_of
from gdq.consumers.views.change_source import log_columns, weighted_log_rows
from gdq.consumers.views.snapshot_holder import hold_snapshot
from gdq.era import check_position
from gdq.errors import GdqError, ResyncRequired, TruncatedPosition, mapped_errors
from gdq.plan.table import WEIGHT_COLUMN
from gdq.qualified_sql import qualified
from gdq.queue import table_info
from gdq.source import Position
from gdq.sql_text import quote, raw

_PAUSE_SECONDS = 0.3

# Events that the images of rows do not show. A new name or an empty new partition does not concern the rows.
_EVENT = qualified("""
select e.kind, coalesce(e.data->>'kind', '') = 'off'
  from gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot, array[%s::pg_catalog.regclass]) e
 where e.kind <> 'message'
   and (e.kind <> 'ddl' or (e.data->'new_version') is not null or (e.data->'dropped') is not null)
 limit 1""")


@dataclass(frozen=True, slots=True)
class Link:
    """A replica whose target is compared: its queue and name."""

    queue: str
    replica: str


@dataclass(frozen=True, slots=True)
class Databases:
    """The databases to compare, by their connection strings, and what links them.

    `wait_seconds`: how long both are given to become comparable, or equal.
    """

    source: str | None
    target: str
    link: Link | None
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen of a table to compare: the condition and the columns, None for all."""

    table: str
    where: str | None = None
    columns: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """A table at the snapshot of an open transaction. `images`: signed images to take off, for FROM; None: none."""

    connection: Connection[Any]
    table: SourceTable
    block_size: int
    images: str | None = None

    @property
    def pieces(self) -> list[Piece]:
        return self.table.pieces(self.block_size)

    def piece_sums(self, shape: TableShape, piece: Piece) -> list[tuple[int, int, int]]:
        """For each bucket that has rows of a piece its number, the number of rows, and the sum of their hashes."""
        select = f"""select kh & {BUCKETS - 1}, count(*), sum({shape.row_hash})
                       from ({piece.select(shape.hashes)} offset 0) as r group by 1"""
        return self.connection.execute(raw(select)).fetchall()

    def image_sums(self, shape: TableShape) -> list[tuple[int, int, int]]:
        """As piece_sums(), of the images to take off."""
        if self.images is None:
            return []
        h = shape.row_hash
        select = f"""select kh & {BUCKETS - 1}, sum(w),
                            coalesce(sum({h}) filter (where w > 0), 0) - coalesce(sum({h}) filter (where w < 0), 0)
                       from ({self._taken_off(shape.hashes)} offset 0) as r group by 1"""
        return self.connection.execute(raw(select)).fetchall()

    def rows_sql(self, shape: TableShape, condition: str) -> str:
        """SELECT of the rows that match a condition on kh, h and k: kh, h, the key's texts k, how often the row is."""
        values = f"{shape.hashes}, {shape.key_texts} as k"
        parts = [f"select {values}, 1 as w from {self._rows}{self._condition}"]
        if self.images is not None:
            parts.append(self._taken_off(values))
        rows = " union all ".join(f"({part})" for part in parts)
        return f"""select kh, h, k, sum(w)::bigint from ({rows}) as r where {condition}
                    group by kh, h, k having sum(w) <> 0 order by kh"""

    def found_sql(self, shape: TableShape, values: str) -> str:
        """SELECT of rows by the keys of the relation wanted(gdq_key): the key's texts, the values, how often they are.

        `values`: a list in SQL, which names its columns.
        """
        here = f"(select * from {self._rows}{self._condition}) as t"
        found = f"select wanted.gdq_key, {values}, 1 as w from wanted join {here} on {shape.has_key('wanted.gdq_key')}"
        if self.images is None:
            return found
        images = f"(select * from {self.images} as t{self._condition}) as t"
        weight = f"-t.{quote(WEIGHT_COLUMN)}"
        return (
            f"{found} union all select wanted.gdq_key, {values}, {weight} as w from wanted "
            f"join {images} on {shape.has_key('wanted.gdq_key')}"
        )

    def without_condition(self) -> Side:
        return replace(self, table=replace(self.table, condition=None))

    @property
    def _rows(self) -> str:
        # children of inheritance are tables of their own, partitions are not
        return self.table.name if self.table.partitioned else f"only {self.table.name}"

    def _taken_off(self, values: str) -> str:
        return f"select {values}, -t.{quote(WEIGHT_COLUMN)} as w from {self.images} as t{self._condition}"

    @property
    def _condition(self) -> str:
        # a line of its own: the condition may end with a comment
        return f" where ({self.table.condition}\n)" if self.table.condition is not None else ""


@dataclass(frozen=True, slots=True)
class TwoSides:
    """A table on both sides. `stored`: where both are one state; None for two snapshots of databases without link."""

    shape: TableShape
    source: Side
    target: Side
    stored: StoredPosition | None

    @property
    def tick(self) -> int | None:
        return None if self.stored is None else Position.parse(self.stored.position).tick

    def without_condition(self) -> TwoSides:
        """The same, with all rows of the table."""
        return replace(self, source=self.source.without_condition(), target=self.target.without_condition())


class _Behind(Exception):  # noqa: N818 (a signal)
    """The source's state at the target's position is not to be had: the images of rows do not lead back to it."""


@contextmanager
def open_sides(databases: Databases, choice: Choice, *, writing: bool = False) -> Iterator[TwoSides]:
    """Snapshots of a table in both databases, held until the block ends.

    Where images of rows do not lead from the source back to the target's position, because of a TRUNCATE or DDL, the
    replica is waited for. GdqError if that takes too long. `writing`: the target's side has no snapshot, but a
    transaction that may write; no batch of the replica is applied in it, and the block has to commit it.
    """
    with ExitStack() as stack:
        link = databases.link
        if link is None:
            yield _opened(stack, databases, choice, writing=writing)
            return
        deadline = time.monotonic() + databases.wait_seconds
        while True:
            try:
                with ExitStack() as opening:
                    sides = _opened(opening, databases, choice, writing=writing)
                    stack.push(opening.pop_all())
                break
            except _Behind as behind:
                if time.monotonic() > deadline:
                    raise GdqError(
                        f"table {choice.table} cannot be compared: {behind} after the replica's position",
                        hint=f"Let it catch up: gdq replicate {link.queue} {link.replica} ...; then compare again.",
                    ) from behind.__cause__
            time.sleep(_PAUSE_SECONDS)
        yield sides


def _opened(stack: ExitStack, databases: Databases, choice: Choice, *, writing: bool) -> TwoSides:
    there = (_writing_side if writing else _reading_side)(stack, databases.target, choice, "the target")
    known, stored = None, None
    if databases.link is None:
        here = _reading_side(stack, databases.source, choice, "the source", generated=True)
        key = key_of(here.connection, choice.table)
    else:
        queue, name = databases.link.queue, databases.link.replica
        stored = stored_position(there.connection, queue, name, choice.table, locked=writing)
        here, known, key = take_source(stack, databases.source, choice, queue, stored)
    shape = compared_shape(
        here.table, there.table, key, known=known, columns=choice.columns, recoded=_recoded(here, there)
    )
    return TwoSides(shape, here, there, stored)


def take_source(
    stack: ExitStack, source: str | None, choice: Choice, queue: str, stored: StoredPosition
) -> tuple[Side, list[str], tuple[str, ...]]:
    """The source's side moved back to a stored position, the columns that its log has, and its key.

    _Behind if the log does not lead there.
    """
    table = choice.table
    name = f"gdq:{queue}/compare"
    reader = stack.enter_context(closing(connect(source, application_name=name, autocommit=True)))
    captured = {info.table_name: info for info in table_info(reader, queue)}
    if table not in captured:
        raise GdqError(f"table {table} is no longer captured by queue {queue}")
    with suppress(TruncatedPosition):  # what is missing of this table's changes shows below
        check_position(reader, queue, stored.position)
    holder = stack.enter_context(hold_snapshot(reader, queue, [table]))
    reader.execute(raw(COPY_SETTINGS))
    described = describe_source_table(reader, CopyChoice(table, choice.where), generated=True)
    columns = [column for column in log_columns(reader, queue, table) if column.image(new=True)]
    since = _later(Position.parse(stored.position).snapshot, stored.copied)
    try:
        with mapped_errors():
            event = reader.execute(_EVENT, [queue, since, holder.snapshot, table]).fetchone()
            if event is not None:
                raise _Behind("capture was off" if event[1] else f"there was a {event[0]}")
            query = qualified(
                "select gdq.delta_sql(%s, %s::pg_catalog.regclass, %s::pg_snapshot, %s::pg_snapshot, null)"
            )
            changes = scalar(reader, query, queue, table, since, holder.snapshot)
            if any(column.omitted for column in columns):
                _require_values(reader, changes)
    except (TruncatedPosition, ResyncRequired) as error:
        raise _Behind("changes are gone") from error
    # as delta_sql() writes it for no rows
    images = None if changes.endswith(" where false") else weighted_log_rows(changes, columns)
    side = Side(reader, described, _block_size(reader), images)
    return side, [column.name for column in columns], tuple(captured[table].key or ())


def _require_values(reader: Connection[Any], changes: str) -> None:
    """_Behind if log rows lack values that an update left as it was."""
    if reader.execute(raw(f"select from ({changes}) d where d.ev_unchanged is not null limit 1")).rowcount:
        raise _Behind("there were updates whose log lacks large values that they left as they were")


def _reading_side(stack: ExitStack, dsn: str | None, choice: Choice, what: str, *, generated: bool = False) -> Side:
    """A side at a snapshot of its own, as it is. `generated`: with the columns that it computes."""
    with closing(connect(dsn, application_name="gdq:compare", autocommit=True)) as connection:
        _check_table(connection, choice, what)
    lead = stack.enter_context(lead_copy(dsn, [CopyChoice(choice.table, choice.where)], 0, generated=generated))
    return Side(lead.holder.connection, lead.tables[0], lead.block_size)


def _writing_side(stack: ExitStack, dsn: str | None, choice: Choice, what: str) -> Side:
    """A side in a transaction in which each statement sees what others have committed."""
    connection = stack.enter_context(closing(connect(dsn, application_name="gdq:repair")))
    connection.execute(raw(COPY_SETTINGS))
    _check_table(connection, choice, what)
    described = describe_source_table(connection, CopyChoice(choice.table, choice.where))
    return Side(connection, described, _block_size(connection))


def _check_table(connection: Connection[Any], choice: Choice, what: str) -> None:
    if scalar(connection, "select pg_catalog.to_regclass(%s)::pg_catalog.text", choice.table) is None:
        raise GdqError(f"{what} has no table {choice.table}")


def _later(one: str, other: str) -> str:
    """The later of two snapshots: a table's copy may be ahead of the position that the replica stands at."""
    return other if PgSnapshot.parse(other).covers(PgSnapshot.parse(one)) else one


def _recoded(one: Side, other: Side) -> bool:
    return one.connection.info.parameter_status("server_encoding") != other.connection.info.parameter_status(
        "server_encoding"
    )


def _block_size(connection: Connection[Any]) -> int:
    return int(scalar(connection, "select pg_catalog.current_setting('block_size')"))
