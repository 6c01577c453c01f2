"""The JSON, Python, Arrow and Spark types for each PostgreSQL type, and the SQL that reads a column as these.

Pure data and functions: needs neither a connection nor pyarrow. docs/types.md is printed from TYPES.
Every Arrow type here has exactly one Spark type, so Arrow values go into Spark unchanged. A number or time that one of
the two cannot hold is refused, or read as PostgreSQL's text with unsupported="text"; it never becomes another value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gdq.errors import UnsupportedValue

OnUnsupported = Literal["error", "text"]

# Settings of a session that reads values as text: the text is then the same as in events, whatever the defaults of the
# role or database are.
READ_SETTINGS = {
    "array_nulls": "on",
    "bytea_output": "hex",
    "datestyle": "ISO, YMD",
    "extra_float_digits": "1",
    "intervalstyle": "postgres",
    "lc_monetary": "C",
    "quote_all_identifiers": "off",
    "row_security": "off",
    "search_path": "pg_catalog, pg_temp",
    "standard_conforming_strings": "on",
    "timezone": "UTC",
    "transform_null_equals": "off",
    "xmlbinary": "base64",
}

DECIMAL_DIGITS_MAX = 38
# Types from this oid on were made by users.
FIRST_USER_OID = 16384


@dataclass(frozen=True, slots=True)
class ColumnType:
    """How one column is read: its Arrow type (as pyarrow prints it), its Spark type (DDL) and the reading expression.

    `read_sql`: a format string with {c} for the quoted column. Its value is cast to `arrow`: decimals are read as text,
    since no driver reads numeric as a decimal.
    """

    arrow: str
    spark: str
    read_sql: str
    note: str = ""

    @property
    def decimal(self) -> tuple[int, int] | None:
        """The precision and scale of a decimal; None for other types."""
        typmod = _TYPMOD.search(self.spark)
        return None if typmod is None else (int(typmod[1]), int(typmod[2]))

    def sql(self, column: str) -> str:
        """The expression that reads `column`, a quoted identifier."""
        return self.read_sql.format(c=column)


@dataclass(frozen=True, slots=True)
class TypeRow:
    """One line of the table in docs/types.md. `by_option`: readable only as text, with unsupported="text"."""

    postgres: str
    json: str
    python: str
    column: ColumnType
    by_option: bool = False


_TEXT = "({c})::text"
READ_AS_TEXT = ColumnType("string", "string", _TEXT)
# Names of columns: not a type of users' columns, whose arrays are read as text.
COLUMN_NAMES = ColumnType("list<item: string>", "array<string>", "{c}")

_TIMESTAMP_NOTE = "infinity and times after 294247-01-10 are an error"

TYPES = (
    TypeRow("boolean", "true, false", "bool", ColumnType("bool", "boolean", "{c}")),
    TypeRow("smallint", "number", "int", ColumnType("int16", "smallint", "{c}")),
    TypeRow("integer", "number", "int", ColumnType("int32", "int", "{c}")),
    TypeRow("bigint", "text", "int", ColumnType("int64", "bigint", "{c}")),
    TypeRow("oid", "text", "int", ColumnType("int64", "bigint", "({c})::bigint")),
    TypeRow(
        "real",
        "number; NaN, Infinity, -Infinity, -0 as text",
        "float",
        ColumnType("float", "float", "{c}"),
    ),
    TypeRow(
        "double precision",
        "number; NaN, Infinity, -Infinity, -0 as text",
        "float",
        ColumnType("double", "double", "{c}"),
    ),
    TypeRow(
        "numeric(p,s)",
        "text",
        "Decimal",
        ColumnType("decimal128(p, s)", "decimal(p,s)", _TEXT, "up to 38 digits; NaN is an error"),
    ),
    TypeRow(
        "numeric",
        "text",
        "Decimal",
        ColumnType("string", "string", _TEXT, "also numeric(p,s) above 38 digits"),
        by_option=True,
    ),
    TypeRow("money", "text", "str", ColumnType("string", "string", _TEXT, "as with lc_monetary C"), by_option=True),
    TypeRow("text", "text", "str", ColumnType("string", "string", "{c}")),
    TypeRow("character varying", "text", "str", ColumnType("string", "string", "{c}")),
    # A cast to text would cut the blanks that pad it.
    TypeRow("character", "text", "str", ColumnType("string", "string", "{c}", "with its padding")),
    TypeRow('"char"', "text", "str", READ_AS_TEXT),
    TypeRow("name", "text", "str", READ_AS_TEXT),
    TypeRow("bytea", "text, hex", "bytes", ColumnType("binary", "binary", "{c}")),
    TypeRow("uuid", "text", "UUID", READ_AS_TEXT),
    TypeRow("date", "text, ISO", "date, or str", ColumnType("date32[day]", "date", "{c}", "infinity is an error")),
    TypeRow(
        "timestamp without time zone",
        "text, ISO",
        "datetime, or str",
        ColumnType("timestamp[us]", "timestamp_ntz", "{c}", _TIMESTAMP_NOTE),
    ),
    TypeRow(
        "timestamp with time zone",
        "text, ISO, UTC",
        "datetime with zone, or str",
        ColumnType("timestamp[us, tz=UTC]", "timestamp", "{c}", _TIMESTAMP_NOTE),
    ),
    TypeRow("time without time zone", "text", "time, or str", ColumnType("string", "string", _TEXT), by_option=True),
    TypeRow(
        "time with time zone", "text", "time with zone, or str", ColumnType("string", "string", _TEXT), by_option=True
    ),
    TypeRow("interval", "text", "str", ColumnType("string", "string", _TEXT), by_option=True),
    TypeRow("json", "text", "str", READ_AS_TEXT),
    TypeRow("jsonb", "text", "str", READ_AS_TEXT),
    # The cast of inet to text adds a /32 that its output does not have.
    TypeRow("inet", "text", "str", ColumnType("string", "string", "pg_catalog.textin(pg_catalog.inet_out({c}))")),
    TypeRow("any other type of PostgreSQL, any array", "text", "str", READ_AS_TEXT),
    TypeRow(
        "enum, composite, extension type, user range",
        "text",
        "str",
        ColumnType("string", "string", "{c}", "logged as text"),
    ),
)

_ROWS = {row.postgres: row for row in TYPES}
_ALIASES = {"bpchar": "character"}
LOGGED_AS_TEXT = _ROWS["enum, composite, extension type, user range"].column

_TYPMOD = re.compile(r"\((-?\d+)(?:,(-?\d+))?\)")


def base_type_name(pg_type: str) -> str:
    """A type's name as format_type() gives it, without its typmod: `timestamp(3) with time zone` loses the `(3)`."""
    name = _TYPMOD.sub("", pg_type)
    return _ALIASES.get(name, name)


