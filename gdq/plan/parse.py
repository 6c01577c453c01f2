"""Reads the SQL of a view into a ParsedView, and refuses every construct that no plan covers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from gdq.plan.table import PlanError, TableColumn, TableSchema
from gdq.sql_text import quote

# What may stand in a select list, a WHERE or an aggregate beside PostgreSQL's own functions. The server decides whether
# it is immutable; this list keeps out what is no plain expression of one row.
_ALLOWED: tuple[type[exp.Expr], ...] = (
    exp.Column, exp.Identifier, exp.Literal, exp.Null, exp.Boolean, exp.Paren, exp.Tuple, exp.Neg,
    exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Pow, exp.DPipe, exp.Concat,
    exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ, exp.Is,
    exp.And, exp.Or, exp.Not, exp.Between, exp.In, exp.Like, exp.ILike, exp.Escape, exp.RegexpLike,
    exp.Case, exp.If, exp.Coalesce, exp.Nullif, exp.Greatest, exp.Least,
    exp.Cast, exp.DataType, exp.DataTypeParam, exp.Var, exp.Interval, exp.Array, exp.Any, exp.Bracket,
    exp.AtTimeZone, exp.JSONPath, exp.JSONPathPart, exp.Func,
    exp.RawString, exp.ByteString, exp.UnicodeString, exp.BitString, exp.HexString,
)  # fmt: skip

_NONDETERMINISTIC: tuple[type[exp.Expr], ...] = (
    exp.CurrentDate, exp.CurrentTime, exp.CurrentTimestamp, exp.Localtime, exp.Localtimestamp, exp.CurrentUser,
    exp.CurrentSchema, exp.SessionUser, exp.Rand, exp.Uuid,
)  # fmt: skip
_NONDETERMINISTIC_NAMES = {
    "clock_timestamp", "statement_timestamp", "transaction_timestamp", "timeofday", "txid_current", "nextval",
    "currval", "lastval", "pg_current_xact_id", "current_setting", "pg_backend_pid", "gen_random_uuid",
    "uuid_generate_v4", "uuidv4", "uuidv7", "setseed", "random_normal", "pg_sleep", "now", "random", "current_catalog",
    "current_role",
}  # fmt: skip
_MOMENTS = {"now", "today", "tomorrow", "yesterday"}

_CLAUSES = {
    "with_": ("cte", "WITH"),
    "joins": ("join", "a join"),
    "laterals": ("join", "LATERAL"),
    "distinct": ("distinct", "DISTINCT"),
    "having": ("having", "HAVING"),
    "windows": ("window", "WINDOW"),
    "qualify": ("window", "QUALIFY"),
    "order": ("order-limit", "ORDER BY"),
    "limit": ("order-limit", "LIMIT"),
    "offset": ("order-limit", "OFFSET"),
    "locks": ("locking", "a locking clause"),
    "into": ("clause", "INTO"),
}
_READ_CLAUSES = {"expressions", "from_", "where", "group", "kind"}


@dataclass(frozen=True, slots=True)
class Output:
    """One column of the view: its name and its expression."""

    name: str
    expression: exp.Expr

    @property
    def sql(self) -> str:
        """The expression in PostgreSQL's SQL."""
        return render(self.expression)


@dataclass(frozen=True, slots=True)
class ParsedView:
    """A checked SELECT over one captured table, every column written as alias.column with quotes."""

    table: TableSchema
    alias: str
    aliased: bool
    outputs: tuple[Output, ...]
    where: exp.Expr | None
    group: tuple[str, ...]
    grouped: bool

    @property
    def where_sql(self) -> str:
        """The condition in PostgreSQL's SQL, empty when there is none."""
        return "" if self.where is None else render(self.where)

    @property
    def query(self) -> str:
        """The whole view, its columns named and its table qualified."""
        columns = ", ".join(f"{output.sql} as {quote(output.name)}" for output in self.outputs)
        return (
            f"select {columns} from {self.table.qualified}"
            + (f" as {quote(self.alias)}" if self.aliased else "")
            + (f" where {self.where_sql}" if self.where is not None else "")
            + (f" group by {', '.join(self.column_sql(name) for name in self.group)}" if self.group else "")
        )

    @property
    def expressions(self) -> tuple[str, ...]:
        """What is computed for one row: outputs or arguments of aggregates, and the condition; no bare columns."""
        found = [] if self.where is None else [self.where]
        for output in self.outputs:
            call = output.expression
            found.append(call.this if isinstance(call, exp.AggFunc) else call)
        return tuple(render(e) for e in found if not isinstance(e, exp.Column | exp.Star))

    def column_sql(self, name: str) -> str:
        """A column of the table as the view writes it."""
        return f"{quote(self.alias)}.{quote(name)}"


