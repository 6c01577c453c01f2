"""A replicated table as both databases have it: which columns travel, in which types, and by which key rows are found.

Values of types whose equal values are equal to the bit travel in binary form. All others travel as text, by which
they are also netted: 1.0 and 1.00 are equal numbers and different values. Rows of a table without a key are found by
all their values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import psycopg
from psycopg import Connection
from psycopg.rows import namedtuple_row

from gdq.consumers.copy.pieces import HOLDS_NO_NULL
from gdq.consumers.replica.source_tables import SourceTable
from gdq.errors import GdqError, mapped_errors
from gdq.sql_text import literal, quote

_EXACT = frozenset(
    (
        *("smallint", "integer", "bigint", "oid", "boolean", "uuid", "date", "text", "character varying", "bytea"),
        *("timestamp without time zone", "timestamp with time zone", "time without time zone"),
    )
)

# What is done about triggers of users in the target, if the role cannot keep them from firing.
OnTriggers = Literal["refuse", "fire"]

# What fires in the target when a replica writes: nothing, foreign keys and other constraints, or all triggers.
Fires = Literal["nothing", "keys", "all"]

_TEXTS = ("text", "character varying")
_PADDED = ("character", "bpchar")

# True of a target table c that has a unique index over the columns %(key)s.
_BY_KEY = """
       exists (select from pg_index i where i.indrelid = c.oid and i.indisvalid and i.indpred is null
                and i.indnkeyatts = cardinality(%(key)s::text[])
                and i.indisunique
                and array(select a.attname::text from unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) k
                            join pg_attribute a on a.attrelid = c.oid and a.attnum = k order by 1)
                    = array(select n from unnest(%(key)s::text[]) n order by 1))"""

_TARGET_TABLE = f"""
select c.oid, c.relkind,
       (select min(t.tgname::text) from pg_trigger t
         where t.tgrelid = c.oid and t.tgenabled in ('O', 'A') and not t.tgisinternal
           and left(t.tgname, 5) <> '!gdq_') as trigger,
       {_BY_KEY} as by_key,
       (select count(*) > 1 from pg_index i
         where i.indrelid = c.oid and (i.indisunique or i.indisexclusion)) as more_keys,
       exists (select from pg_constraint k
                where k.conrelid = c.oid and k.contype in ('p', 'u', 'x') and k.condeferrable) as deferrable,
       exists (select from pg_class l
                where l.relpersistence <> 'p'
                  and (l.oid = c.oid or l.oid in (select t.relid from pg_partition_tree(c.oid) t))) as unlogged
  from pg_class c where c.oid = to_regclass(%(table)s) and c.relkind in ('r', 'p')"""

# The operator of equality of a class c of operators for indexes, with its schema where that is an extension's.
_EQUAL = """coalesce((select format('operator(%%I.%%s)', n.nspname, o.oprname)
                   from pg_opclass c
                   join pg_am m on m.oid = c.opcmethod and m.amname = 'btree'
                   join pg_amop p on p.amopfamily = c.opcfamily and p.amopstrategy = 3
                    and p.amoplefttype = c.opcintype and p.amoprighttype = c.opcintype
                   join pg_operator o on o.oid = p.amopopr
                   join pg_namespace n on n.oid = o.oprnamespace
                  where {} and n.nspname <> 'pg_catalog'), '=')"""

# The operators by which the columns of an index i are equal.
INDEX_EQUALITY = f"""array(select {_EQUAL.format("c.oid = k.opclass")}
               from unnest(i.indclass::oid[]) with ordinality k(opclass, place) order by k.place)"""

_OF_TYPE = "c.opcintype = coalesce(nullif(t.typbasetype, 0), t.oid) and c.opcdefault and t.oid >= 16384"

# A cast to a type with a length would cut a text that the column refuses.
_TARGET_COLUMNS = f"""
select a.attname as name, format_type(a.atttypid, -1) as type, a.attgenerated <> '' as generated,
       a.attidentity = 'a' as always, {HOLDS_NO_NULL} as not_null,
       format_type(a.atttypid, case when a.atttypid = any ('{{bpchar,varchar,bit,varbit}}'::regtype[]) then -1
                                    else a.atttypmod end) as rounded,
       t.typoutput = 'bpcharout'::regproc and (a.atttypmod = -1 or t.typtype = 'd') as blanks,
       {_EQUAL.format(_OF_TYPE)} as equal
  from pg_attribute a join pg_type t on t.oid = a.atttypid
 where a.attrelid = %s and a.attnum > 0 and not a.attisdropped"""


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column of the source's table: `stage` is its type on the way, `old` and `new` are the log's columns, if any.

    `omitted`: the log may leave out large values that updates leave as they were. `padded`: the type that is read is
    character.
    """

    name: str
    stage: str
    is_key: bool
    old: str = ""
    new: str = ""
    omitted: bool = False
    padded: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaColumn:
    """A column that travels: `stage` is its type on the way, `type` the target's, `old` and `new` the log's columns.

    `settable`: an UPDATE may set it. `always`: the target's column is GENERATED ALWAYS AS IDENTITY, which takes other
    values by INSERT alone. `rounded`: the target's type with its precision. `equal`: its operator of equality.
    `not_null`: in the target. `padded`: the source's type is character, of which a cast to text cuts blanks. `blanks`:
    the target's values differ by these alone. `omitted`: the log may leave out large values that updates leave as they
    were.
    """

    name: str
    stage: str
    type: str
    is_key: bool
    old: str
    new: str
    settable: bool
    always: bool
    rounded: str
    equal: str
    not_null: bool
    padded: bool
    blanks: bool
    omitted: bool = False

    def logged(self, value: str) -> str:
        """A value of the source, or of its log, as it travels."""
        return value if self.stage != "text" else value_text(value, padded=self.padded)

    def travelling(self, value: str) -> str:
        """A value of the target's type as the source's travel."""
        return f"{value}::{self.stage}" if self.stage != "text" else value_text(value, padded=self.blanks)

    def staged(self, alias: str, place: int) -> str:
        """The value from the staging table, in a type that the target's column takes."""
        return self.typed(f"{alias}.c{place}")

    def typed(self, value: str) -> str:
        """A value of the staging table's type, in a type that the target's column and its operators take."""
        cast = self.type != "text" if self.stage == "text" else self.equal != "="
        return f"{value}::{self.type}" if cast else value

    def stored(self, row: str) -> str:
        """The value from a row that is stored as an object of texts, in the type that it has in the staging table."""
        return f"({row}->>{literal(self.name)})::{self.stage}"

    def image(self, value: str) -> str:
        """A value of the target's type in a form in which equal values are the same."""
        exact = self.type in _EXACT and self.type not in _TEXTS
        return value if exact else f'{value_text(value, padded=self.blanks)} collate "C"'

    def staged_image(self, alias: str, place: int) -> str:
        """The value from the staging table as it travelled, in a form in which equal values are the same."""
        return f"{alias}.c{place}" + (' collate "C"' if self.stage in _TEXTS else "")


