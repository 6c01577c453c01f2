"""Pieces of tables: what the source says of a table that is copied, and the part of it that one COPY reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection
from psycopg.rows import class_row

from gdq.errors import GdqError
from gdq.sql_text import quote, raw

# A piece has about this size on disk: small beside a table that is worth two workers, large beside the start of a COPY.
PIECE_BYTES = 32 * 2**20

# Types whose binary form is of one database (oids), or is not what their text says.
_ONLY_TEXT = ("reg", "xml", "pg_")

# True of a column a that holds no NULL: since PostgreSQL 18 NOT NULL may be NOT VALID.
HOLDS_NO_NULL = """(a.attnotnull and not exists (
         select from pg_constraint n
          where n.conrelid = a.attrelid and n.contype = 'n' and n.conkey = array[a.attnum] and not n.convalidated))"""

_COLUMNS = """
select a.attname::text as name, a.atttypid::bigint as type_oid, format_type(a.atttypid, a.atttypmod) as type,
       a.attgenerated <> '' as generated,
       t.typoutput = 'bpcharout'::regproc as padded,
       t.typoutput = 'bpcharout'::regproc and (a.atttypmod = -1 or t.typtype = 'd') as blanks,
       greatest(t.oid, e.oid)::bigint < 16384 and coalesce(e.typsend, t.typsend)::oid <> 0 as has_binary
  from pg_attribute a
  join pg_type t on t.oid = a.atttypid
  left join pg_type e on e.oid = t.typelem
 where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped
 order by a.attnum"""

# A partitioned table is read leaf by leaf. The estimate of rows follows the blocks that have come since ANALYZE. The
# size of a table waits for its lock: of p.oid, so that no plan looks at all tables.
_PARTS = """
select format('%%I.%%I', n.nspname, c.relname) as name, c.relkind <> 'f' as ranged, s.blocks,
       case when c.reltuples >= 0 and (c.relpages > 0 or s.blocks = 0)
            then c.reltuples / greatest(c.relpages, 1) * s.blocks end as rows
  from (select %(table)s::regclass::oid
        union select t.relid from pg_partition_tree(%(table)s::regclass) t where t.isleaf) as p(oid)
  join pg_class c on c.oid = p.oid
  join pg_namespace n on n.oid = c.relnamespace,
       lateral (select coalesce(pg_relation_size(p.oid), 0) / current_setting('block_size')::bigint) as s(blocks)
 where c.relkind <> 'p'
 order by s.blocks desc, 1"""


@dataclass(frozen=True, slots=True)
class CopyColumn:
    """A column of a table: its type as format_type() writes it under gdq's own search_path.

    `has_binary`: PostgreSQL's own type, with a binary form. `padded`: character, or a domain over it, of which a cast
    to text cuts the blanks at the end. `blanks`: values may differ by these alone.
    """

    name: str
    type_oid: int
    type: str
    generated: bool
    padded: bool
    blanks: bool
    has_binary: bool

    @property
    def binary(self) -> bool:
        """True if the binary form of its values means the same in every database."""
        return self.has_binary and not self.type.startswith(_ONLY_TEXT)


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A table, or a leaf of a partitioned one. `ranged`: it can be read by ranges of blocks; `rows`: an estimate."""

    name: str
    ranged: bool
    blocks: int
    rows: float | None


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table to copy as the source's snapshot sees it: the columns that are copied, in their order.

    `as_text`: those of them that files have as text.
    """

    name: str
    partitioned: bool
    columns: tuple[CopyColumn, ...]
    parts: tuple[SourcePart, ...]
    condition: str | None = None
    # False if columns were chosen by name
    whole: bool = True
    as_text: frozenset[str] = frozenset()
    # the columns that it computes, which are left out
    generated: tuple[str, ...] = ()

    @property
    def listed(self) -> str:
        """The columns as a list in SQL."""
        return ", ".join(quote(column.name) for column in self.columns)

    @property
    def blocks(self) -> int:
        return sum(part.blocks for part in self.parts)

    @property
    def rows(self) -> float | None:
        """About how many rows are copied; None if nobody knows."""
        known = [part.rows for part in self.parts if part.rows is not None]
        return sum(known) if len(known) == len(self.parts) and self.condition is None else None

    def pieces(self, block_size: int, piece_bytes: int | None = None) -> list[Piece]:
        """The pieces of the table, each of about so many bytes: each row is in exactly one, at one snapshot."""
        step = max((piece_bytes or PIECE_BYTES) // block_size, 1)
        found = []
        for part in self.parts:
            starts = list(range(0, max(part.blocks, 1), step)) if part.ranged else [0]
            # the last range is open: nothing is missed if the part has grown since its size was read
            for start, end in zip(starts, [*starts[1:], None], strict=True):
                found.append(Piece(self, part, start, end))
        return found


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks from `start` to `end` (None: the last one) of a part; what one COPY reads."""

    table: SourceTable
    part: SourcePart
    start: int
    end: int | None

    @property
    def blocks(self) -> int:
        return (self.part.blocks if self.end is None else self.end) - self.start

    def select(self, values: str | None = None) -> str:
        """The SELECT of the piece's rows; `values`: a list in SQL instead of the columns."""
        conditions = [f"ctid >= '({self.start},0)'"] if self.start else []
        conditions += [f"ctid < '({self.end},0)'"] if self.end is not None else []
        # a line of its own: the condition may end with a comment
        conditions += [f"({self.table.condition}\n)"] if self.table.condition is not None else []
        where = f" where {' and '.join(conditions)}" if conditions else ""
        return f"select {values or self.table.listed} from only {self.part.name}{where}"

    def copied(self) -> str:
        """What stands between COPY and TO; a whole table is read without the executor."""
        if self.part.ranged and not self.start and self.end is None and self.table.condition is None:
            return f"{self.part.name} ({self.table.listed})"
        return f"({self.select()})"


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """A table to copy: its name with schema, quoted where SQL needs it; the condition and the columns, None for all.

    `as_text`: columns that files have as PostgreSQL's text, such as dates that may be infinity.
    """

    table: str
    where: str | None = None
    columns: Sequence[str] | None = None
    as_text: Sequence[str] = ()


