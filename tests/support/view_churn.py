"""Random transactions over the tables of view_grammar: what makes a view wrong that forgets a key, a NULL or a copy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_NOTES = ("null", "''", "'a'", "'b'", "'A'")
_VALUES: dict[str, tuple[str, ...]] = {
    "k": ("null", "1", "2", "3", "4", "5", "6", "7", "8"),
    "grp": ("null", "1", "2", "3", "4"),
    "amount": ("null", "-1", "0.05", "2.50", "10", "99.99", "'NaN'"),
    "flag": ("null", "true", "false"),
    "ratio": ("null", "0", "'-0'", "0.25", "0.5", "-1.75", "1024", "'NaN'", "'Infinity'"),
    "note": _NOTES,
    "doc": ("null", """'{"a": 1}'""", """'{"a":1}'""", "'[]'"),
    "label": _NOTES,
    "qty": ("null", "0", "1", "2", "3", "4", "5"),
    "price": ("null", "1", "1.0", "0.5", "0.3333333333333333333333", "12345.678", "'NaN'"),
    "name": _NOTES,
    "extra": _NOTES,
    "n": ("null", "1", "2", "9000000000"),
    '"Name"': _NOTES,
    "at": ("null", "'2026-01-31 23:30+00'", "'2026-02-01 01:30+02'", "'2026-02-01 12:00+00'", "'infinity'"),
    "tags": ("null", "'{}'", "'{1,2}'", "'{1,NULL}'", "'{2}'"),
    "props": ("null", """'{"a": 1}'""", """'{"a": 1.0}'""", "'[]'", "'null'"),
    "mood": ("null", "'sad'", "'calm'", "'glad'"),
    "code": ("null", "'a'", "'a  '", "'ab'"),
    "v": ("null", "0", "1", "3", "6"),
}
_COLUMNS = {
    "item": ("grp", "k", "amount", "flag", "ratio", "note", "doc", "at"),
    "fact": ("k", "grp", "label", "qty", "price", "tags", "props"),
    "dim": ("grp", "name", "extra", "mood"),
    "part": ("k", "n", '"Name"', "mood", "code"),
    "few": ("v",),
}
_FACTS_MAX = 45

Statements = list[str]


def fill(rng: random.Random) -> Statements:
    """Statements that empty all tables and fill them anew."""
    statements = ["truncate item, fact, dim, part, few"]
    for table, number in (("item", 20), ("fact", 16), ("dim", 6), ("part", 16), ("few", 2)):
        statements += [_insert(rng, table) for _ in range(number)]
    return statements


def transaction(rng: random.Random, tables: Sequence[str]) -> Statements:
    """One transaction over some of `tables`, from begin to commit or rollback."""
    statements: Statements = []
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        statements += _step(rng, rng.choice(tables))
    if rng.random() < 0.2:
        statements += ["savepoint s", *_step(rng, rng.choice(tables)), rng.choice(("rollback to s", "release s"))]
    if "fact" in tables:
        statements.append(f"delete from fact where ctid in (select ctid from fact order by ctid offset {_FACTS_MAX})")
    end = "rollback" if rng.random() < 0.1 else "commit"
    return ["begin", *statements, end]


def _step(rng: random.Random, table: str) -> Statements:
    steps: list[tuple[int, Callable[[], Statements]]] = [
        (5, lambda: [_insert(rng, table)]),
        (5, lambda: [_update(rng, table)]),
        (3, lambda: [f"delete from {table} where {_rows(rng, table)}"]),
        (1, lambda: _there_and_back(rng, table)),
        (1, lambda: [_again(rng, table)]),
        (1, lambda: _move(rng, table)),
        (1, lambda: _delete_together(rng, table)),
    ]
    return rng.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()


def _value(rng: random.Random, column: str) -> str:
    return rng.choice(_VALUES[column])


def _insert(rng: random.Random, table: str) -> str:
    columns = _COLUMNS[table]
    values = ", ".join(_value(rng, column) for column in columns)
    listed = ", ".join(columns)
    if table == "fact":
        return f"insert into fact ({listed}) select {values} from generate_series(1, {rng.choice((1, 1, 2, 4))})"
    key = {"item": "id", "dim": "k", "part": "id, region", "few": "id"}[table]
    number = rng.randint(1, {"item": 45, "dim": 8, "part": 24, "few": 4}[table])
    keys = f"{number}, {rng.randint(0, 2)}" if table == "part" else str(number)
    changed = ", ".join(f"{column} = excluded.{column}" for column in columns)
    return (
        f"insert into {table} ({key}, {listed}) values ({keys}, {values}) on conflict ({key}) do update set {changed}"
    )


def _update(rng: random.Random, table: str) -> str:
    columns = rng.sample(_COLUMNS[table], min(len(_COLUMNS[table]), rng.choice((1, 1, 2))))
    changes = ", ".join(f"{column} = {_value(rng, column)}" for column in columns)
    return f"update {table} set {changes} where {_rows(rng, table)}"


def _rows(rng: random.Random, table: str) -> str:
    """A condition that a few rows meet; one copy of several equal ones in fact."""
    if table == "few":
        return rng.choice(("true", f"id = {rng.randint(1, 4)}"))
    if table == "dim":
        return rng.choice((f"k = {rng.randint(1, 8)}", f"grp is not distinct from {_value(rng, 'grp')}"))
    column = rng.choice(("k", "grp" if table != "part" else "n"))
    value = _value(rng, column)
    some = f"{column} is not distinct from {value}"
    if table == "fact":
        return rng.choice((f"{some} and qty = {rng.randint(0, 5)}", _one(table, some), _one(table, some)))
    return rng.choice((some, f"id = {rng.randint(1, 45)}", f"id between {(low := rng.randint(1, 24))} and {low + 2}"))


def _one(table: str, condition: str) -> str:
    return f"ctid = (select min(ctid) from {table} where {condition})"


def _there_and_back(rng: random.Random, table: str) -> Statements:
    """Rows that are at the end as they were: the net change is nothing."""
    column = "v" if table == "few" else "grp" if table != "part" else "k"
    if table == "fact":
        return ["update fact set grp = grp + 10", "update fact set grp = grp - 10 where grp > 10"]
    rows = _rows(rng, table) if table in ("few", "part") else f"k = {rng.randint(1, 8)}"
    moved = f"{column} = {column} + 1000"
    return [
        f"update {table} set {moved} where {rows}",
        f"update {table} set {column} = {column} - 1000 where {column} > 900",
    ]


def _again(rng: random.Random, table: str) -> str:
    """Rows deleted and inserted again as they were; of a bag sometimes twice."""
    if table == "fact":
        rows = _rows(rng, table)
        gone = f"with gone as (delete from fact where {rows} returning *)"
        return f"{gone} insert into fact select gone.* from gone, generate_series(1, {rng.choice((1, 2))})"
    return f"update {table} set {_COLUMNS[table][0]} = {_COLUMNS[table][0]}"


def _move(rng: random.Random, table: str) -> Statements:
    """Rows that change their key, or their partition."""
    if table == "part":
        there = "exists (select from part p where p.id = part.id and p.region = (part.region + 1) % 3)"
        return [f"update part set region = (region + 1) % 3 where id % 4 = {rng.randint(0, 3)} and not {there}"]
    if table == "fact":
        return [f"update fact set k = {_value(rng, 'k')} where k is not distinct from {_value(rng, 'k')}"]
    key = "k" if table == "dim" else "id"
    most = {"item": 45, "dim": 8, "few": 4}[table]
    old, new = rng.randint(1, most), rng.randint(1, most)
    return [
        f"update {table} set {key} = {new} where {key} = {old} and not exists (select from {table} where {key} = {new})"
    ]


def _delete_together(rng: random.Random, table: str) -> Statements:
    """Both sides of a join go in one transaction."""
    if table == "few":
        return ["delete from few"]
    k = rng.randint(1, 8)
    return [f"delete from {other} where k = {k}" for other in ("item", "fact", "dim", "part")]
