"""Plans a GROUP BY of columns with count, sum and avg."""

from __future__ import annotations

from dataclasses import dataclass

from sqlglot import exp

from gdq.plan.number import Number, number_of, numbers_of
from gdq.plan.parse import Output, ParsedView, check_expression, column_names, missing_images, render
from gdq.plan.table import WEIGHT, Compute, MergeSpec, PlanError, Read, RefreshPlan, StateColumn
from gdq.sql_text import quote

# A decimal of Spark has 38 digits, and 10 of them are left for adding up: more is recomputed, not risked.
_DIGITS_MAX = 28
_SPARK_LONG = ("smallint", "integer")


@dataclass(frozen=True, slots=True)
class _Argument:
    """What an aggregate is over: its SQL, its number type if known, and which of its sums are kept."""

    sql: str
    columns: tuple[str, ...]
    number: Number | None
    summed: bool


def plan_group(view: ParsedView, *, kept: bool) -> RefreshPlan:
    """Signed sums where they are exact and can be `kept` beside the target, else recompute of the touched groups."""
    keys = _key_outputs(view)
    arguments = _arguments(view, keys)
    images = [*view.group, *(name for a in arguments.values() for name in a.columns), *column_names(view.where)]
    missing = missing_images(view, list(dict.fromkeys(images)))
    missing = [column for column in missing if not (view.table.mode == "pk" and column.key)]
    if missing:
        names = ", ".join(quote(column.name) for column in missing)
        pk = view.table.mode == "pk"
        raise PlanError(
            "pk-columns-missing" if pk else "column-not-captured",
            f"the log of {view.table.qualified} does not hold column{'s' * (len(missing) > 1)} {names}",
            hint=f"Capture the table with --include {','.join(c.name for c in missing)}, or in mode full."
            if pk
            else "Capture these columns too.",
        )
    reason = _recompute_reason(view, arguments) if kept else "a lake table, beside which no sums are kept"
    if reason is None:
        return _plan_delta(view, keys, arguments)
    return _plan_recompute(view, keys, arguments, reason)


def _key_outputs(view: ParsedView) -> dict[str, str]:
    """Column of the table -> column of the view, for every column of GROUP BY."""
    plain = {o.expression.name: o.name for o in reversed(view.outputs) if isinstance(o.expression, exp.Column)}
    for name in view.group:
        if name not in plain:
            raise PlanError("group-key-not-selected", f"the view must select {quote(name)}, by which it groups")
        column = view.table.column(name)
        if column is not None and column.type.endswith("[]"):
            raise PlanError("group-by-array", f"GROUP BY {quote(name)}, an array, is not refreshed from changes")
        if column is not None and column.folded:
            raise PlanError("group-by-collation", f"the collation of {quote(name)} takes different values for equal")
    return {name: plain[name] for name in view.group}


def _arguments(view: ParsedView, keys: dict[str, str]) -> dict[str, _Argument]:
    """The distinct aggregate arguments by their SQL; checks every column of the view on the way."""
    arguments: dict[str, _Argument] = {}
    for output in view.outputs:
        expression = output.expression
        if isinstance(expression, exp.Column):
            if expression.name not in keys:
                raise PlanError("column-not-grouped", f"column {quote(expression.name)} is not in GROUP BY")
            continue
        argument = _argument_of(output)
        if argument is None:
            continue
        sql = render(argument)
        summed = not isinstance(expression, exp.Count)
        known = arguments.get(sql)
        arguments[sql] = _Argument(
            sql,
            tuple(column_names(argument)),
            number_of(argument, numbers_of(view.table)),
            summed or (known is not None and known.summed),
        )
    return arguments


def _argument_of(output: Output) -> exp.Expr | None:
    """The argument of an aggregate, None for count(*). PlanError for what is no plain count, sum or avg."""
    call = output.expression
    if isinstance(call, exp.Filter):
        raise PlanError("aggregate-filter", f"{render(call)}: FILTER is not covered; write it as CASE")
    if not isinstance(call, exp.Count | exp.Sum | exp.Avg):
        if isinstance(call, exp.AggFunc):
            raise PlanError("aggregate", f"aggregate {render(call)} is not refreshed from changes")
        raise PlanError("column-not-grouped", f"{render(call)} is neither a column of GROUP BY nor an aggregate")
    argument: exp.Expr | None = call.this
    if isinstance(argument, exp.Star):
        return None
    if isinstance(argument, exp.Distinct):
        raise PlanError("distinct-aggregate", f"{render(call)}: DISTINCT is not refreshed from changes")
    if argument is None or isinstance(argument, exp.Order) or call.expressions:
        raise PlanError("aggregate-argument", f"{render(call)} is not refreshed from changes")
    check_expression(argument, f"{call.key}()")
    return argument


def _recompute_reason(view: ParsedView, arguments: dict[str, _Argument]) -> str | None:
    """Why the sums of the view cannot be kept by adding and subtracting; None when they can."""
    if view.table.mode == "pk":
        return "mode pk: the groups that the log names are recomputed"
    for output in view.outputs:
        call = output.expression
        if not isinstance(call, exp.Sum | exp.Avg):
            continue
        number = arguments[render(call.this)].number
        if number is None:
            return f"{render(call)}: a float, or no bound on its digits, so its groups are recomputed"
        if number.whole + number.scale > _DIGITS_MAX and number.scale > 0:
            return f"{render(call)}: more than {_DIGITS_MAX} digits, so its groups are recomputed"
        if isinstance(call, exp.Avg) and not number.fixed:
            return f"{render(call)}: the digits of an average follow the scale of its values, so it is recomputed"
    return None