def render(expression: exp.Expr) -> str:
    """An expression in PostgreSQL's SQL, on one line."""
    return expression.sql(dialect="postgres", comments=False)


def column_names(expression: exp.Expr | None) -> list[str]:
    """Names of the columns that an expression reads, each once, in order."""
    found = () if expression is None else expression.find_all(exp.Column, bfs=False)
    return list(dict.fromkeys(column.name for column in found))


def parse_select(sql: str) -> exp.Select:
    """The one SELECT in `sql`, identifiers folded as PostgreSQL does it. PlanError for anything else."""
    # sqlglot prints a warning for what it keeps as an opaque command; that is refused here anyway.
    logger = logging.getLogger("sqlglot")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        statements = [found for found in sqlglot.parse(sql, dialect="postgres") if found is not None]
    except SqlglotError as error:
        line = str(error).splitlines()[0] if str(error) else "unreadable"
        raise PlanError("syntax", f"the view's SQL cannot be read: {line}") from error
    finally:
        logger.setLevel(level)
    if len(statements) != 1:
        raise PlanError("several-statements", f"a view is one SELECT, not {len(statements)} statements")
    (statement,) = statements
    if isinstance(statement, exp.SetOperation):
        raise PlanError("set-operation", f"{statement.key.upper()} is not refreshed from changes")
    if not isinstance(statement, exp.Select):
        raise PlanError("not-a-select", f"a view is a SELECT, not {statement.key.upper()}")
    for identifier in statement.find_all(exp.Identifier):
        if not identifier.quoted:
            # PostgreSQL folds ASCII letters only, whatever the locale.
            identifier.set("this", "".join(c.lower() if c.isascii() else c for c in identifier.name))
            identifier.set("quoted", True)
    return statement


def from_table(select: exp.Select) -> tuple[str | None, str]:
    """Schema and name of the one table in FROM. PlanError when FROM holds anything else."""
    table = _table_node(select)
    return table.db or None, table.name


def parse_view(sql: str, tables: Sequence[TableSchema]) -> ParsedView:
    """The checked view. PlanError names the first construct that is not covered."""
    select = parse_select(sql)
    _check_clauses(select)
    node = _table_node(select)
    table = _find_table(node, tables)
    alias = node.alias or table.name
    resolver = _Resolver(table, alias, node)
    outputs = _outputs(select, resolver)
    where = select.args.get("where")
    condition = None if where is None else resolver.checked(where.this, "WHERE")
    group = _group_columns(select.args.get("group"), outputs, resolver)
    grouped = bool(group) or any(output.expression.find(exp.AggFunc) for output in outputs)
    if grouped and not group:
        raise PlanError("no-group-by", "an aggregate without GROUP BY is not refreshed from changes")
    view = ParsedView(table, alias, bool(node.alias), outputs, condition, group, grouped)
    _check_names(view)
    return view


