"""The rows that differ between two sides: first the buckets whose sums differ, then the rows in these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from threading import Event
from typing import Any

from psycopg import Connection, sql

from gdq.consumers.table_compare.shape import BUCKETS, TableShape
from gdq.consumers.table_compare.sides import Side, TwoSides
from gdq.sql_text import raw

# Rows that a cursor fetches at once.
_FETCHED = 2_000

# Seconds that a side's statement is waited for after the other side has failed.
_CANCEL_SECONDS = 10.0

# Called with the source's rows so far.
Tell = Callable[[int], None]
# kh, h, the key's texts, and how often the row is there.
_Row = tuple[int, int | None, list[str] | None, int]


@dataclass(frozen=True, slots=True)
class Differing:
    """The rows of one key that differ: `different` on both sides, `missing` in the target, `extra` there.

    `key`: its texts; None for a table without a key, whose rows `kh` names. `named`: both in one.
    """

    kh: int
    key: tuple[str, ...] | None
    different: int = 0
    missing: int = 0
    extra: int = 0

    @property
    def named(self) -> tuple[str, ...]:
        return (str(self.kh),) if self.key is None else self.key


@dataclass(frozen=True, slots=True)
class Sums:
    """The rows of both sides, and the buckets in which they differ."""

    source_rows: int
    target_rows: int
    differing: list[int]


def bucket_sums(sides: TwoSides, tell: Tell) -> Sums:
    """Read both sides whole, at the same time, and compare the sums of their buckets."""
    stopped = Event()
    with ThreadPoolExecutor(1, thread_name_prefix="gdq compare") as pool:
        future = pool.submit(_side_sums, sides.shape, sides.target, lambda _: None, stopped)
        try:
            ours = _side_sums(sides.shape, sides.source, tell, stopped)
            theirs = future.result()
        except BaseException:
            stopped.set()
            sides.target.connection.cancel_safe(timeout=_CANCEL_SECONDS)
            raise
    differing = [bucket for bucket in range(BUCKETS) if ours.get(bucket) != theirs.get(bucket)]
    return Sums(_total(ours), _total(theirs), differing)


def differing_rows(sides: TwoSides, condition: str, numbers: Sequence[int]) -> Iterator[Differing]:
    """The rows that differ among those of a condition on kh, where {} stands for `numbers`; in the order of kh."""
    # a literal, for a condition of the user may have a %, which marks a parameter
    listed = condition.format(f"'{{{','.join(map(str, numbers))}}}'::bigint[]")
    with (
        sides.source.connection.cursor(name="gdq_rows") as here,
        sides.target.connection.cursor(name="gdq_rows") as there,
    ):
        for cursor, side in ((here, sides.source), (there, sides.target)):
            cursor.itersize = _FETCHED
            cursor.execute(raw(side.rows_sql(sides.shape, listed)))
        yield from merge(here, there)


def merge(here: Iterable[_Row], there: Iterable[_Row]) -> Iterator[Differing]:
    """The rows that differ between two lists, both in the order of kh."""
    ours, theirs = _groups(here), _groups(there)
    one, other = next(ours, None), next(theirs, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one[0] < other[0]):
            assert one is not None
            yield from _differing(one[0], one[1], [])
            one = next(ours, None)
        elif one is None or other[0] < one[0]:
            yield from _differing(other[0], [], other[1])
            other = next(theirs, None)
        else:
            yield from _differing(one[0], one[1], other[1])
            one, other = next(ours, None), next(theirs, None)


def found_rows(side: Side, shape: TableShape, keys: Sequence[tuple[str, ...]]) -> list[_Row]:
    """The rows of some keys, in the order of kh."""
    found = side.found_sql(shape, shape.hashes)
    wanted = keys_sql(side.connection, shape, keys)
    select = f"""with wanted as ({wanted}) select kh, h, gdq_key, sum(w)::bigint from ({found}) as r
                  group by 1, 2, 3 having sum(w) <> 0 order by kh"""
    return side.connection.execute(raw(select)).fetchall()


def keys_sql(connection: Connection[Any], shape: TableShape, keys: Sequence[tuple[str, ...]]) -> str:
    """SELECT of keys as gdq_key, an array of texts each; they stand in it as literals of the connection.

    Without a key they are the hashes of rows.
    """
    parts = len(shape.key) or 1
    places = [f"k{place}" for place in range(1, parts + 1)]
    columns = ([key[place] for key in keys] for place in range(parts))
    arrays = ", ".join(f"{sql.Literal(column).as_string(connection)}::text[]" for column in columns)
    listed = ", ".join(places)
    return f"select array[{listed}] as gdq_key from unnest({arrays}) as k({listed})"


def differing_columns(sides: TwoSides, keys: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The columns that differ, for each of some keys that both sides have."""
    ours, theirs = (_values(side, sides.shape, keys) for side in (sides.source, sides.target))
    return {
        key: tuple(
            name for name, one, other in zip(sides.shape.rest, ours[key], theirs[key], strict=True) if one != other
        )
        for key in ours.keys() & theirs.keys()
    }


def _values(side: Side, shape: TableShape, keys: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], list[str]]:
    found = side.found_sql(shape, f"{shape.row_texts()} as texts")
    wanted = keys_sql(side.connection, shape, keys)
    select = f"""with wanted as ({wanted})
                 select gdq_key, texts from ({found}) as r group by gdq_key, texts having sum(w) > 0"""
    return {tuple(key): texts for key, texts in side.connection.execute(raw(select))}


def _side_sums(shape: TableShape, side: Side, tell: Tell, stopped: Event) -> dict[int, tuple[int, int]]:
    """Rows and sum of hashes of each bucket that has any; of the pieces up to now once it is stopped."""
    rows: Counter[int] = Counter()
    sums: Counter[int] = Counter()
    seen = 0
    for piece in side.pieces:
        if stopped.is_set():
            break
        for bucket, count, total in side.piece_sums(shape, piece):
            rows[bucket] += count
            sums[bucket] += int(total)
            seen += count
        tell(seen)
    for bucket, count, total in side.image_sums(shape):
        rows[bucket] += int(count)
        sums[bucket] += int(total)
    return {bucket: (rows[bucket], sums[bucket]) for bucket in rows if rows[bucket] or sums[bucket]}


def _total(sums: dict[int, tuple[int, int]]) -> int:
    return sum(rows for rows, _ in sums.values())


def _groups(rows: Iterable[_Row]) -> Iterator[tuple[int, list[_Row]]]:
    for kh, group in groupby(rows, itemgetter(0)):
        yield kh, list(group)


def _differing(kh: int, here: Iterable[_Row], there: Iterable[_Row]) -> Iterator[Differing]:
    """The rows of one kh that differ, key by key."""
    left: Counter[tuple[tuple[str, ...] | None, int | None]] = Counter()
    for sign, rows in ((1, here), (-1, there)):
        for _, h, key, count in rows:
            left[None if key is None else tuple(key), h] += sign * count
    for named in dict.fromkeys(key for (key, _), count in left.items() if count):
        counts = [count for (of, _), count in left.items() if of == named]
        lacking, surplus = sum(n for n in counts if n > 0), -sum(n for n in counts if n < 0)
        both = min(lacking, surplus)
        yield Differing(kh, named, both, lacking - both, surplus - both)