@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """A table whose changes a replica applies, at one version of its columns in the source.

    `name`: as `%I.%I`, the same in both databases. `version`: None if no log was looked at. `more_keys`: the target has
    further unique keys. `deferrable`: some of its keys are. `own`: columns of the target that keep their values when a
    row changes: they do not come from the source.
    """

    name: str
    version: int | None
    columns: tuple[ReplicaColumn, ...]
    partitioned: bool
    more_keys: bool
    deferrable: bool
    own: tuple[str, ...]

    @property
    def target(self) -> str:
        """The target table in UPDATE and DELETE: rows of inheritance children are not its own."""
        return self.name if self.partitioned else f"only {self.name}"

    @property
    def column_list(self) -> str:
        return ", ".join(quote(column.name) for column in self.columns)

    def omitting(self, names: Collection[str]) -> ReplicaTable:
        """The table as it is where the log may leave out values of these columns too."""
        if not names:
            return self
        columns = tuple(replace(one, omitted=one.omitted or one.name in names) for one in self.columns)
        return replace(self, columns=columns)

    @property
    def omits(self) -> bool:
        """True if the log may leave out values of columns."""
        return any(column.omitted for column in self.columns)

    @property
    def keyed(self) -> bool:
        """False if rows are told apart by all their values alone, and the same row may be there several times."""
        return any(column.is_key for column in self.columns)


def value_text(value: str, *, padded: bool) -> str:
    """SQL of the whole text of a value. `padded`: its type is character, or a domain over it."""
    return f"textin(bpcharout({value}))" if padded else f"{value}::text"


def describe_table(
    source: Connection[Any],
    target: Connection[Any],
    queue: str,
    table: str,
    captured: SourceTable,
    *,
    version: int | None = None,
    fires: Fires,
) -> ReplicaTable:
    """A table as the source has it at a version of its columns, None for the newest, and the target has it now.

    `table`: its name in the target. GdqError if the replica cannot keep it.
    """
    if captured.mode != "full" or captured.filter is not None or len(captured.operations) < 3:
        raise GdqError(
            f"table {table} is captured in part: a replica needs whole rows of all changes",
            hint=f"Capture it in mode full, without a filter: gdq alter-table {queue} {table}",
        )
    version = captured.version if version is None else version
    columns = [
        SourceColumn(
            name=column.name,
            stage=column.log_type if not column.as_text else "text",
            is_key=column.is_key,
            old=column.log_old,
            new=column.log_new,
            omitted=column.omitted,
            padded=column.log_type in _PADDED,
        )
        for column in logged_columns(source, queue, captured.relid, version)
    ]
    return match_target(target, table, columns, version=version, fires=fires)


