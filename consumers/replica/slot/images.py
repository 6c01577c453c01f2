"""The changes of one table that a slot sent, netted in the target: key by key, by the first and the last change.

A slot sends changes in their order. So a row was there before if the first change of its key is an update or a delete,
and is there afterwards unless the last one is a delete. An update that moves a row to another key is a delete of the
old key and an insert of the new one. This needs no old row beyond its key. Of a table without a key the slot sends the
whole old rows, which are added up with their signs; so they are where two rows may have one key for a while, as in
`update t set id = 3 - id` under a deferrable key.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import IO, Any, cast

from psycopg import Connection

from gdq.consumers.replica.changes import STAGE, make_stage
from gdq.consumers.replica.table import ReplicaColumn, ReplicaTable
from gdq.consumers.slot.catalog import CatalogTable
from gdq.consumers.slot.copy_text import copy_text
from gdq.consumers.slot.pgoutput import RowMessage, TupleData, TupleValue
from gdq.errors import GdqError
from gdq.sql_text import quote, raw

_CHANGE = "pg_temp.gdq_replica_change"

# Memory for the changes of one table before they go to a file.
_MEMORY_BYTES = 8 * 1024 * 1024
_BLOCK_BYTES = 1 << 16

# Rows from which on the planner is told what a temporary table holds.
_ANALYZE_ROWS = 1_000

_NULL = rb"\N"
_WAYS = ("asc", "desc")


class SlotImages:
    """The changes of a table under one description, as lines for COPY.

    A line has its number, its kind, the places of large values that an update left unchanged, the old key of a row that
    moved to another, and the row. Kinds: i, a row came to this key; u, it was updated; d, it left this key, of which
    the line has the key alone; o, the same with all columns; p, what is passed over changed the row of this key.
    """

    def __init__(self, table: CatalogTable) -> None:
        self.table = table
        columns = table.relation.columns
        self._key = [place for place, column in enumerate(columns) if column.name in table.key]
        # without a key nothing but whole old rows is taken
        self._whole = table.whole or not table.key
        self._sent = [self._whole or column.name in table.key for column in columns]
        self._rows = cast("IO[bytes]", tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES, prefix="gdq-slot-"))  # noqa: SIM115
        self.count = 0
        self.partial = False
        self._passed = False

    def close(self) -> None:
        """Free the changes."""
        self._rows.close()

    def add(self, row: RowMessage) -> None:
        """Add a change; GdqError if it came without the row's key, or without the old row of a table that has none."""
        sent = row.old or row.old_key
        if not self._key and row.op != "insert" and row.old is None:
            raise GdqError(
                f"the slot sent a change of table {self.table.name}, which has no key, without the old row",
                hint="Give the table REPLICA IDENTITY FULL, and each of its partitions; then copy it again: "
                f"gdq replicate ... --copy-again '{self.table.name}'",
            )
        if row.new is None:
            if sent is not None:
                self._left(sent)
            return
        new = row.new if sent is None else self._filled(row.new, sent)
        if row.op == "insert":
            self._write(b"i", new)
            return
        moved = sent is not None and self._key_of(sent) != self._key_of(new)
        if sent is not None and (moved or self._whole):
            self._left(sent)
        self._write(b"i" if moved else b"u", new, self._key_of(sent) if moved and sent is not None else None)

    def pass_over(self, row: RowMessage) -> None:
        """Note a change that came from the target: what the source made of its keys before, that has overwritten.

        Without a key rows only come and go, whatever becomes of others.
        """
        if not self._key:
            return
        self._passed = True
        sent = row.old or row.old_key
        if sent is not None:
            self._write(b"p", sent)
        if row.new is not None:
            self._write(b"p", row.new if sent is None else self._filled(row.new, sent))

    def _left(self, sent: TupleData) -> None:
        self._write(b"o" if self._whole else b"d", sent)

    def _filled(self, new: TupleData, sent: TupleData) -> TupleData:
        """A new row with the values of the old one that were not sent again."""
        return tuple(sent[place] if value.unchanged and self._sent[place] else value for place, value in enumerate(new))

    def _key_of(self, row: TupleData) -> list[bytes | None]:
        return [row[place].data for place in self._key]

    def _write(self, kind: bytes, row: TupleData, moved_from: Sequence[bytes | None] | None = None) -> None:
        if None in self._key_of(row):
            raise GdqError(
                f"the slot sent a change of table {self.table.name} without its key",
                hint="Has each partition the replica identity of the table?",
            )
        missing = [str(place) for place, value in enumerate(row, 1) if value.unchanged]
        self.partial = self.partial or bool(missing)
        self.count += 1
        before = [_NULL] * len(self._key) if moved_from is None else [copy_text(value or b"") for value in moved_from]
        start = [b"%d" % self.count, kind, b"{%s}" % ",".join(missing).encode() if missing else _NULL]
        self._rows.write(b"\t".join([*start, *before, *map(_text, row)]) + b"\n")

    def stage(self, target: Connection[Any], table: ReplicaTable, *, whole: bool, inserts_missing: bool) -> None:
        """Make the staging table of a replica's table, and fill it with the net change.

        `whole`: with all columns of old rows; GdqError if the slot does not send them. `inserts_missing`: updated rows
        that the target lacks will be inserted. GdqError if one is to be inserted of which not all values were sent.
        """
        if whole and not self._whole:
            raise GdqError(
                f"the slot does not send the old rows of table {table.name}, which the answers to its conflicts need",
                hint=f"ALTER TABLE {table.name} REPLICA IDENTITY FULL, or give other answers by --on-conflict.",
            )
        if self._key and not table.keyed and not self._whole:
            raise GdqError(
                f"the target computes a column of the key of table {table.name}, and the slot sends no old rows",
                hint=f"ALTER TABLE {table.name} REPLICA IDENTITY FULL, or have the target store the column.",
            )
        make_stage(target, table)
        placed = self._placed(table)
        self._copy(target, placed)
        if table.keyed:
            staged = self._net_keys(target, table, placed, whole=whole, inserts_missing=inserts_missing)
        else:
            staged = _net_rows(target, placed)
        target.execute(f"drop table {_CHANGE}")
        if staged >= _ANALYZE_ROWS:
            target.execute(f"analyze {STAGE}")

    def _net_keys(
        self,
        target: Connection[Any],
        table: ReplicaTable,
        placed: Sequence[tuple[int, ReplicaColumn]],
        *,
        whole: bool,
        inserts_missing: bool,
    ) -> int:
        """Fill the staging table by the first and the last change of each key; the number of rows."""
        key = ", ".join(f"c{place}" for place, column in placed if column.is_key)
        if self._passed:
            last = f"select {key}, max(n) as n from {_CHANGE} where kind = 'p' group by {key}"
            same = " and ".join(f"c.c{place} = p.c{place}" for place, column in placed if column.is_key)
            target.execute(raw(f"delete from {_CHANGE} c using ({last}) p where {same} and c.n <= p.n"))
        if self.table.deferrable:
            return _net_rows(target, placed)
        if self.partial:
            _fill(target, table, placed, key)
        values = ", ".join(f"c{place}" for place, _ in placed)
        of_old = ", ".join(f"c{place}" if whole or column.is_key else "null" for place, column in placed)
        first, last = (f"(select distinct on ({key}) * from {_CHANGE} order by {key}, n {way})" for way in _WAYS)
        staged = target.execute(
            raw(
                f"""insert into {STAGE} select false, {of_old} from {first} f where kind <> 'i'
                union all select true, {values} from {last} l where kind in ('i', 'u')"""
            )
        ).rowcount
        if self.partial:
            same = " and ".join(f"f.c{place} = l.c{place}" for place, column in placed if column.is_key)
            lacking = f"{last} l where kind in ('i', 'u') and missing is not null"
            if not inserts_missing:
                lacking += f" and exists (select from {first} f where {same} and f.kind = 'i')"
            self._refuse(target, lacking)
        return staged

    def _placed(self, table: ReplicaTable) -> list[tuple[int, ReplicaColumn]]:
        """The columns that travel, in their order, each with its place in the slot's description."""
        places = {column.name: place for place, column in enumerate(self.table.relation.columns, 1)}
        return [(places[column.name], column) for column in table.columns]

    def _copy(self, target: Connection[Any], placed: Sequence[tuple[int, ReplicaColumn]]) -> None:
        types = {place: column.stage for place, column in placed}
        columns = [f"o{place + 1} {types[place + 1]}" for place in self._key]
        columns += [f"c{place} {types.get(place, 'text')}" for place in range(1, len(self.table.relation.columns) + 1)]
        target.execute(
            raw(
                'create temp table gdq_replica_change (n bigint, kind "char", missing smallint[], '
                f"{', '.join(columns)}) on commit drop"
            )
        )
        self._rows.seek(0)
        with target.cursor().copy(raw(f"copy {_CHANGE} from stdin (encoding 'UTF8')")) as copy:
            while block := self._rows.read(_BLOCK_BYTES):
                copy.write(block)

    def _refuse(self, target: Connection[Any], lacking: str) -> None:
        """GdqError if there are changes of rows that the target lacks."""
        row = target.execute(raw(f"select count(*) from {lacking}")).fetchone()
        if row is not None and row[0]:
            raise GdqError(
                f"table {self.table.name} of the target lacks {row[0]} rows, of which the slot has not sent the large "
                "values that an update left unchanged",
                hint=f"Copy the table again: gdq replicate ... --copy-again '{self.table.name}'",
            )