def check_expression(expression: exp.Expr, place: str) -> None:
    """PlanError unless `expression` is one that is evaluated row by row."""
    for node in expression.walk():
        _check_subquery_window(node, place)
        if isinstance(node, _NONDETERMINISTIC) or (
            isinstance(node, exp.Anonymous) and node.name.lower() in _NONDETERMINISTIC_NAMES
        ):
            raise PlanError("nondeterministic", f"{render(node)} in {place} gives another value each time")
        if isinstance(node, exp.Cast) and node.this.is_string and node.this.name.strip().lower() in _MOMENTS:
            raise PlanError("nondeterministic", f"{render(node)} in {place} gives another value each time")
        if isinstance(node, exp.AggFunc | exp.Filter | exp.WithinGroup):
            raise PlanError("aggregate", f"aggregate {render(node)} cannot stand in {place}")
        if isinstance(node, exp.Star):
            raise PlanError("whole-row", f"a star inside an expression of {place} is not covered")
        if not isinstance(node, _ALLOWED) or isinstance(node, exp.Anonymous | exp.UDTF | exp.GenerateSeries):
            code = "function" if isinstance(node, exp.Func) else "expression"
            raise PlanError(code, f"{render(node)} in {place} is not covered by the planner")


def _check_subquery_window(node: exp.Expr, place: str) -> None:
    if isinstance(node, exp.Subquery | exp.Query | exp.Exists):
        raise PlanError("subquery", f"a subquery in {place} is not refreshed from changes")
    if isinstance(node, exp.Window):
        raise PlanError("window", f"window function {render(node)} is not refreshed from changes")


def _check_clauses(select: exp.Select) -> None:
    for name, value in select.args.items():
        if not value or name in _READ_CLAUSES:
            continue
        code, words = _CLAUSES.get(name, ("clause", name.strip("_").replace("_", " ").upper()))
        raise PlanError(code, f"{words} is not refreshed from changes")


def _table_node(select: exp.Select) -> exp.Table:
    clause = select.args.get("from_")
    if select.args.get("joins") or select.args.get("laterals"):
        raise PlanError("join", "a join is not refreshed from changes")
    if clause is None:
        raise PlanError("no-table", "the view reads no table")
    node = clause.this
    if isinstance(node, exp.Subquery | exp.Query):
        raise PlanError("subquery", "a subquery in FROM is not refreshed from changes")
    if not isinstance(node, exp.Table) or not isinstance(node.this, exp.Identifier):
        raise PlanError("table-function", f"FROM {render(node)} is no table")
    alias = node.args.get("alias")
    extra = [name for name, value in node.args.items() if value and name not in {"this", "db", "alias"}]
    if extra or (alias is not None and alias.args.get("columns")):
        words = "a database name" if extra == ["catalog"] else " ".join(extra).upper() or "a list of column aliases"
        raise PlanError("from-clause", f"{words} in FROM is not refreshed from changes")
    return node


def _find_table(node: exp.Table, tables: Sequence[TableSchema]) -> TableSchema:
    found = [table for table in tables if table.name == node.name and node.db in ("", table.schema)]
    if len(found) != 1:
        what = "is no captured table" if not found else "means more than one table: write its schema"
        raise PlanError("unknown-table", f"table {node.db + '.' if node.db else ''}{node.name} {what}")
    return found[0]


class _Resolver:
    """Rewrites columns to alias.column and checks that they exist."""

    def __init__(self, table: TableSchema, alias: str, node: exp.Table) -> None:
        self.table = table
        self.alias = alias
        self.names = {(alias, "")} if node.alias else {(alias, ""), (table.name, table.schema)}

    def resolved(self, expression: exp.Expr) -> exp.Expr:
        """`expression` with its columns qualified by the alias alone."""
        holder = exp.Paren(this=expression.copy())
        for column in list(holder.find_all(exp.Column)):
            self._check(column)
            name = exp.column(exp.to_identifier(column.name, quoted=True), exp.to_identifier(self.alias, quoted=True))
            column.replace(name)
        inner: exp.Expr = holder.this
        return inner

    def checked(self, expression: exp.Expr, place: str) -> exp.Expr:
        """The resolved expression; PlanError unless it is one of a single row."""
        check_expression(expression, place)
        return self.resolved(expression)

    def columns(self) -> list[exp.Expr]:
        """All columns of the table: what a star stands for."""
        return [self.resolved(exp.column(exp.to_identifier(c.name, quoted=True))) for c in self.table.columns]

    def names_table(self, column: exp.Column) -> bool:
        """Whether the qualifier of `column` is the table or its alias, or absent."""
        return not column.table or (column.table, column.text("db")) in self.names

    def _check(self, column: exp.Column) -> None:
        if not self.names_table(column) or column.catalog:
            raise PlanError("unknown-column", f"{render(column)} is no column of {self.table.qualified}")
        if self.table.column(column.name) is not None:
            return
        if not column.table and column.name == self.alias:
            raise PlanError("whole-row", f"the whole row {render(column)} is not covered by the planner")
        raise PlanError("unknown-column", f"{self.table.qualified} has no column {quote(column.name)}")


