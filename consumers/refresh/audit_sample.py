"""The keys that an audit compares: of changed rows, and of random rows of the target and of a table."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection, sql

from gdq.consumers.refresh.comparison import NO_EQUALITY
from gdq.consumers.refresh.view_refresh import ViewRefresh
from gdq.consumers.views.difference import NETTED_ROWS
from gdq.consumers.views.engine import NettedChanges
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.owner_sql import OwnerSql
from gdq.sql_text import is_null, quote
from gdq.typed.pgtypes import FIRST_USER_OID, READ_SETTINGS
from gdq.view.table_schema import apply_view_settings

if TYPE_CHECKING:
    from gdq.plan.key_source import KeySource

# A target of at most this number of blocks may be compared as a whole.
_BLOCKS_WHOLE = 8
# Keys that the refresh replaced and that go to the server once more, to take some of them.
_SENT_BYTES_MAX = 100_000
# Blocks of a table that a sample looks into.
_BLOCKS_READ = 2

_BLOCKS = """
select c.oid::pg_catalog.regclass::text,
       pg_catalog.pg_relation_size(c.oid) / pg_catalog.current_setting('block_size')::bigint
  from pg_catalog.pg_class c
 where c.relkind = 'r'
   and (c.oid = %(name)s::pg_catalog.regclass
        or c.oid in (select p.relid from pg_catalog.pg_partition_tree(%(name)s::pg_catalog.regclass) p))"""


@dataclass(frozen=True, slots=True)
class Probe:
    """Rows to compare: those whose columns each have one of some values, as text, None for NULL; without columns all.

    `kinds`: the type of each column in the tables' database and in the target's.
    """

    values: Mapping[str, Sequence[str | None]]
    kinds: Mapping[str, tuple[str, str]]

    @property
    def size(self) -> int:
        """The number of keys."""
        return max(map(len, self.values.values()), default=1)

    def smaller(self) -> Probe | None:
        """A probe of a quarter of the values; None if this one has a single value for each column."""
        if self.size == 1:
            return None
        most = max(1, self.size // 4)
        return replace(self, values={name: found[:most] for name, found in self.values.items()})

    def condition(self, connection: Connection[Any], *, target: bool) -> str:
        """The condition on the query's rows, or on the `target`'s."""
        parts = []
        for name, found in self.values.items():
            kind = self.kinds[name][target]
            texts = [sql.Literal(one).as_string(connection) for one in found if one is not None]
            among = [f"{quote(name)} in ({', '.join(f'{text}::{kind}' for text in texts)})"] if texts else []
            none = [is_null(quote(name))] if None in found else []
            parts.append(f"({' or '.join([*among, *none])})")
        return " and ".join(parts)


@dataclass(slots=True)
class KeySampler:
    """Chooses the keys for an audit. `computation` still holds the changes; None if nobody holds them."""

    work: ViewRefresh
    computation: NettedChanges | None
    holder: SnapshotHolder
    choices: random.Random
    kinds: Mapping[str, tuple[str, str]] = field(init=False)
    _blocks: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = self._kinds()
        self._blocks = _blocks(self.work.output, self.work.view.target) if self.work.lake is None else {}

    def is_small(self) -> bool:
        """True for a target that may be compared as a whole, if the query is cheap."""
        return sum(self._blocks.values()) <= _BLOCKS_WHOLE

    def probes(self) -> list[Probe]:
        """Probes for about as many keys as the view's setting says: one by all key columns, perhaps one by others."""
        from gdq.plan.key_source import key_sources  # noqa: PLC0415 (loads sqlglot, an extra)

        columns, most = tuple(self.kinds), self.work.view.audit_keys
        third = max(1, most // 3)
        sources = key_sources(self.work.plan.query, tuple(self.work.plan.schemas), columns)
        found: dict[tuple[str, ...], list[tuple[str | None, ...]]] = {}
        for names, rows in self._changed(sources, columns, third):
            found.setdefault(names, []).extend(rows[:third])
        for source in self.choices.sample(sources, min(1, len(sources))):
            found.setdefault(source.columns, []).extend(self._of_table(source, third))
        rows = self._of_target(columns, max(third, most - len(found.get(columns, ()))))
        made = [self._probe(columns, [*found.pop(columns, []), *rows])]
        if found:
            # may find rows that the target lacks
            names = self.choices.choice(list(found))
            made.append(self._probe(names, found[names]))
        return [probe for probe in made if probe.values and all(probe.values.values())]

    def _kinds(self) -> dict[str, tuple[str, str]]:
        """The columns that rows are chosen by, with their types: those that index the target, else all that can be."""
        work, found = self.work, {}
        enums = "select oid from pg_catalog.pg_type where oid = any (%s::oid[]) and typtype = 'e'"
        own = [oid for _, oid, _ in work.columns if oid >= FIRST_USER_OID]
        known = {oid for (oid,) in self.holder.connection.execute(enums, [own])} if own else set()
        for (name, oid, kind), column in zip(work.columns, work.types, strict=True):
            plain = kind not in NO_EQUALITY and not kind.endswith("[]")
            if plain and (oid < FIRST_USER_OID or oid in known):
                found[name] = (kind, column.type)
        if work.lake is not None:
            from gdq.consumers.lake.sample import lake_key_names  # noqa: PLC0415 (pyarrow is slow to load)

            found = {name: kinds for name, kinds in found.items() if name in lake_key_names(work.columns)}
        matched = {name: found[name] for name in work.plan.match if name in found}
        return matched or found

    def _probe(self, names: Sequence[str], rows: Sequence[Sequence[str | None]]) -> Probe:
        # each value once, in the order of the rows
        values = {name: list(dict.fromkeys(row[n] for row in rows)) for n, name in enumerate(names)}
        return Probe(values, {name: self.kinds[name] for name in names})

    def _changed(
        self, sources: Sequence[KeySource], columns: Sequence[str], most: int
    ) -> Iterable[tuple[tuple[str, ...], list[tuple[str | None, ...]]]]:
        """Keys of the changed rows of the view, and of the changed rows of its tables."""
        if self.computation is None:
            return
        query = _changed_keys(self.computation, columns)
        if query is not None:
            yield tuple(columns), self._rows(self.computation.connection, f"{query} limit {most}")
        for source in sources:
            delta = _delta_of(self.computation, source)
            if delta is not None:
                query = source.select(delta, source.columns)
                yield source.columns, self._rows(self.computation.connection, f"{query} limit {most}")

    def _of_target(self, columns: Sequence[str], most: int) -> list[tuple[str | None, ...]]:
        """Values of random rows of the target."""
        if self.work.lake is None:
            listed = ", ".join(f"{quote(name)}::text" for name in columns)
            return self._of_blocks(self.work.output, self._blocks, f"select {listed} from %s", most)
        from gdq.consumers.lake.sample import sample_lake_rows  # noqa: PLC0415 (pyarrow is slow to load)

        return sample_lake_rows(self.work.lake, columns, most, self.choices)

    def _of_table(self, source: KeySource, most: int) -> list[tuple[str | None, ...]]:
        blocks = _blocks(self.holder.connection, source.table)
        select = source.select("%s", source.columns)
        return self._of_blocks(self.holder.connection, blocks, select, most, quote(source.alias) + ".")

    def _of_blocks(
        self, connection: Connection[Any], blocks: Mapping[str, int], select: str, most: int, alias: str = ""
    ) -> list[tuple[str | None, ...]]:
        """Rows in random blocks, by a SELECT with %s for the table."""
        names = [name for name, number in blocks.items() if number]
        parts = []
        for name in self.choices.choices(names, [blocks[name] for name in names], k=_BLOCKS_READ) if names else []:
            first = self.choices.randrange(blocks[name])
            place = f"{alias}ctid >= '({first},0)'::tid and {alias}ctid < '({first + 1},0)'::tid"
            part = f"{select.replace('%s', name)} where {place} order by random() limit {most}"
            parts.append(f"({part})")
        rows = self._rows(connection, " union all ".join(parts)) if parts else []
        self.choices.shuffle(rows)
        return rows[:most]

    def _owned(self, connection: Connection[Any]) -> OwnerSql:
        if self.work.lake is None and connection is self.work.output:
            return self.work.target.sql(connection)
        return OwnerSql(connection, self.work.view.acts_as)

    def _rows(self, connection: Connection[Any], query: str) -> list[tuple[str | None, ...]]:
        """Rows of texts; none if a row cannot be computed, which may be one that the view does not show."""
        try:
            with connection.transaction(force_rollback=True):
                if connection is not self.holder.connection and (self.work.lake or connection is not self.work.output):
                    apply_view_settings(connection, READ_SETTINGS | self.work.view.settings)
                return self._owned(connection).rows(query)
        except (psycopg.DataError, psycopg.ProgrammingError, psycopg.NotSupportedError):
            return []


def _blocks(connection: Connection[Any], name: str) -> dict[str, int]:
    """The number of blocks of a table, or of each of its partitions."""
    return dict(connection.execute(_BLOCKS, {"name": name}).fetchall())


def _changed_keys(computation: NettedChanges, columns: Sequence[str]) -> str | None:
    """SELECT of some columns, as texts, of rows of the view that the refresh has changed; None if it does not know."""
    if NETTED_ROWS in computation.made:
        numbers = {column.name: n for n, column in enumerate(computation.types, 1)}
        return f"select {', '.join(f'c{numbers[name]}::text' for name in columns)} from {NETTED_ROWS}"
    known = {key.column: key for key in computation.replaced if len(key.array) <= _SENT_BYTES_MAX}
    if not known or {*columns} - known.keys():
        return None
    connection = computation.connection
    lists = [
        f"unnest({sql.Literal(known[name].array).as_string(connection)}::{known[name].array_type})" for name in columns
    ]
    names = [f"u{n}" for n in range(len(lists))]
    values = ", ".join(f"{name}::text" for name in names)
    return f"select {values} from rows from ({', '.join(lists)}) as u({', '.join(names)})"


def _delta_of(computation: NettedChanges, source: KeySource) -> str | None:
    """The netted changes of a source's table, if they have the columns that it reads."""
    for number, used in enumerate(computation.plan.tables, 1):
        name = f"pg_temp.gdq_delta_{number}"
        if used.name == source.table and name in computation.made and source.reads <= {*used.logged}:
            return name
    return None
