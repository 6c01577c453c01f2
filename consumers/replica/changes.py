"""The changes of a batch, one table at a time: netted in the source, copied to the target, and applied there by key.

Images are added up with their signs, old ones -1 and new ones +1. What remains is at most one old and one new image of
a key, whatever the order in which the log has them: a trigger of the application may turn it round within a statement.
Of a table without a key remains each image as often as it came or went (whole_rows).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import Connection

from gdq.consumers.copy.target_columns import rows_of
from gdq.consumers.replica.same_rows import found_whole_sql, same_whole_sql
from gdq.consumers.replica.table import ReplicaColumn, ReplicaTable
from gdq.consumers.views.change_source import NEW_OPS, OLD_OPS
from gdq.consumers.views.row_copy import copy_in_parts, copy_rows
from gdq.sql_text import quote, raw

STAGE_NAME = "gdq_replica_stage"
STAGE = f"pg_temp.{STAGE_NAME}"
# What rows that go and come again have in columns of the target's own.
_OWN = "pg_temp.gdq_replica_own"

# What the server says of a row in whose place another one is, by a unique key or an exclusion constraint.
PLACE_TAKEN = (psycopg.errors.UniqueViolation, psycopg.errors.ExclusionViolation)

# Rows from which on the planner is told what the staging table holds; below that its guess does.
_ANALYZE_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class Applied:
    """Rows of the target that were changed, by one table's changes or those of a whole batch, and those that were not.

    `conflicts` were settled, `dead_letters` were refused and put aside.
    """

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    conflicts: int = 0
    dead_letters: int = 0

    def __add__(self, other: Applied) -> Applied:
        return Applied(
            self.inserted + other.inserted,
            self.updated + other.updated,
            self.deleted + other.deleted,
            self.conflicts + other.conflicts,
            self.dead_letters + other.dead_letters,
        )


@dataclass(frozen=True, slots=True)
class Staged:
    """Where a table's net change, or a part of it, is staged, and what is known of it.

    `name`: STAGE, which may be edited, or a table that is only read. `paired`: it is as netted_sql() or
    last_images_sql() has filled it, and may tell which rows are pairs. `coming`, `going`: the rows that the target will
    have, and those that it had; None if nobody has counted them. `doubtful`: keys are among them whose changes are to
    be added up.
    """

    name: str = STAGE
    paired: bool = False
    coming: int | None = None
    going: int | None = None
    doubtful: bool = False

    def counted(self, target: Connection[Any]) -> Staged:
        """The same with the numbers of rows."""
        if self.coming is not None:
            return self
        # a pair may be staged by its new row alone
        old = "is_new = paired" if self.paired else "not is_new"
        query = f"""select count(*) filter (where is_new), count(*) filter (where {old}),
                           coalesce(bool_or(is_new is null), false) from {self.name}"""
        row = target.execute(raw(query)).fetchone()
        assert row is not None
        return replace(self, coming=row[0], going=row[1], doubtful=row[2])


# What is in STAGE, whoever has put it there; it is not told which rows are pairs.
IN_STAGE = (Staged(),)


def netted_sql(table: ReplicaTable, log_rows: str, after: int | None, *, whole: bool = False) -> str:
    """SELECT of a table's net change from its log rows: is_new, the columns, paired; of a row that went only its key.

    `after`: the number of the last TRUNCATE among them; earlier changes are part of what it emptied. `whole`: of a row
    that went, too, all columns, as always without a key. paired: the key has an old and a new row; NULL if the source
    cannot tell.
    """
    whole = whole or not table.keyed
    numbered = list(enumerate(table.columns, 1))
    images = ", ".join(
        column.logged(f"(case when s.w < 0 then d.{quote(column.old)} else d.{quote(column.new)} end)")
        + f" as c{place}"
        for place, column in numbered
    )
    values = ", ".join(
        f"c{place}" if column.is_key or whole else f"case when net > 0 then c{place} end" for place, column in numbered
    )
    later = "" if after is None else f" and d.ev_id > {after}"
    # the key first: rows that are sorted to be added up are in the order of the pairs, too
    listed = ", ".join(f"c{place}" for place, _ in sorted(numbered, key=lambda one: not one[1].is_key))
    key = ", ".join(f"c{place}" for place, column in numbered if column.is_key)
    paired = f"count(*) over (partition by {key}) > 1" if tells_pairs(table) else "null::boolean"
    repeated = "" if table.keyed else ", generate_series(1, abs(net))"
    return f"""select net > 0, {values}, {paired}
      from (select {listed}, sum(w) as net
              from (select s.w, {images} from ({log_rows}) as d, (values (-1), (1)) as s(w)
                     where case when s.w < 0 then d.ev_op in {OLD_OPS} else d.ev_op in {NEW_OPS} end{later}) as image
             group by {listed} having sum(w) <> 0) as netted{repeated}"""


def tells_pairs(table: ReplicaTable) -> bool:
    """True if keys are equal in the source as in the target: not by text alone, where 1.0 and 1.00 are one number."""
    return table.keyed and all(
        column.stage != "text" or column.type == "text" for column in table.columns if column.is_key
    )


def stage_changes(
    source: Connection[Any], target: Connection[Any], table: ReplicaTable, query: str, *, paired: bool = False
) -> int:
    """Copy a table's net change into the staging table, which is made for it; the number of rows.

    `query`: SELECT of is_new and the columns, then of what tells `paired` rows and, if the log may leave out values,
    left_out.
    """
    make_stage(target, table)
    into = f"{STAGE} ({_filled_columns(table, paired=paired)})"
    copied = copy_rows(source, f"({query})", target, into, form="binary").rows
    if copied >= _ANALYZE_ROWS:
        target.execute(f"analyze {STAGE}")
    return copied


def fill_stages(
    source: Connection[Any],
    target: Connection[Any],
    table: ReplicaTable,
    query: str,
    stages: Iterator[tuple[str, int]],
    *,
    moved: Callable[[int], None],
) -> Iterator[Staged]:
    """Copy a table's net change, with what tells pairs, into empty tables of its own, one part after the other.

    `stages`: their names, and about how many bytes go there. `moved`: see copy_rows().
    """
    named, columns = list[str](), _filled_columns(table, paired=True)

    def into() -> Iterator[tuple[str, int]]:
        for name, size in stages:
            named.append(name)
            yield f"{name} ({columns})", size

    for _ in copy_in_parts(source, f"({query})", target, into(), moved=moved):
        yield Staged(named[-1], tells_pairs(table)).counted(target)


def stage_again(target: Connection[Any], table: ReplicaTable, parts: Iterable[Staged]) -> None:
    """Copy what is staged elsewhere into the staging table, which is made for it: there it may be edited."""
    make_stage(target, table)
    copied = sum(target.execute(raw(f"insert into {STAGE} select * from {part.name}")).rowcount for part in parts)
    if copied >= _ANALYZE_ROWS:
        target.execute(f"analyze {STAGE}")


def _filled_columns(table: ReplicaTable, *, paired: bool) -> str:
    """The columns of a staging table that are copied into it, as COPY lists them."""
    listed = [f"c{place}" for place in range(1, len(table.columns) + 1)]
    listed += (["paired", "left_out"] if table.omits else ["paired"]) if paired else []
    return f"is_new, {', '.join(listed)}"


def make_stage(target: Connection[Any], table: ReplicaTable) -> None:
    """Make the staging table of a table, in the open transaction; release_stage() ends its use.

    paired: an old and a new row of the key were staged. It is right as long as nobody has edited the stage. left_out:
    the places of values that are as the target's row has them, where the log may leave some out (omitted_values).
    """
    own = kept_name(table)
    target.execute(
        raw(f"""do $do$ begin
                  if pg_catalog.to_regclass('{STAGE}') is not null then
                    drop table {STAGE};
                  end if;
                  if pg_catalog.to_regclass('pg_temp.{own}') is null then
                    create temp table {own} ({stage_columns(table)}) on commit delete rows;
                  end if;
                  alter table pg_temp.{own} rename to {STAGE_NAME};
                  if exists (select from {STAGE}) then
                    truncate {STAGE};
                  end if;
                end $do$""")
    )


def release_stage(target: Connection[Any], table: ReplicaTable) -> None:
    """Keep the staging table, if there is one, for the next batch with the same columns: new ones bloat catalogs."""
    target.execute(raw(f"alter table if exists {STAGE} rename to {kept_name(table)}"))


def kept_name(table: ReplicaTable) -> str:
    """The name of a staging table between two uses: tables with the same columns share one."""
    return f"{STAGE_NAME}_{hashlib.sha256(stage_columns(table).encode()).hexdigest()[:16]}"


def stage_columns(table: ReplicaTable) -> str:
    """The columns of a staging table, as CREATE TABLE lists them."""
    columns = ", ".join(f"c{place} {column.stage}" for place, column in enumerate(table.columns, 1))
    return f"is_new boolean, {columns}, paired boolean{', left_out smallint[]' if table.omits else ''}"


def empty_table(target: Connection[Any], name: str) -> None:
    """Delete all rows of a target table, by DELETE where the server refuses TRUNCATE for a foreign key."""
    if not truncate_tables(target, [name]):
        target.execute(raw(f"delete from {rows_of(target, name)}"))


def truncate_tables(target: Connection[Any], names: Sequence[str]) -> bool:
    """Delete all rows of tables at once; False if the server refuses it, as foreign keys of others point there."""
    try:
        with target.transaction():
            target.execute(raw(f"truncate {', '.join(rows_of(target, name) for name in names)}"))
    except psycopg.errors.FeatureNotSupported:
        return False
    return True


def update_rows(target: Connection[Any], table: ReplicaTable, staged: Staged = IN_STAGE[0]) -> Applied:
    """Delete the rows that went, update those that stay, insert those that came.

    A stage that is not `paired` is looked through for the two rows of a key.
    """
    tells = staged.paired and tells_pairs(table)
    stage, stays = (staged.name, "s.paired") if tells else (_paired_sql(table, staged.name), "s.stays")
    found = found_sql(table)
    query = f"delete from {table.target} t using {stage} s where {found} and not s.is_new and not {stays}"
    deleted = target.execute(raw(query)).rowcount
    settable = [(place, column) for place, column in enumerate(table.columns, 1) if column.settable]
    # equal keys may differ as texts; to set others would have the server expect changed entries of the key's index
    changed = [one for one in settable if not one[1].is_key or one[1].stage == "text"] or settable
    assigned = ", ".join(f"{quote(column.name)} = {_set_sql(column, place)}" for place, column in changed)
    updated = 0
    if assigned:
        query = f"update {table.target} t set {assigned} from {stage} s where {found} and s.is_new and {stays}"
        updated = target.execute(raw(query)).rowcount
    return Applied(insert_staged(target, table, f"s.is_new and not {stays}", stage), updated, deleted)


def _paired_sql(table: ReplicaTable, stage: str) -> str:
    """The staged rows for FROM, with `stays`: the key has an old and a new row.

    They are sorted for that: where rows are to be found by an index, a join would compare each with each.
    """
    key = ", ".join(column.staged("r", place) for place, column in enumerate(table.columns, 1) if column.is_key)
    both = "bool_or(r.is_new) over one and bool_or(not r.is_new) over one"
    return f"(select r.*, {both} as stays from {stage} r window one as (partition by {key}))"


def _set_sql(column: ReplicaColumn, place: int) -> str:
    """The value of a column in an update; a large one that is as it was is not written again if it is the row's own."""
    staged = column.staged("s", place)
    own = f"t.{quote(column.name)}"
    return f"case when {place} = any (s.left_out) then {own} else {staged} end" if column.omitted else staged


