"""Random views over the tables of view_grammar: joins, subqueries, groups, windows and set operations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Columns of each table that are integers and that are text.
_INTEGERS = {
    "item": ("id", "k", "grp"),
    "fact": ("k", "grp", "qty"),
    "dim": ("k", "grp"),
    "part": ("id", "k", "n"),
    "few": ("id", "v"),
}
_TEXTS = {"item": ("note",), "fact": ("label",), "dim": ("name",), "part": ('"Name"',), "few": ()}
_TABLES = ("item", "item", "fact", "fact", "fact", "dim", "part", "few")
_DIRECTIONS = ("", "", " desc", " nulls first", " desc nulls last")


@dataclass(frozen=True, slots=True)
class _From:
    """What stands in FROM, and the columns that it offers."""

    sql: str
    integers: tuple[str, ...]
    texts: tuple[str, ...]
    size: int


class RandomView:
    """Draws one query from `rng`; every order in it is total as far as its rows can tell."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.aliases = 0

    def query(self) -> str:
        draw = self.rng.choice((self._plain, self._plain, self._grouped, self._grouped, self._distinct, self._set))
        query = self.rng.choice((draw, draw, draw, self._ranked, self._in_order))()
        return query if any(f" {table} t" in query for table in _TABLES) else self.query()

    def _alias(self) -> str:
        self.aliases += 1
        return f"t{self.aliases}"

    def _table(self) -> _From:
        table, alias = self.rng.choice(_TABLES), self._alias()
        qualified = [tuple(f"{alias}.{c}" for c in columns[table]) for columns in (_INTEGERS, _TEXTS)]
        return _From(f"{table} {alias}", qualified[0], qualified[1], 1)

    def _derived(self) -> _From:
        """A subquery: groups, distinct rows, or the rows that meet a condition."""
        inner, alias = self._table(), self._alias()
        a, b = (self.rng.choice(inner.integers) for _ in range(2))
        where = f" where {self._condition(inner, 1)}" if self.rng.random() < 0.5 else ""
        if self.rng.random() < 0.1:
            return _From(
                f"(values (1, 2, 3), (2, null, 1), (4, 1, 2)) {alias} (a, b, c)",
                tuple(f"{alias}.{c}" for c in "abc"),
                (),
                1,
            )
        sql = self.rng.choice(
            (
                f"select max({a}) as a, count(*) as b, min({b}) as c from {inner.sql}{where}",
                f"select {a} as a, {b} as b, {b} as c from {inner.sql}{where} order by {a}, {b} limit 4",
                f"select {a} as a, count(*) as b, max({b}) as c from {inner.sql}{where} group by {a}",
                f"select distinct {a} as a, {b} as b, {b} as c from {inner.sql}{where}",
                f"select {a} as a, {b} as b, {a} + {b} as c from {inner.sql}{where}",
                f"select {a} as a, {b} as b, count(*) over (partition by {a}) as c from {inner.sql}{where}",
            )
        )
        return _From(f"({sql}) {alias}", tuple(f"{alias}.{c}" for c in "abc"), (), 1)

    def _lateral(self, found: _From) -> _From:
        """Some rows, or a summary, of a table for every row of what is there."""
        inner, alias = self._table(), self._alias()
        a, b, own = (self.rng.choice(inner.integers) for _ in range(3))
        source = f"from {inner.sql} where {own} = {self.rng.choice(found.integers)}"
        sql = self.rng.choice(
            (
                f"select max({a}) as a, count(*) as b, min({b}) as c {source}",
                f"select {a} as a, {b} as b, {b} as c {source} order by {a}, {b} limit 2",
                f"select {a} as a, {b} as b, {b} as c {source} and {self._comparison(inner)}",
            )
        )
        kind, on = self.rng.choice((("cross join", ""), ("left join", " on true")))
        return _From(
            f"{found.sql} {kind} lateral ({sql}) {alias}{on}",
            found.integers + tuple(f"{alias}.{c}" for c in "abc"),
            found.texts,
            found.size + 1,
        )

    def _from(self, most: int = 3) -> _From:
        found = self._leaf()
        if most > 2 and self.rng.random() < 0.15:
            found = self._lateral(found)
        while found.size < most and self.rng.random() < 0.6:
            right = self._leaf()
            kind = self.rng.choice(("join", "join", "left join", "left join", "right join", "full join", "cross join"))
            on = f" on {self._equality(right, found)}"
            if kind in ("join", "left join", "right join") and self.rng.random() < 0.3:
                on += f" and {self._comparison(self.rng.choice((found, right)))}"
            if kind in ("join", "left join", "right join") and self.rng.random() < 0.2:
                on += f" and {self._equality(self.rng.choice((found, right)), found)}"
            if kind == "cross join":
                on = ""
            found = _From(
                f"{found.sql} {kind} {right.sql}{on}",
                found.integers + right.integers,
                found.texts + right.texts,
                found.size + 1,
            )
        return found

    def _leaf(self) -> _From:
        return self._derived() if self.rng.random() < 0.2 else self._table()

    def _equality(self, one: _From, other: _From) -> str:
        return f"{self.rng.choice(one.integers)} = {self.rng.choice(other.integers)}"

    def _comparison(self, source: _From) -> str:
        a, b = (self.rng.choice(source.integers) for _ in range(2))
        return self.rng.choice(
            (
                f"{a} > {self.rng.randint(0, 3)}",
                f"{a} is null",
                f"({a} is not null or {b} < 3)",
                f"{a} <> {self.rng.randint(1, 4)}",
                f"coalesce({a}, 0) <= coalesce({b}, 2)",
            )
        )

    def _condition(self, source: _From, depth: int) -> str:
        if depth <= 0 or self.rng.random() < 0.4:
            return self._comparison(source)
        inner = self._from(2)
        outer, own, other = self.rng.choice(source.integers), *(self.rng.choice(inner.integers) for _ in range(2))
        where = f"{own} = {outer}"
        if self.rng.random() < 0.3:
            where += f" and {self._equality(self.rng.choice((inner, source)), source)}"
        if self.rng.random() < 0.5:
            where += f" and {self._condition(inner, depth - 1)}"
        plain = f" where {self._comparison(inner)}" if self.rng.random() < 0.5 else ""
        return self.rng.choice(
            (
                f"exists (select 1 from {inner.sql} where {where})",
                f"not exists (select 1 from {inner.sql} where {where})",
                f"{outer} in (select {own} from {inner.sql}{plain})",
                f"{outer} not in (select {own} from {inner.sql} where {own} is not null)",
                f"{outer} < (select max({other}) from {inner.sql} where {where})",
                f"{outer} >= (select min({other}) from {inner.sql}{plain})",
                f"exists (select 1 from {inner.sql}{plain})",
                f"(exists (select 1 from {inner.sql} where {where}) or {self._comparison(source)})",
            )
        )

    def _where(self, source: _From) -> str:
        parts = [self._condition(source, 2) for _ in range(self.rng.choice((0, 1, 1, 2)))]
        return f" where {' and '.join(parts)}" if parts else ""

    def _some(self, names: Sequence[str], most: int) -> list[str]:
        return self.rng.sample(names, min(len(names), self.rng.randint(1, most)))

    def _plain(self, columns: int | None = None, word: str = "select") -> str:
        source = self._from()
        names = [self.rng.choice(source.integers) for _ in range(columns)] if columns else None
        outputs = names or [*self._some(source.integers, 3), *source.texts[:1]]
        if names is None and self.rng.random() < 0.2:
            outputs.append(self._scalar(source.integers))
        listed = ", ".join(f"{output} as o{n}" for n, output in enumerate(outputs))
        return f"{word} {listed} from {source.sql}{self._where(source)}"

    def _scalar(self, outer: Sequence[str]) -> str:
        """A subquery with one value, correlated by one of these columns."""
        inner = self._table()
        own, other = (self.rng.choice(inner.integers) for _ in range(2))
        call = self.rng.choice(("max", "count", "sum"))
        return f"(select {call}({other}) from {inner.sql} where {own} = {self.rng.choice(outer)})"

    def _distinct(self) -> str:
        return self._plain(word="select distinct")

    def _grouped(self) -> str:
        source = self._from()
        keys = self._some(source.integers + source.texts, 2)
        calls = self.rng.sample(("count(*)", "count({})", "sum({})", "min({})", "max({})", "count(distinct {})"), 2)
        outputs = [*keys, *(call.format(self.rng.choice(source.integers)) for call in calls)]
        numbers = [key for key in keys if key in source.integers]
        if self.rng.random() < 0.2:
            outputs.append(f"sum(case when {self._condition(source, 1)} then 1 else 2 end)")
        if numbers and self.rng.random() < 0.15:
            outputs.append(self._scalar(numbers))
        if self.rng.random() < 0.2:
            outputs = outputs[1:]
        listed = ", ".join(f"{output} as o{n}" for n, output in enumerate(outputs))
        having = f" having count(*) {self.rng.choice('<>')} 2" if self.rng.random() < 0.3 else ""
        return f"select {listed} from {source.sql}{self._where(source)} group by {', '.join(keys)}{having}"

    def _set(self) -> str:
        number = self.rng.randint(1, 2)
        word = self.rng.choice(("union", "union all", "except", "except all", "intersect", "intersect all"))
        return f"{self._plain(number)} {word} {self._plain(number)}"

    def _ranked(self) -> str:
        """The first rows of each partition; rows that tie are equal."""
        number = self.rng.randint(2, 3)
        columns = [f"o{n}" for n in range(number)]
        order = ", ".join(columns[1:])
        place = f"row_number() over (partition by o0 order by {order}) as place"
        return (
            f"select {', '.join(columns)}, place from (select {', '.join(columns)}, {place}"
            f" from ({self._plain(number)}) plain) ranked where place <= {self.rng.randint(1, 3)}"
        )

    def _in_order(self) -> str:
        """Windows without PARTITION BY over plain rows or groups; rows that tie are equal."""
        if self.rng.random() < 0.3:
            source = self._from(2)
            keys = [self.rng.choice(source.integers)]
            columns = [*keys, "count(*)", f"max({self.rng.choice(source.integers)})"]
            tail = f" from {source.sql}{self._where(source)} group by {keys[0]}"
        else:
            number = self.rng.randint(1, 3)
            keys = columns = [f"o{n}" for n in range(number)]
            tail = f" from ({self._plain(number)}) plain"
        first = f"{self.rng.choice(keys)}{self.rng.choice(_DIRECTIONS)}"
        order = ", ".join(
            [first, *(f"{key}{self.rng.choice(_DIRECTIONS)}" for key in self.rng.sample(keys, len(keys)))]
        )
        calls = [self._window(self.rng.choice(columns), order) for _ in range(self.rng.randint(1, 2))]
        shown = [*(columns if self.rng.random() < 0.6 else columns[1:]), *calls]
        return f"select {', '.join(f'{one} as w{n}' for n, one in enumerate(shown))}{tail}"

    def _window(self, column: str, order: str) -> str:
        call = self.rng.choice(("row_number()", "rank()", *("lag", "lead") * 3, *("frame",) * 6))
        if call in ("lag", "lead"):
            return f"{call}({column}, {self.rng.randint(0, 3)}) over (order by {order})"
        if call != "frame":
            return f"{call} over (order by {order})"
        start = self.rng.choice(("unbounded preceding", *(f"{n} preceding" for n in (1, 2, 3)), "current row"))
        end = self.rng.choice(("unbounded following", *(f"{n} following" for n in (1, 2)), *("current row",) * 3))
        frame = self.rng.choice(("", *(f" rows between {start} and {end}",) * 5, " range current row"))
        return f"{self.rng.choice(('sum', 'max', 'count', 'first_value'))}({column}) over (order by {order}{frame})"
