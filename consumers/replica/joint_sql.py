"""SQL that changes several tables by what is staged of each, and that finds what foreign keys would do besides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gdq.consumers.replica.changes import STAGE, found_sql, same_key, tells_pairs
from gdq.consumers.replica.foreign_keys import ForeignKey
from gdq.consumers.replica.same_rows import found_images_sql, staged_images
from gdq.consumers.replica.table import ReplicaColumn, ReplicaTable
from gdq.consumers.replica.whole_rows import delete_sql
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
        """Condition that the key of a staged row has an old and a new row; without a key none has."""
        if not self.table.keyed:
            return "false"
        if self.paired and tells_pairs(self.table):
            return f"{alias}.paired"
        same = same_key(self.table, "p", alias)
        return f"exists (select from {self.stage} p where p.is_new <> {alias}.is_new and {same})"


def old_keys_sql(table: ReplicaTable) -> str:
    """Statement that stages the keys of all rows that the target has, as rows that went or changed."""
    key = [(place, column) for place, column in enumerate(table.columns, 1) if column.is_key or not table.keyed]
    places = ", ".join(f"c{place}" for place, _ in key)
    values = ", ".join(column.travelling(f"t.{quote(column.name)}") for _, column in key)
    return f"insert into {STAGE} (is_new, {places}) select false, {values} from {table.target} t"


def joint_statement(
    tables: Sequence[StagedTable], replaced: Collection[str], parked: Mapping[str, Collection[str]]
) -> str:
    """One statement that changes all tables; of each the rows deleted, updated and inserted, and staged new and old.

    Within a table rows go before others change, and these before others come, so that they leave their unique values:
    each part of the statement needs the number of rows of the part before. `replaced`: tables whose changed rows go and
    come again; `parked`: columns that are NULL at first.
    """
    parts, counts = list[str](), list[str]()
    for n, staged in enumerate(tables):
        table, stage = staged.table, staged.stage
        stays = "false" if table.name in replaced else staged.stays()
        found = found_sql(table)
        values = {column.name: column.staged("s", place) for place, column in enumerate(table.columns, 1)}
        values |= dict.fromkeys(parked.get(table.name, ()), "null")
        delete = f"delete from {table.target} t using {stage} s where {found} and not s.is_new and not {stays}"
        if not table.keyed:
            delete = delete_sql(table, stage)
        parts.append(f"d{n} as ({delete} returning 1)")
        changed = [one.name for one in table.columns if one.settable and table.keyed]
        assigned = ", ".join(f"{quote(name)} = {values[name]}" for name in changed)
        deleted, updated = f"(select count(*) from d{n})", "0"
        if assigned:
            updated = f"(select count(*) from u{n})"
            parts.append(
                f"u{n} as (update {table.target} t set {assigned} from {stage} s "
                f"where {found} and s.is_new and {stays} and {deleted} >= 0 returning 1)"
            )
        parts.append(
            f"i{n} as (insert into {table.name} ({table.column_list}) overriding system value "
            f"select {', '.join(values[one.name] for one in table.columns)} from {stage} s "
            f"where s.is_new and not {stays} and {deleted} >= 0 and {updated} >= 0 returning 1)"
        )
        rows = ", ".join(f"(select count(*) from {stage} where {which})" for which in ("is_new", "not is_new"))
        counts.append(f"array[{deleted}, {updated}, (select count(*) from i{n}), {rows}]")
    return f"with {', '.join(parts)} select array[{', '.join(counts)}]"


def may_set(table: ReplicaTable, columns: Collection[str]) -> bool:
    """True if these columns of a row that is found by its key may be set."""
    settable = {column.name for column in table.columns if column.settable and not column.is_key}
    return any(column.is_key for column in table.columns) and settable.issuperset(columns)


def parked_sql(staged: StagedTable, columns: Collection[str]) -> str:
    """Statement that gives columns that were NULL at first their values."""
    table = staged.table
    values = {column.name: column.staged("s", place) for place, column in enumerate(table.columns, 1)}
    assigned = ", ".join(f"{quote(name)} = {values[name]}" for name in sorted(columns))
    return f"update {table.target} t set {assigned} from {staged.stage} s where {found_sql(table)} and s.is_new"


def acted_on_sql(key: ForeignKey, parent: StagedTable, child: StagedTable | None) -> str | None:
    """SELECT of whether a foreign key would change rows by itself that the source has; None if it never does.

    Two answers: whether it would change rows that are not staged, and whether rows that are staged will have values
    that others give up. `child`: its staged changes, if there are any.
    """
    affected = _affected_sql(key, parent)
    if affected is None:
        return None
    left = f"exists (select from {key.child} c where {_points_sql(key)} {_unstaged_sql(child)})"
    taken = "false"
    if child is not None:
        places = _places(child.table)
        if all(name in places for name in key.child_columns):
            pairs = ((places[name], n) for n, name in enumerate(key.child_columns))
            points = " and ".join(f"{column.staged('o', place)} = a.v{n}" for (place, column), n in pairs)
            taken = f"exists (select from affected a join {child.stage} o on o.is_new and {points})"
    return f"{affected} select {left}, {taken}"


def stage_acted_on_sql(key: ForeignKey, parent: StagedTable, child: StagedTable) -> str:
    """Statement that stages rows which a foreign key would change by itself, as if they were changed to themselves."""
    places = ", ".join(f"c{place}" for place in range(1, len(child.table.columns) + 1))
    values = ", ".join(column.travelling(f"c.{quote(column.name)}") for column in child.table.columns)
    return f"""{_affected_sql(key, parent)}
        insert into {child.stage} (is_new, {places})
        select v.is_new, {values} from {key.child} c, (values (true), (false)) v(is_new)
         where {_points_sql(key)} {_unstaged_sql(child)}"""


def _affected_sql(key: ForeignKey, parent: StagedTable) -> str | None:
    """WITH of the values that rows of a foreign key's parent give up, where it acts on that; None if it never does."""
    of_parent = _places(parent.table)
    if not all(name in of_parent for name in key.parent_columns):
        return None
    cases = []
    if key.acts_on_delete:
        cases.append(f"not s.is_new and not {parent.stays()}")
    if key.acts_on_update and not all(of_parent[name][1].is_key for name in key.parent_columns):
        other = " or ".join(
            f"t.{quote(name)} is distinct from {of_parent[name][1].staged('s', of_parent[name][0])}"
            for name in key.parent_columns
        )
        cases.append(f"s.is_new and {parent.stays()} and ({other})")
    if not cases:
        return None
    values = ", ".join(f"t.{quote(name)} as v{n}" for n, name in enumerate(key.parent_columns))
    return f"""with affected as materialized (
                 select {values} from {parent.stage} s join {parent.table.target} t on {found_sql(parent.table)}
                  where {" or ".join(f"({case})" for case in cases)})"""


