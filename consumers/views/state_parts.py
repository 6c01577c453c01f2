"""The parts of the statement of few changes that add signed rows to a state, and show the view's rows of it.

gdq_sums     what is added
gdq_before   the rows of the state that the changes can reach, as they were
gdq_after    the same rows as they are now
gdq_summed, gdq_begun, gdq_emptied   the changes of the state's table
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from gdq.consumers.views.kept_state import KeptSums, KeptTop, same_group
from gdq.plan.extreme import net_values_sql


def numbered(width: int) -> list[str]:
    """The names c1, c2, ... of so many columns."""
    return [f"c{n}" for n in range(1, width + 1)]


def state_parts(kept: KeptSums | KeptTop, state: str, rows: str) -> dict[str, str]:
    """The parts that add the relation `rows` to the table `state`, by their names."""
    if isinstance(kept, KeptTop):
        return _top_parts(kept, state, rows)
    return _extreme_parts(kept, state, rows) if kept.plan.extremes else _sum_parts(kept, state, rows)


def shown_rows(kept: KeptSums | KeptTop, state: str, target: str, columns: str, width: int) -> str:
    """SELECT of the view's rows that the changes can reach: as they are with weight 1, as they were with -1.

    `state`: its table. `target`, `columns`: the view's table and columns, which are `width`.
    """
    names = ", ".join(numbered(width))
    if _is_limited(kept):
        # any group may come up, so all rows of the view are compared, of which there are few
        after, before = kept.first(state, "gdq_sums", "gdq_after"), f"select {columns} from {target}"
    else:
        after, before = kept.shown("gdq_after", ""), kept.shown("gdq_before", "")
    return (
        f"select {names}, 1 as w from ({after}) as a({names}) "
        f"union all select {names}, -1 as w from ({before}) as b({names})"
    )


def _is_limited(kept: KeptSums | KeptTop) -> TypeGuard[KeptSums]:
    return isinstance(kept, KeptSums) and bool(kept.plan.order and kept.keys)


def refused_sql(kept: KeptSums | KeptTop | None) -> str:
    """Condition that the changes must not stand: a sum that cannot be taken back."""
    if isinstance(kept, KeptSums) and kept.plan.unnumbered:
        return f"exists (select from gdq_sums where {kept.plan.unnumbered})"
    return "false"


def short_sql(kept: KeptSums | KeptTop | None) -> str:
    """Condition that a state of first rows must be filled anew, which takes more statements."""
    if isinstance(kept, KeptTop):
        return f"(select coalesce(sum(n), 0) from gdq_after) < {kept.plan.last}"
    return "false"


def _sum_parts(kept: KeptSums, state: str, rows: str) -> dict[str, str]:
    """Without groups the state is one row, which never goes."""
    keys, numbers = [*kept.keys], [*kept.numbers]
    listed, same = ", ".join([*keys, *numbers]), same_group(keys)
    some = " or ".join(f"{name} <> 0" for name in numbers)
    before = ", ".join(f"s.{name}" for name in [*keys, *numbers])
    totals = [f"sum({name})::{_kind(name)} as {name}" for name in numbers]
    added = ", ".join(f"{name} = s.{name} + d.{name}" for name in numbers)
    values = ", ".join(f"d.{name}" for name in [*keys, *numbers])
    touched, grouped = "", ""
    if _is_limited(kept):
        touched = f" join gdq_sums as d on {same}"
    elif kept.groups:
        touched = f" join (select distinct {', '.join(kept.groups)} from gdq_sums) as d on {same_group(kept.groups)}"
    if keys:
        grouped = f" group by {', '.join(keys)} having sum(n) <> 0"
    parts = {
        "gdq_sums": f"select * from ({kept.sums(rows)}) as s where {some}",
        "gdq_before": f"select {before} from {state} as s{touched}",
        "gdq_after": f"""
            select {", ".join([*keys, *totals])}
              from (select {listed} from gdq_before union all select {listed} from gdq_sums) as r{grouped}""",
        "gdq_summed": f"""
            update {state} as s set {added} from gdq_sums as d where {same}{" and s.n + d.n <> 0" if keys else ""}""",
        "gdq_begun": f"""
            insert into {state} ({listed})
            select {values} from gdq_sums as d where not exists (select from gdq_before as s where {same})""",
    }
    if keys:
        parts["gdq_emptied"] = f"delete from {state} as s using gdq_sums as d where {same} and s.n + d.n = 0"
    return parts


def _extreme_parts(kept: KeptSums, state: str, rows: str) -> dict[str, str]:
    """With extremes there are no groups, so the state is one row."""
    plan, numbers = kept.plan, [*kept.numbers]
    columns = [extreme.column for extreme in plan.extremes]
    valued = plan.valued_extremes()
    parts = {
        "gdq_sums": kept.sums(rows),
        "gdq_before": f"select {', '.join([*numbers, *columns])} from {state} as s",
    }
    parts |= {f"gdq_net_{extreme.column}": net_values_sql(rows, value) for extreme, value in valued}
    after = [f"(s.{name} + d.{name})::{_kind(name)} as {name}" for name in numbers]
    after += [
        f"{extreme.after(f's.{extreme.column}', f'gdq_net_{extreme.column}', plan.source)} as {extreme.column}"
        for extreme, _ in valued
    ]
    parts["gdq_after"] = f"select {', '.join(after)} from gdq_before as s, gdq_sums as d"
    changed = ", ".join(f"{name} = a.{name}" for name in [*numbers, *columns])
    parts["gdq_summed"] = f"update {state} as s set {changed} from gdq_after as a"
    return parts


def _top_parts(kept: KeptTop, state: str, rows: str) -> dict[str, str]:
    """The state has each row once, with its number `n`; `image` tells rows apart."""
    columns: Sequence[str] = [*kept.carried, "image"]
    listed, values = ", ".join([*columns, "n"]), ", ".join(f"d.{name}" for name in [*columns, "n"])
    both = f"select {listed} from gdq_before union all select {listed} from gdq_sums"
    summed = f"select distinct on (image) {', '.join(columns)}, sum(n) over (partition by image)::bigint as n"
    return {
        "gdq_sums": f"select * from ({kept.sums(rows)}) as s where n <> 0",
        "gdq_before": f"select {listed} from {state} as s",
        "gdq_after": f"select * from ({summed} from ({both}) as r) as r where n <> 0",
        "gdq_summed": f"""
            update {state} as s set n = s.n + d.n from gdq_sums as d where s.image = d.image and s.n + d.n <> 0""",
        "gdq_begun": f"""
            insert into {state} ({listed})
            select {values} from gdq_sums as d
             where not exists (select from gdq_before as s where s.image = d.image)""",
        "gdq_emptied": f"delete from {state} as s using gdq_sums as d where s.image = d.image and s.n + d.n = 0",
    }


def _kind(name: str) -> str:
    """The type of a number of the state: sums are numeric, counts are not."""
    return "numeric" if name[0] == "s" else "bigint"
