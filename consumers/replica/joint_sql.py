"""SQL that changes several tables by what is staged of each, and that finds what foreign keys would do besides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gdq.consumers.replica.changes import STAGE, found_sql, insert_sql, same_key, tells_pairs
from gdq.consumers.replica.foreign_keys import ForeignKey
from gdq.consumers.replica.table import ReplicaColumn, ReplicaTable
from gdq.sql_text import quote


@dataclass(slots=True)
class StagedTable:
    """A table whose changes wait in a staging table, `own_name`. `paired`: it tells which rows stay.

    `met`: the dead letters of its keys; `conflicts`: those that were settled.
    """

    table: ReplicaTable
    own_name: str
    tick: int = 0
    paired: bool = False
    met: list[int] = field(default_factory=list)
    conflicts: int = 0

    @property
    def stage(self) -> str:
        return f"pg_temp.{self.own_name}"

    @property
    def whole(self) -> str:
        return f"{self.stage}_whole"

    def stays(self, alias: str = "s") -> str:
        """Condition that the key of a staged row has an old and a new row."""
        if self.paired and tells_pairs(self.table):
            return f"{alias}.paired"
        same = same_key(self.table, "p", alias)
        return f"exists (select from {self.stage} p where p.is_new <> {alias}.is_new and {same})"


def old_keys_sql(table: ReplicaTable) -> str:
    """Statement that stages the keys of all rows that the target has, as rows that went or changed."""
    key = [(place, column) for place, column in enumerate(table.columns, 1) if column.is_key]
    places = ", ".join(f"c{place}" for place, _ in key)
    values = ", ".join(f"t.{quote(column.name)}::{column.stage}" for _, column in key)
    return f"insert into {STAGE} (is_new, {places}) select false, {values} from {table.target} t"


def joint_statement(tables: Sequence[StagedTable], replaced: Collection[str]) -> str:
    """One statement that changes all tables; of each the rows deleted, updated and inserted, and staged new and old.

    Within a table rows go before others change, and these before others come, so that they leave their unique values:
    each part of the statement needs the number of rows of the part before.
    """
    parts, counts = list[str](), list[str]()
    for n, staged in enumerate(tables):
        table, stage = staged.table, staged.stage
        stays = "false" if table.name in replaced else staged.stays()
        found = found_sql(table)
        parts.append(
            f"d{n} as (delete from {table.target} t using {stage} s where {found} and not s.is_new and not {stays} "
            "returning 1)"
        )
        changed = [(place, column) for place, column in enumerate(table.columns, 1) if column.settable]
        assigned = ", ".join(f"{quote(column.name)} = {column.staged('s', place)}" for place, column in changed)
        deleted, updated = f"(select count(*) from d{n})", "0"
        if assigned:
            updated = f"(select count(*) from u{n})"
            parts.append(
                f"u{n} as (update {table.target} t set {assigned} from {stage} s "
                f"where {found} and s.is_new and {stays} and {deleted} >= 0 returning 1)"
            )
        insert = insert_sql(table, f"s.is_new and not {stays} and {deleted} >= 0 and {updated} >= 0", stage)
        parts.append(f"i{n} as ({insert} returning 1)")
        rows = ", ".join(f"(select count(*) from {stage} where {which})" for which in ("is_new", "not is_new"))
        counts.append(f"array[{deleted}, {updated}, (select count(*) from i{n}), {rows}]")
    return f"with {', '.join(parts)} select array[{', '.join(counts)}]"


def acted_on_sql(key: ForeignKey, parent: StagedTable, child: StagedTable | None) -> str | None:
    """SELECT of whether a foreign key would change rows by itself that the source has; None if it never does.

    `child`: its staged changes, if there are any.
    """
    of_parent = _places(parent.table)
    if not all(name in of_parent for name in key.parent_columns):
        return None
    by_key = all(of_parent[name][1].is_key for name in key.parent_columns)
    cases = []
    if key.acts_on_delete:
        cases.append(f"not s.is_new and not {parent.stays()}")
    if key.acts_on_update and not by_key:
        other = " or ".join(
            f"t.{quote(name)} is distinct from {of_parent[name][1].staged('s', of_parent[name][0])}"
            for name in key.parent_columns
        )
        cases.append(f"s.is_new and {parent.stays()} and ({other})")
    if not cases:
        return None
    affected = ", ".join(f"t.{quote(name)} as v{n}" for n, name in enumerate(key.parent_columns))
    points = " and ".join(f"c.{quote(name)} = a.v{n}" for n, name in enumerate(key.child_columns))
    changed = ""
    if child is not None:
        changed = f"and not exists (select from {child.stage} o where not o.is_new and {_row_of(child.table)})"
    found = [f"exists (select from affected a join {key.child} c on {points} {changed})"]
    if child is not None:
        of_child = _places(child.table)
        if all(name in of_child for name in key.child_columns):
            pairs = ((of_child[name], n) for n, name in enumerate(key.child_columns))
            points = " and ".join(f"{column.staged('o', place)} = a.v{n}" for (place, column), n in pairs)
            found.append(f"exists (select from affected a join {child.stage} o on o.is_new and {points})")
    return f"""with affected as materialized (
                 select {affected} from {parent.stage} s join {parent.table.target} t on {found_sql(parent.table)}
                  where {" or ".join(f"({case})" for case in cases)})
               select exists (select from affected) and ({" or ".join(found)})"""


def _places(table: ReplicaTable) -> Mapping[str, tuple[int, ReplicaColumn]]:
    """The columns of a table that travel, by name, with their places in the stage."""
    return {column.name: (place, column) for place, column in enumerate(table.columns, 1)}


def _row_of(table: ReplicaTable) -> str:
    """Condition that row c of the target has the key of staged row o."""
    return " and ".join(
        f"c.{quote(column.name)} = {column.staged('o', place)}"
        for place, column in enumerate(table.columns, 1)
        if column.is_key
    )