def logged_columns(source: Connection[Any], queue: str, relid: int, version: int) -> list[Any]:
    """The columns of a captured table at a version, as gdq.table_columns() gives them."""
    with mapped_errors(), source.cursor(row_factory=namedtuple_row) as cursor:
        query = "select * from gdq.table_columns(%s, %s::regclass, %s) order by attnum"
        return cursor.execute(query, [queue, str(relid), version]).fetchall()


def match_target(
    target: Connection[Any],
    table: str,
    columns: Sequence[SourceColumn],
    *,
    version: int | None = None,
    fires: Fires,
    once: bool = False,
) -> ReplicaTable:
    """A table whose columns in the source are known, as the target has it; GdqError if it cannot be kept equal.

    `once`: it is made equal once, and may be unlogged: after a crash nobody takes it for equal.
    Columns whose type is not equal to the bit travel as text, whatever their `stage`. A key with a column that the
    target computes is none: the other columns tell rows apart, since it is made of them.
    """
    key = [column.name for column in columns if column.is_key]
    with target.cursor(row_factory=namedtuple_row) as cursor:
        there: Any = cursor.execute(_TARGET_TABLE, {"table": table, "key": key}).fetchone()
        if there is None:
            raise GdqError(
                f"the target has no table {table}",
                hint="Have it made with --create, or take it from pg_dump --schema-only (docs/replicas.md).",
            )
        listed: list[Any] = cursor.execute(_TARGET_COLUMNS, [there.oid]).fetchall()
    theirs = {column.name: column for column in listed}
    if there.unlogged and not once:
        raise GdqError(
            f"table {table} of the target, or a partition of it, is unlogged: a crash there would empty it unnoticed",
            hint=f"ALTER TABLE {table} SET LOGGED in the target.",
        )
    _check_target(table, there, key, [c.name for c in columns if c.name not in theirs], fires)
    names = {column.name for column in columns}
    computed = any(theirs[name].generated for name in key)
    return ReplicaTable(
        name=table,
        version=version,
        columns=tuple(
            ReplicaColumn(
                name=column.name,
                stage=column.stage if column.stage in _EXACT else "text",
                type=theirs[column.name].type,
                is_key=column.is_key and not computed,
                old=column.old,
                new=column.new,
                settable=not theirs[column.name].always,
                always=theirs[column.name].always,
                rounded=theirs[column.name].rounded,
                equal=theirs[column.name].equal,
                not_null=theirs[column.name].not_null,
                omitted=column.omitted,
                padded=column.padded,
                blanks=theirs[column.name].blanks,
            )
            for column in columns
            if not theirs[column.name].generated
        ),
        partitioned=there.relkind == "p",
        more_keys=there.more_keys,
        deferrable=there.deferrable,
        own=tuple(sorted(name for name, column in theirs.items() if not column.generated and name not in names)),
    )


def same_part(one: str, other: str, equal: str, *, nulls_equal: bool) -> str:
    """Condition that two values of a unique key are the same, by an operator of INDEX_EQUALITY."""
    same = f"{one} {equal} {other}"
    return f"({same} or {one} is null and {other} is null)" if nulls_equal else same


def has_unique_key(target: Connection[Any], table: str, key: Sequence[str]) -> bool:
    """True if a table of the target has a unique index over these columns, by which rows can be found."""
    query = f"select from pg_class c where c.oid = to_regclass(%(table)s) and {_BY_KEY}"
    return target.execute(query, {"table": table, "key": list(key)}).rowcount > 0


def suppress_triggers(target: Connection[Any], triggers: OnTriggers = "refuse", *, local: bool = False) -> Fires:
    """Keep the target's triggers and foreign keys from firing in this session; what fires if the role may not.

    `triggers`: what is done about triggers of users then. `local`: in the open transaction alone.
    """
    try:
        with target.transaction():
            target.execute(f"set {'local' if local else 'session'} session_replication_role = replica")
    except psycopg.errors.InsufficientPrivilege:
        return "all" if triggers == "fire" else "keys"
    return "nothing"


def _check_target(table: str, there: Any, key: list[str], missing: list[str], fires: Fires) -> None:
    """GdqError for a target table that lacks columns or the key, or whose triggers would fire."""
    if missing:
        raise GdqError(
            f"table {table} of the target lacks {', '.join(map(quote, missing))}",
            hint="Add what is missing by ALTER TABLE, as the source has it; then start again.",
        )
    if key and not there.by_key:
        raise GdqError(
            f"table {table} of the target has no unique key ({', '.join(map(quote, key))})",
            hint="Create it there: rows are found by the key of the source.",
        )
    if there.trigger is not None and fires == "keys":
        raise GdqError(
            f"table {table} of the target has trigger {quote(there.trigger)}, which this role cannot keep from firing",
            hint="Let it fire by --triggers fire, or have a superuser of the target say: "
            "grant set on parameter session_replication_role to ROLE",
        )