def _outputs(select: exp.Select, resolver: _Resolver) -> tuple[Output, ...]:
    outputs: list[Output] = []
    for number, item in enumerate(select.expressions, 1):
        if isinstance(item, exp.Star) or (isinstance(item, exp.Column) and isinstance(item.this, exp.Star)):
            if any(star.args.get("except_") for star in item.find_all(exp.Star)):
                raise PlanError("expression", "a star with exceptions is not covered by the planner")
            if isinstance(item, exp.Column) and not resolver.names_table(item):
                raise PlanError("unknown-table", f"{render(item)} is no table of FROM")
            outputs += [Output(column.name, column) for column in resolver.columns()]
            continue
        expression = item.unalias()
        if isinstance(expression, exp.AggFunc | exp.Filter | exp.Window):
            _check_subquery_window(expression, "the select list")
        else:
            _check_outer_aggregate(expression)
            check_expression(expression, "the select list")
        outputs.append(Output(_output_name(item, number), resolver.resolved(expression)))
    return tuple(outputs)


def _check_outer_aggregate(expression: exp.Expr) -> None:
    inner = expression.find(exp.AggFunc)
    if inner is not None and expression.find(exp.Window) is None:
        raise PlanError(
            "expression-over-aggregate",
            f"{render(expression)} computes with an aggregate",
            hint="Select the bare aggregates, and put the rest into a plain view on the target.",
        )


def _output_name(item: exp.Expr, number: int) -> str:
    if isinstance(item, exp.Alias | exp.Column):
        return item.alias_or_name
    if isinstance(item, exp.AggFunc | exp.Filter | exp.Window):
        return item.key  # the name that PostgreSQL gives count, sum and avg; the others are refused later
    raise PlanError(
        "alias-missing", f"column {number} of the view, {render(item)}, needs a name", hint="Write AS name."
    )


def _group_columns(group: exp.Group | None, outputs: tuple[Output, ...], resolver: _Resolver) -> tuple[str, ...]:
    if group is None:
        return ()
    extra = [name for name, value in group.args.items() if value and name != "expressions"]
    if extra or any(isinstance(item, exp.Rollup | exp.Cube | exp.GroupingSets) for item in group.expressions):
        raise PlanError("grouping-sets", "GROUP BY takes plain columns only")
    return tuple(dict.fromkeys(_group_column(item, outputs, resolver) for item in group.expressions))


def _group_column(item: exp.Expr, outputs: tuple[Output, ...], resolver: _Resolver) -> str:
    if isinstance(item, exp.Literal) and item.is_int and 1 <= int(item.name) <= len(outputs):
        item = outputs[int(item.name) - 1].expression
    elif isinstance(item, exp.Column) and not item.table and resolver.table.column(item.name) is None:
        item = next((output.expression for output in outputs if output.name == item.name), item)
    if not isinstance(item, exp.Column):
        raise PlanError("group-expression", f"GROUP BY {render(item)} is no column")
    return resolver.resolved(item).name


def _check_names(view: ParsedView) -> None:
    seen: set[str] = set()
    for output in view.outputs:
        if output.name in seen:
            raise PlanError("duplicate-column", f"the view has two columns {quote(output.name)}")
        seen.add(output.name)
    if not view.outputs:
        raise PlanError("no-columns", "the view has no columns")


def missing_images(view: ParsedView, names: list[str]) -> list[TableColumn]:
    """The columns among `names` whose old and new values the log does not hold."""
    columns = [view.table.column(name) for name in names]
    return [column for column in columns if column is not None and not column.images]