def _text(value: TupleValue) -> bytes:
    return _NULL if value.data is None else copy_text(value.data)


def _net_rows(target: Connection[Any], placed: Sequence[tuple[int, ReplicaColumn]]) -> int:
    """Fill the staging table by what is left of all images, of which the old ones are whole; the number of rows."""
    values = ", ".join(f"c{place}" for place, _ in placed)
    query = f"""insert into {STAGE}
        select net > 0, {values}
          from (select {values}, sum(case when kind in ('i', 'u') then 1 else -1 end) as net
                  from {_CHANGE} where kind <> 'p'
                 group by {values} having sum(case when kind in ('i', 'u') then 1 else -1 end) <> 0) r,
               generate_series(1, abs(net))"""
    return target.execute(raw(query)).rowcount


def _fill(target: Connection[Any], table: ReplicaTable, placed: Sequence[tuple[int, ReplicaColumn]], key: str) -> None:
    """Fill in the large values that updates left unchanged, of the rows that stay.

    Each is that of the row's change before, also under an older key, or else that of the row in the target.
    """
    target.execute(raw(f"create index on {_CHANGE} ({key}, n); analyze {_CHANGE}"))
    keys = [(place, column) for place, column in placed if column.is_key]
    before = ", ".join(f"coalesce({{0}}.o{place}, {{0}}.c{place}) as k{place}" for place, _ in keys)
    found = " and ".join(f"p.c{place} = w.k{place}" for place, _ in keys)
    came = ", ".join(
        f"case when {place} = any (w.open) and not coalesce({place} = any (p.missing), false)"
        f" then p.c{place} else w.c{place} end"
        for place, _ in placed
    )
    filled = ", ".join(
        f"c{place} = case when {place} = any (r.open) then {theirs} else r.c{place} end"
        for place, column in placed
        for theirs in (column.travelling(f"t.{quote(column.name)}"),)
        if not column.is_key
    )
    of_target = " and ".join(
        f"t.{quote(column.name)} {column.equal} {column.typed(f'r.k{place}')}" for place, column in keys
    )
    target.execute(
        raw(
            f"""with recursive last as (
                  select distinct on ({key}) * from {_CHANGE} order by {key}, n desc
                ), walk as (
                  select l.n as at, l.n, l.missing as open, {before.format("l")},
                         {", ".join(f"l.c{place}" for place, _ in placed)}
                    from last l where l.kind in ('i', 'u') and l.missing is not null
                  union all
                  select w.at, p.n,
                         array(select unnest(w.open) intersect select unnest(p.missing)), {before.format("p")}, {came}
                    from walk w cross join lateral (
                      select * from {_CHANGE} p where {found} and p.n < w.n and p.kind in ('i', 'u')
                       order by p.n desc limit 1) p
                   where w.open <> '{{}}')
                update {_CHANGE} u
                   set {filled}, missing = case when t.tableoid is null then nullif(r.open, '{{}}') end
                  from (select distinct on (at) * from walk order by at, n) r left join {table.target} t on {of_target}
                 where u.n = r.at"""
        )
    )