def column_type(
    pg_type: str,
    as_text: bool = False,
    *,
    log_type: str | None = None,
    column: str = "",
    unsupported: OnUnsupported = "error",
) -> ColumnType:
    """How to read a column of type `pg_type` (format_type() with typmod, search_path pg_catalog).

    `as_text`: the log holds the column as text already (a user type). `log_type`: the type in the log, needed for
    domains. `column`: name for the error. UnsupportedValue if Arrow or Spark has no type that holds every value, unless
    `unsupported` is "text".
    """
    if as_text:
        return LOGGED_AS_TEXT
    if log_type is not None and base_type_name(pg_type) != base_type_name(log_type):
        pg_type = log_type
    name = base_type_name(pg_type)
    if name.endswith("[]"):
        return READ_AS_TEXT
    if name == "numeric" and (decimal := _decimal(pg_type)) is not None:
        return decimal
    row = _ROWS.get(name)
    if row is None:
        return READ_AS_TEXT
    if row.by_option and unsupported == "error":
        raise UnsupportedValue(
            f'column "{column}" has type {pg_type}, which Arrow and Spark have no type for',
            hint=f'Read it as text: unsupported="text" in Python, the option as_text="{column}" in Spark.',
        )
    return row.column


def _decimal(pg_type: str) -> ColumnType | None:
    """The decimal that holds every finite value of numeric(p,s); None without a typmod or if 38 digits are too few.

    PostgreSQL's scale may be negative (p digits followed by -s zeros) or above the precision; Spark's may not.
    """
    typmod = _TYPMOD.search(pg_type)
    if typmod is None:
        return None
    precision, scale = int(typmod[1]), int(typmod[2] or 0)
    digits = max(precision, scale) if scale >= 0 else precision - scale
    if digits > DECIMAL_DIGITS_MAX:
        return None
    note = _ROWS["numeric(p,s)"].column.note
    scale = max(scale, 0)
    return ColumnType(f"decimal128({digits}, {scale})", f"decimal({digits},{scale})", _TEXT, note)


def types_markdown() -> str:
    """The table of docs/types.md."""
    lines = ["| PostgreSQL | JSON | Python | Arrow | Spark | |", "|---|---|---|---|---|---|"]
    for row in TYPES:
        column = row.column
        arrow, spark = column.arrow, column.spark
        if row.by_option:
            arrow, spark = f"{arrow} by option", f"{spark} by option"
        cells = (f"`{row.postgres}`", row.json, row.python, arrow, spark, column.note)
        lines.append(f"| {' | '.join(cells)} |".replace("  |", " |"))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(types_markdown(), end="")