def _points_sql(key: ForeignKey) -> str:
    """Condition that row c of a foreign key's child points to a value that its parent gives up."""
    # joined, not looked for row by row: the server may begin with the few values
    columns = ", ".join(f"c.{quote(name)}" for name in key.child_columns)
    values = ", ".join(f"a.v{n}" for n in range(len(key.child_columns)))
    return f"({columns}) in (select {values} from affected a)"


def _unstaged_sql(child: StagedTable | None) -> str:
    """Further condition that row c of a table is not among its staged rows."""
    if child is None:
        return ""
    return f"and not exists (select from {child.stage} o where not o.is_new and {_row_of(child.table)})"


def _places(table: ReplicaTable) -> Mapping[str, tuple[int, ReplicaColumn]]:
    """The columns of a table that travel, by name, with their places in the stage."""
    return {column.name: (place, column) for place, column in enumerate(table.columns, 1)}


def _row_of(table: ReplicaTable) -> str:
    """Condition that row c of the target has the key of staged row o; without a key, that it is the same row."""
    if not table.keyed:
        return found_images_sql(table, staged_images(table, "o"), "c")
    return " and ".join(
        f"c.{quote(column.name)} {column.equal} {column.staged('o', place)}"
        for place, column in enumerate(table.columns, 1)
        if column.is_key
    )