def _plan_delta(view: ParsedView, keys: dict[str, str], arguments: dict[str, _Argument]) -> RefreshPlan:
    weight = f"{quote(view.alias)}.{quote(WEIGHT)}"
    groups = [f"c{n}" for n in range(1, len(keys) + 1)]
    select = [f"{view.column_sql(column)} as {name}" for column, name in zip(keys, groups, strict=True)]
    select.append(f"{weight} as n")
    state = [StateColumn("n", "bigint")]
    prefixes: dict[str, str] = {}
    for number, argument in enumerate(arguments.values(), 1):
        prefix = prefixes[argument.sql] = f"a{number}"
        parts, columns = _signed(argument, weight, prefix)
        select += parts
        state += columns
    sums = ", ".join(f"sum({column.name}) as {column.name}" for column in state)
    some = " or ".join(f"sum({column.name}) <> 0" for column in state)
    group = ", ".join(groups)
    names = dict(zip(keys, groups, strict=True))
    return RefreshPlan(
        strategy="group-delta",
        reason="the log holds both images of every column that the view reads, and its sums are exact",
        table=view.table.qualified,
        columns=tuple(output.name for output in view.outputs),
        query=view.query,
        delta=Read("delta", ", ".join(select), f"{view.table.name}__delta", view.alias, view.where_sql, ""),
        compute=Compute("net", "delta", f"select {group}, {sums} from delta group by {group} having {some}"),
        rows=None,
        key_columns=(),
        aggregates=(),
        expressions=view.expressions,
        merge=MergeSpec(
            "state",
            tuple(keys.values()),
            _nullable(view, keys),
            tuple(state),
            tuple(_visible(output, names, prefixes, arguments) for output in view.outputs),
        ),
    )


def _signed(argument: _Argument, weight: str, prefix: str) -> tuple[list[str], list[StateColumn]]:
    """The signed parts of one argument for one image, and the columns that hold their sums.

    _n counts values, _s adds the numbers, _z counts NaN, which would stay in a sum for ever.
    """
    sql = f"({argument.sql})"
    parts = [f"case when {sql} is null then 0 else {weight} end as {prefix}_n"]
    state = [StateColumn(f"{prefix}_n", "bigint")]
    number = argument.number
    if not argument.summed or number is None:
        return parts, state
    if number.type != "numeric":
        wide = "bigint" if number.type in _SPARK_LONG else "numeric"
        parts.append(f"coalesce({sql}::{wide} * {weight}, 0) as {prefix}_s")
        return parts, [*state, StateColumn(f"{prefix}_s", "bigint" if wide == "bigint" else "decimal(38,0)")]
    parts.append(f"case when {sql} = 'NaN' then 0 else coalesce({sql} * {weight}, 0) end as {prefix}_s")
    parts.append(f"case when {sql} = 'NaN' then {weight} else 0 end as {prefix}_z")
    return parts, [
        *state,
        StateColumn(f"{prefix}_s", f"decimal(38,{number.scale})"),
        StateColumn(f"{prefix}_z", "bigint"),
    ]


def _visible(output: Output, names: dict[str, str], prefixes: dict[str, str], arguments: dict[str, _Argument]) -> str:
    """A column of the view as an expression over the state."""
    call = output.expression
    if isinstance(call, exp.Column):
        return names[call.name]
    if isinstance(call.this, exp.Star):
        return "n"
    argument = arguments[render(call.this)]
    prefix = prefixes[argument.sql]
    if isinstance(call, exp.Count):
        return f"{prefix}_n"
    total = f"{prefix}_s" if isinstance(call, exp.Sum) else f"{prefix}_s::numeric / {prefix}_n"
    nan = (
        f"when {prefix}_z > 0 then 'NaN' " if argument.number is not None and argument.number.type == "numeric" else ""
    )
    return f"case when {prefix}_n = 0 then null {nan}else {total} end"


def _plan_recompute(
    view: ParsedView, keys: dict[str, str], arguments: dict[str, _Argument], reason: str
) -> RefreshPlan:
    """Nets what the view reads, so that an update of another column touches no group."""
    columns = list(dict.fromkeys([*keys, *(name for a in arguments.values() for name in a.columns)]))
    names = [f"c{n}" for n in range(1, len(columns) + 1)]
    select = [f"{quote(view.alias)}.{quote(WEIGHT)} as w"]
    select += [f"{view.column_sql(column)} as {name}" for column, name in zip(columns, names, strict=True)]
    listed = ", ".join(names)
    group = ", ".join(names[: len(keys)])
    touched = f"select distinct {group} from (select {listed} from delta group by {listed} having sum(w) <> 0) as net"
    outputs = [f"{output.sql} as c{n}" for n, output in enumerate(view.outputs, 1)]
    aggregates = [o.name for o in view.outputs if isinstance(o.expression, exp.Sum | exp.Avg)]
    return RefreshPlan(
        strategy="group-recompute",
        reason=reason,
        table=view.table.qualified,
        columns=tuple(output.name for output in view.outputs),
        query=view.query,
        delta=Read("delta", ", ".join(select), f"{view.table.name}__delta", view.alias, view.where_sql, ""),
        compute=Compute("keys", "delta", touched),
        rows=Read(
            "rows",
            ", ".join(outputs),
            f"{view.table.name}__new",
            view.alias,
            view.where_sql,
            ", ".join(view.column_sql(column) for column in keys),
            keys=tuple(keys),
        ),
        key_columns=tuple(keys),
        aggregates=tuple(aggregates),
        expressions=view.expressions,
        merge=MergeSpec("keys", tuple(keys.values()), _nullable(view, keys)),
    )


def _nullable(view: ParsedView, keys: dict[str, str]) -> tuple[str, ...]:
    not_null = {column.name for column in view.table.columns if column.not_null}
    return tuple(output for column, output in keys.items() if column not in not_null)
