"""Spark's SQL for the joined rows of a view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlglot import exp

from gdq.plan.leaf import Leaf
from gdq.plan.spark.parts import LeafRole


@dataclass(slots=True)
class JoinedLeaf:
    """One leaf with its role, conditions, columns and join keys, collected while planning."""

    leaf: Leaf
    role: LeafRole
    where: list[exp.Expr] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)
    # (own key, the other leaf, its key) of every equality of its join
    links: list[tuple[str, str, str]] = field(default_factory=list)
    # conditions of its join, for roles but inner, and its side of the equalities among them
    on: list[exp.Expr] = field(default_factory=list)
    own: list[str] = field(default_factory=list)


def joined_rows_sql(
    parts: Mapping[str, JoinedLeaf],
    equalities: Sequence[tuple[str, str, str, str]],
    values: Sequence[tuple[str, str, str]],
) -> str:
    """Spark's SELECT of the joined rows: values, and w."""
    inner = [alias for alias, part in parts.items() if part.role == "inner"]
    placed, left = [inner[0]], inner[1:]
    sources = [f"gdq_{inner[0]} {inner[0]}"]
    waiting = list(equalities)
    while left:
        linked = [
            a for a in left if any({one, other} <= {a, *placed} and a in (one, other) for one, _, other, _ in waiting)
        ]
        alias = linked[0] if linked else left[0]
        left.remove(alias)
        placed.append(alias)
        ready = [link for link in waiting if {link[0], link[2]} <= set(placed)]
        waiting = [link for link in waiting if link not in ready]
        on = " and ".join(f"{a}.{x} = {b}.{y}" for a, x, b, y in ready)
        sources.append(f"join gdq_{alias} {alias} on {on}" if on else f"cross join gdq_{alias} {alias}")
    now, before = [f"{alias}.n" for alias in inner], [f"{alias}.o" for alias in inner]
    for alias, part in parts.items():
        if part.role == "inner":
            continue
        on = " and ".join(f"{alias}.{own} = {other}.{key}" for own, other, key in part.links)
        keys = list(dict.fromkeys(own for own, _, _ in part.links))
        if part.role == "padded":
            sources.append(f"left join ({_padded(alias, keys, list(part.columns))}) {alias} on {on}")
            now.append(f"coalesce({alias}.n, 1)")
            before.append(f"coalesce({alias}.o, 1)")
            continue
        listed = ", ".join(keys)
        counted = f"select {listed}, sum(n) as n, sum(o) as o from gdq_{alias} group by {listed}"
        there, gone = ("1", "0") if part.role == "exists" else ("0", "1")
        sources.append(f"{'' if part.role == 'exists' else 'left '}join ({counted}) {alias} on {on}")
        now.append(f"if(coalesce({alias}.n, 0) > 0, {there}, {gone})")
        before.append(f"if(coalesce({alias}.o, 0) > 0, {there}, {gone})")
    shown = "".join(f"{alias}.{name}, " for name, alias, _ in values)
    weight = f"{' * '.join(now)} - {' * '.join(before)}"
    return f"select {shown}{weight} as w from {' '.join(sources)}"


def _padded(alias: str, keys: Sequence[str], columns: Sequence[str]) -> str:
    """The padded side plus a row of NULLs per key; its n or o is 1 if the key has or had no rows."""
    nulls = ", ".join(name if name in keys else f"cast(null as string) as {name}" for name in columns)
    listed = ", ".join(columns)
    group = ", ".join(keys)
    return (
        f"select {listed}, n, o from gdq_{alias} union all "
        f"select {nulls}, if(sum(n) > 0, 0L, 1L) as n, if(sum(o) > 0, 0L, 1L) as o from gdq_{alias} group by {group}"
    )