def copy_columns(connection: Connection[Any], table: str) -> list[CopyColumn]:
    """The columns of a table of either side."""
    with connection.cursor(row_factory=class_row(CopyColumn)) as cursor:
        return cursor.execute(_COLUMNS, [table]).fetchall()


def describe_source_table(leader: Connection[Any], choice: CopyChoice, *, generated: bool = False) -> SourceTable:
    """What the leader's snapshot says of a table; GdqError if it cannot be copied so.

    `generated`: its generated columns are copied like others.
    """
    kind = leader.execute("select relkind::text from pg_class where oid = %s::regclass", [choice.table]).fetchone()
    if kind is None or kind[0] not in "rp":
        raise GdqError(f"{choice.table} is no table", hint="Tables and partitioned tables can be copied.")
    columns = copy_columns(leader, choice.table)
    with leader.cursor(row_factory=class_row(SourcePart)) as cursor:
        parts = cursor.execute(_PARTS, {"table": choice.table}).fetchall()
    chosen = _chosen(choice, columns, generated=generated)
    _refuse_missing(choice.table, choice.as_text, chosen)
    table = SourceTable(
        choice.table, kind[0] == "p", chosen, tuple(parts), choice.where, choice.columns is None,
        frozenset(choice.as_text), tuple(column.name for column in columns if column.generated),
    )  # fmt: skip
    if choice.where is not None:
        _check_condition(leader, table)
    return table


def _refuse_missing(table: str, wanted: Sequence[str], columns: Sequence[CopyColumn]) -> None:
    missing = set(wanted) - {column.name for column in columns}
    if missing:
        raise GdqError(f'table {table} has no column "{min(missing)}"')


def _chosen(choice: CopyChoice, columns: Sequence[CopyColumn], *, generated: bool) -> tuple[CopyColumn, ...]:
    """The columns to copy, in the table's order."""
    wanted = choice.columns
    kept = [column for column in columns if wanted is None or column.name in wanted]
    _refuse_missing(choice.table, wanted or (), kept)
    refused = [column.name for column in kept if column.generated and not generated]
    if wanted is not None and refused:
        raise GdqError(
            f'column "{refused[0]}" of table {choice.table} is generated',
            hint="The target computes it: leave it out.",
        )
    kept = [column for column in kept if column.name not in refused]
    if not kept:
        raise GdqError(f"table {choice.table} has no column to copy")
    return tuple(kept)


def _check_condition(leader: Connection[Any], table: SourceTable) -> None:
    """GdqError if the server does not take the condition."""
    # no row is read: the server reads the statement alone
    query = f"select 1 from only {table.name} where ({table.condition}\n) limit 0"
    try:
        with leader.transaction():
            leader.execute(raw(query), prepare=False)
    except psycopg.ProgrammingError as error:
        raise GdqError(
            f"the condition of table {table.name} is refused: {error.diag.message_primary or error}",
            hint="It is SQL, such as region = 'EU'; types, functions and operators of your own need their schema.",
        ) from error