def replace_rows(target: Connection[Any], table: ReplicaTable, staged: Staged = IN_STAGE[0]) -> Applied:
    """Delete all rows that went or changed, and insert what they are now; own columns of the target stay."""
    pairs = staged.paired and tells_pairs(table)
    old = "(not s.is_new or s.paired)" if pairs else "not s.is_new"
    if table.own:
        # once for each key, of which both rows may be staged
        kept = _own_values_sql(table, staged.name, "s.is_new and s.paired" if pairs else "not s.is_new")
        target.execute(raw(f"create temp table gdq_replica_own on commit drop as {kept}"))
    query = f"delete from {table.target} t using {staged.name} s where {found_sql(table)} and {old}"
    deleted = target.execute(raw(query)).rowcount
    if not table.own:
        return Applied(insert_staged(target, table, "s.is_new", staged.name), 0, deleted)
    has_own = f"exists (select from {_OWN} o where {same_key(table, 's', 'o')})"
    inserted = insert_staged(target, table, f"s.is_new and not {has_own}", staged.name)
    travelling = [(place, column) for place, column in enumerate(table.columns, 1) if column.name not in table.own]
    listed = ", ".join([*(quote(column.name) for _, column in travelling), *map(quote, table.own)])
    values = [*(column.staged("s", place) for place, column in travelling), *_own_places(table)]
    query = f"""insert into {table.name} ({listed}) overriding system value
        select {", ".join(values)} from {staged.name} s join {_OWN} o on {same_key(table, "s", "o")} where s.is_new"""
    inserted += target.execute(raw(query)).rowcount
    target.execute(f"drop table {_OWN}")
    return Applied(inserted, 0, deleted)


