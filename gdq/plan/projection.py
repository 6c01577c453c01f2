"""Plans a filtered projection of one table."""

from __future__ import annotations

from sqlglot import exp

from gdq.plan.parse import ParsedView, column_names, missing_images
from gdq.plan.table import WEIGHT, Compute, MergeSpec, PlanError, Read, RefreshPlan
from gdq.sql_text import quote


def plan_projection(view: ParsedView) -> RefreshPlan:
    """Signed changes where the log holds what the view reads, else recompute by the table's key."""
    names = _read_columns(view)
    missing = missing_images(view, names)
    if view.table.mode == "full" and not missing:
        return _plan_delta(view)
    keys = _key_outputs(view)
    if keys:
        return _plan_recompute(view, keys)
    if view.table.mode == "full":
        raise PlanError(
            "column-not-captured",
            f"the log of {view.table.qualified} does not hold {', '.join(quote(c.name) for c in missing)}",
            hint="Capture the column, or select the table's key in the view.",
        )
    raise PlanError(
        "pk-view-needs-key",
        f"{view.table.qualified} is captured in mode pk: the view must select its key "
        f"({', '.join(quote(name) for name in view.table.key)})",
        hint="Select the key columns, or capture the table in mode full.",
    )


def _read_columns(view: ParsedView) -> list[str]:
    names = [name for output in view.outputs for name in column_names(output.expression)]
    return list(dict.fromkeys(names + column_names(view.where)))


def _key_outputs(view: ParsedView) -> tuple[str, ...]:
    """The view's columns that hold the table's key, in the key's order; none unless all of it is there, exactly."""
    plain = {o.expression.name: o.name for o in reversed(view.outputs) if isinstance(o.expression, exp.Column)}
    folded = any(column.key and column.folded for column in view.table.columns)
    if not view.table.key or folded or any(name not in plain for name in view.table.key):
        return ()
    return tuple(plain[name] for name in view.table.key)


def _plan_delta(view: ParsedView) -> RefreshPlan:
    keys = _key_outputs(view)
    names = [f"c{n}" for n in range(1, len(view.outputs) + 1)]
    select = [f"{quote(view.alias)}.{quote(WEIGHT)} as w"]
    select += [f"{output.sql} as {name}" for output, name in zip(view.outputs, names, strict=True)]
    columns = ", ".join(names)
    net = f"select {columns}, sum(w) as w from delta group by {columns} having sum(w) <> 0"
    return RefreshPlan(
        strategy="projection-delta",
        reason="the log holds both images of every column that the view reads"
        + ("" if keys else "; without the table's key in the view, equal rows are counted"),
        table=view.table.qualified,
        columns=tuple(output.name for output in view.outputs),
        query=view.query,
        delta=Read("delta", ", ".join(select), f"{view.table.name}__delta", view.alias, view.where_sql, ""),
        compute=Compute("net", "delta", net),
        rows=None,
        key_columns=(),
        aggregates=(),
        expressions=view.expressions,
        merge=MergeSpec("keys" if keys else "bag", keys),
    )


def _plan_recompute(view: ParsedView, keys: tuple[str, ...]) -> RefreshPlan:
    table = view.table
    names = [f"c{n}" for n in range(1, len(table.key) + 1)]
    select = [f"{view.column_sql(column)} as {name}" for column, name in zip(table.key, names, strict=True)]
    outputs = [f"{output.sql} as c{n}" for n, output in enumerate(view.outputs, 1)]
    columns = ", ".join(names)
    return RefreshPlan(
        strategy="projection-recompute",
        reason="the log holds the key alone" if table.mode == "pk" else "the view reads a column that is not captured",
        table=table.qualified,
        columns=tuple(output.name for output in view.outputs),
        query=view.query,
        delta=Read("delta", ", ".join(select), f"{table.name}__delta", view.alias, "", ""),
        compute=Compute("keys", "delta", f"select distinct {columns} from delta"),
        rows=Read("rows", ", ".join(outputs), f"{table.name}__new", view.alias, view.where_sql, "", keys=table.key),
        key_columns=table.key,
        aggregates=(),
        expressions=view.expressions,
        merge=MergeSpec("keys", keys),
    )
