"""A view's rows beside its query's, and whether the query gives the same rows whenever its tables hold the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import Connection

from gdq.sql_text import quote, raw

# Types without an equality for EXCEPT: they are compared as text.
_AS_TEXT = {"json", "xml", "jsonpath", "point", "line", "lseg", "box", "path", "polygon", "circle", "pg_snapshot"}
_FLOATS = {"float4", "float8"}
_SHUFFLES = 8
_PLANS = (
    "", "enable_hashagg = off", "enable_hashjoin = off", "enable_nestloop = off", "enable_sort = off",
    "enable_mergejoin = off", "enable_material = off", "enable_indexscan = off",
)  # fmt: skip


def columns_of(connection: Connection[Any], table: str) -> list[tuple[str, str, bool]]:
    """The columns of a table: name, plain name of the type, whether values can be compared."""
    query = """select a.attname, coalesce(nullif(e.typname, ''), t.typname)
                 from pg_catalog.pg_attribute a join pg_catalog.pg_type t on t.oid = a.atttypid
                 left join pg_catalog.pg_type e on e.oid = t.typelem and t.typcategory = 'A'
                where a.attrelid = %s::pg_catalog.regclass and a.attnum > 0 and not a.attisdropped order by a.attnum"""
    return [(name, kind, kind not in _AS_TEXT) for name, kind in connection.execute(query, [table])]


def differences(connection: Connection[Any], target: str, query: str) -> tuple[int, int]:
    """Rows that the target lacks, and rows that it has too many; floats may differ by one part in 10^9."""
    columns = columns_of(connection, target)
    try:
        with connection.transaction():
            return _differences(connection, target, query, columns)
    except psycopg.errors.UndefinedFunction:  # a type of the suite without an equality
        return _differences(connection, target, query, [(name, kind, False) for name, kind, _ in columns])


def _differences(
    connection: Connection[Any], target: str, query: str, columns: Sequence[tuple[str, str, bool]]
) -> tuple[int, int]:
    names = ", ".join(f"c{number}" for number in range(len(columns)))
    items = ", ".join(
        f"c{number}" if equal else f"c{number}::text as c{number}" for number, (_, _, equal) in enumerate(columns)
    )
    ours = f"select {items} from (select * from {target}) as t ({names})"
    theirs = f"select {items} from (select * from ({query}\n) as q) as t ({names})"
    missing, extra = (
        connection.execute(raw(f"{one} except all {other}")).fetchall()
        for one, other in ((theirs, ours), (ours, theirs))
    )
    if any(kind in _FLOATS for _, kind, _ in columns) and len(missing) == len(extra):
        left = list(extra)
        missing = [row for row in missing if not _taken(row, left)]
        extra = left
    return len(missing), len(extra)


def _taken(row: tuple[Any, ...], left: list[tuple[Any, ...]]) -> bool:
    found = next((other for other in left if all(map(_close, row, other))), None)
    if found is not None:
        left.remove(found)
    return found is not None


def _close(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other))
    return one == other


def is_determined(connection: Connection[Any], query: str, leaves: Sequence[str]) -> bool:
    """True if the query gives the same rows when its tables' rows are stored in another order, by other plans.

    All is rolled back.
    """
    results = []
    for number in range(_SHUFFLES):
        with connection.transaction(force_rollback=True):
            connection.execute(
                "set local session_replication_role = replica; set local max_parallel_workers_per_gather = 0"
            )
            for leaf in leaves:
                _shuffle(connection, leaf)
            if _PLANS[number % len(_PLANS)]:
                connection.execute(raw(f"set local {_PLANS[number % len(_PLANS)]}"))
            results.append(
                Counter(str(row) for row in connection.execute(raw(f"select q::text from ({query}\n) as q")))
            )
        if results[-1] != results[0]:
            return False
    return True


def _shuffle(connection: Connection[Any], leaf: str) -> None:
    query = """select attname from pg_catalog.pg_attribute where attrelid = %s::pg_catalog.regclass and attnum > 0
                  and not attisdropped and attgenerated = '' order by attnum"""
    names = ", ".join(quote(name) for (name,) in connection.execute(query, [leaf]))
    if not names:
        return
    connection.execute(raw(f"create temp table gdq_shuffled as select {names} from only {leaf} order by random()"))
    connection.execute(raw(f"delete from only {leaf}"))
    into = f"insert into {leaf} ({names}) overriding system value"
    connection.execute(raw(f"{into} select {names} from pg_temp.gdq_shuffled"))
    connection.execute("drop table pg_temp.gdq_shuffled")