def _own_values_sql(table: ReplicaTable, stage: str, once: str) -> str:
    """SELECT of the values that the target's own columns have in rows of staged keys; `once`: condition on these."""
    key = ", ".join(f"s.c{place}" for place, column in enumerate(table.columns, 1) if column.is_key)
    pairs = zip(table.own, _own_places(table), strict=True)
    values = ", ".join(f"t.{quote(name)} as {place.removeprefix('o.')}" for name, place in pairs)
    return f"select {key}, {values} from {table.target} t join {stage} s on {found_sql(table)} where {once}"


def _own_places(table: ReplicaTable) -> list[str]:
    return [f"o.own{number}" for number, _ in enumerate(table.own)]


def takes_other_identity(target: Connection[Any], table: ReplicaTable, stage: str = STAGE) -> bool:
    """True if a row is staged that stays, and has another value in a column that an UPDATE cannot set."""
    other = " or ".join(
        f"t.{quote(column.name)} is distinct from {column.staged('s', place)}"
        for place, column in enumerate(table.columns, 1)
        if column.always and not column.is_key and column.name not in table.own
    )
    if not other:
        return False
    query = f"select from {table.target} t join {stage} s on {found_sql(table)} where s.is_new and ({other}) limit 1"
    return target.execute(raw(query)).rowcount > 0


def insert_staged(target: Connection[Any], table: ReplicaTable, condition: str, stage: str = STAGE) -> int:
    """Insert the staged rows s that match a condition; their number."""
    values = ", ".join(column.staged("s", place) for place, column in enumerate(table.columns, 1))
    return target.execute(
        raw(
            f"insert into {table.name} ({table.column_list}) overriding system value "
            f"select {values} from {stage} s where {condition}"
        )
    ).rowcount


def found_sql(table: ReplicaTable, alias: str = "s") -> str:
    """Condition that row t of the target has the key of a staged row; without a key, that it is the same row."""
    if not table.keyed:
        return found_whole_sql(table, alias)
    return " and ".join(
        f"t.{quote(column.name)} {column.equal} {column.staged(alias, place)}"
        for place, column in enumerate(table.columns, 1)
        if column.is_key
    )


def same_key(table: ReplicaTable, one: str, other: str) -> str:
    """Condition that two staged rows have one key; without a key, that they are the same row."""
    if not table.keyed:
        return same_whole_sql(table, one, other)
    return " and ".join(
        f"{column.staged(one, place)} {column.equal} {column.staged(other, place)}"
        for place, column in enumerate(table.columns, 1)
        if column.is_key
    )
