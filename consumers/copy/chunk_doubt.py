"""Rows of a table without a key that a chunked copy is in doubt about: they have changed while the table was read.

A row that was updated between two steps may have been read at its old place and at the new one, or at neither. The log
says which rows came or went, by their texts, and no row with another text has left its place. So after a reading the
target's rows are right but for those with such texts: they are deleted, and the table is read again for these texts
alone. gdq_target.chunked_doubt has the hashes of the texts, by the number of the reading that looks for them. All rows
of one hash are in doubt together, so that two texts of one hash do no harm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.copy.chunk_table import ChunkTable, image_sql
from gdq.consumers.copy.chunk_target import Staged
from gdq.consumers.copy.target_columns import rows_of, same_form
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.sql_text import literal, quote, raw

# Rows that are read, until it is known which of them the target gets.
READ = "pg_temp.gdq_read"

# Bits that tell the source, roughly, which hashes are looked for: 128 kB, as text 256 kB.
_BITS = 2**20

# What the two servers must have in common if a row has one hash on both.
_HASHING = """
select current_setting('server_encoding'), hashtextextended('gdq' collate "C", 0)"""


@dataclass(frozen=True, slots=True)
class Doubts:
    """The doubts of a table in a copy, at its reading of that number. The first one looks for all rows."""

    connection: Connection[Any]
    copy: str
    table: ChunkTable
    target: str
    reading: int

    def condition(self, holder: SnapshotHolder) -> str | None:
        """What rows t of the source that are looked for fulfil, and some others; None if all are to be read.

        A hash of the source stands for that of the target only where both have the same types and encoding.
        """
        if self.reading == 1:
            return None
        names = [name for name, _ in self.table.columns]
        same = same_form(holder.connection, self.table.name, self.connection, self.target, names) == "binary"
        here, there = (one.execute(_HASHING).fetchone() for one in (holder.connection, self.connection))
        if not same or here != there:
            return None
        query = f"select distinct image & {_BITS - 1} from ({self._images(self.reading)}) as d limit {_BITS // 2}"
        numbers = [number for (number,) in self.connection.execute(raw(query))]
        if len(numbers) == _BITS // 2:
            return None
        bits = bytearray(_BITS // 8)
        for number in numbers:
            bits[number // 8] |= 1 << number % 8
        own = self._hash(f"t.{quote(name)}" for name in names)
        return f"get_bit('\\x{bits.hex()}'::bytea, {own} & {_BITS - 1}) = 1"

    def make_stage(self) -> None:
        """Make the temporary table READ."""
        self.connection.execute(
            raw(
                f"create temp table gdq_read on commit drop as "
                f"select {self.table.listed} from {self.target} as t with no data"
            )
        )

    def insert_read(self) -> int:
        """Insert the rows of READ that are looked for, and have not changed in this reading; returns their number."""
        own = self._hash(f"r.{quote(name)}" for name, _ in self.table.columns)
        wanted = f"{own} in ({self._images(self.reading)}) and " if self.reading > 1 else ""
        return self._linear(
            f"insert into {self.target} ({self.table.listed}) overriding system value select {self.table.listed} "
            f"from {READ} as r where {wanted}"
            f"not exists (select from ({self._images(self.reading + 1)}) as d where d.image = {own})"
        )

    def note(self, staged: Staged) -> None:
        """Have the next reading look for the changed rows, if this one does."""
        place = f"{self._of_table}, {self.reading + 1}"
        wanted = f"where image in ({self._images(self.reading)})" if self.reading > 1 else ""
        self._linear(
            f"insert into gdq_target.chunked_doubt (copy, table_name, reading, image) "
            f"select distinct {place}, image from (select {self._staged_hash(staged)} as image "
            f"from {staged.name} as c) as c {wanted} on conflict do nothing"
        )

    def purge(self) -> int:
        """Delete the target's rows that the next reading looks for; returns their number."""
        if not self._has_next():
            return 0
        own = self._hash(f"t.{quote(name)}" for name, _ in self.table.columns)
        rows = rows_of(self.connection, self.target)
        return self._linear(f"delete from {rows} as t where {own} in ({self._images(self.reading + 1)})")

    def leave_sure(self, staged: Staged) -> bool:
        """Delete what is staged of rows that this reading looks for; False if that is all."""
        if self.reading == 1:
            self.connection.execute(raw(f"drop table {staged.name}"))
            return False
        doubtful = f"{self._staged_hash(staged)} in ({self._images(self.reading)})"
        self._linear(f"delete from {staged.name} as c where net = 0 or {doubtful}")
        return True

    def end_reading(self) -> bool:
        """Forget what this reading has looked for; True if there has to be another one."""
        where = f"where (copy, table_name) = ({self._of_table})"
        self.connection.execute(raw(f"delete from gdq_target.chunked_doubt {where} and reading <= {self.reading}"))
        return self._has_next()

    @property
    def _of_table(self) -> str:
        return f"{literal(self.copy)}, {literal(self.table.name)}"

    def _images(self, reading: int) -> str:
        return (
            f"select image from gdq_target.chunked_doubt "
            f"where (copy, table_name, reading) = ({self._of_table}, {reading})"
        )

    def _has_next(self) -> bool:
        return bool(scalar(self.connection, raw(f"select exists ({self._images(self.reading + 1)})")))

    def _staged_hash(self, staged: Staged) -> str:
        return self._hash(f"c.c{number}" for number in range(1, len(staged.table.columns) + 1))

    @staticmethod
    def _hash(columns: Iterable[str]) -> str:
        return f"hashtextextended({image_sql(columns)}, 0)"

    def _linear(self, statement: str) -> int:
        """Run a statement whose joins are made by hashes: nobody knows how many doubts there are."""
        self.connection.execute("set local enable_nestloop = off")
        number = self.connection.execute(raw(statement)).rowcount
        self.connection.execute("set local enable_nestloop to default")
        return number
