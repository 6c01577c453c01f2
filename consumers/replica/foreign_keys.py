"""Foreign keys of a target whose triggers cannot be kept from firing: which tables they join, and in what order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.call import rows

# What a foreign key does to its own rows when the row that they point to goes, or changes.
_ACTIONS = ("c", "n", "d")
_RESTRICT = "r"

# Those of partitions belong to their root; copies of a key for each partition are left out.
_KEYS = """
with named as (select n as name, to_regclass(n)::oid as relid from unnest(%s::text[]) n),
     found as (select k.*, coalesce(pg_partition_root(k.conrelid), k.conrelid)::oid as child,
                      coalesce(pg_partition_root(k.confrelid), k.confrelid)::oid as parent
                 from pg_constraint k where k.contype = 'f' and k.conparentid = 0)
select k.conname::text as name, coalesce(c.name, k.child::regclass::text) as child,
       coalesce(p.name, k.parent::regclass::text) as parent, c.name is not null as child_known,
       array(select a.attname::text from unnest(k.conkey) with ordinality u(n, place)
               join pg_attribute a on a.attrelid = k.conrelid and a.attnum = u.n order by u.place) as child_columns,
       array(select a.attname::text from unnest(k.confkey) with ordinality u(n, place)
               join pg_attribute a on a.attrelid = k.confrelid and a.attnum = u.n order by u.place) as parent_columns,
       not exists (select from pg_attribute a
                    where a.attrelid = k.conrelid and a.attnum = any (k.conkey) and a.attnotnull) as nullable,
       k.confdeltype::text as on_delete, k.confupdtype::text as on_update
  from found k
  left join named c on c.relid = k.child
  left join named p on p.relid = k.parent
 where c.name is not null or p.name is not null
 order by 1, 2"""


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A foreign key of the target: rows of `child` point to rows of `parent`, by columns in this order.

    `child_known`: the child is one of the tables that were asked for. `nullable`: all its columns may be NULL.
    `on_delete`, `on_update`: as in pg_constraint.
    """

    name: str
    child: str
    parent: str
    child_known: bool
    child_columns: list[str]
    parent_columns: list[str]
    nullable: bool
    on_delete: str
    on_update: str

    @property
    def acts_on_delete(self) -> bool:
        """True if rows of the child go or change by themselves when the row that they point to goes."""
        return self.on_delete in _ACTIONS

    @property
    def acts_on_update(self) -> bool:
        """True if rows of the child go or change by themselves when the row that they point to changes."""
        return self.on_update in _ACTIONS

    @property
    def keeps_row(self) -> bool:
        """True if a row of the parent cannot go and come again in one statement, as if it had stayed."""
        return self.acts_on_delete or self.on_delete == _RESTRICT


def foreign_keys(target: Connection[Any], tables: Collection[str]) -> list[ForeignKey]:
    """The foreign keys from and to some tables of the target."""
    return list(rows(target, ForeignKey, _KEYS, sorted(tables)))


def joined_tables(tables: Iterable[str], keys: Sequence[ForeignKey]) -> list[list[str]]:
    """Groups of tables that foreign keys join, directly or by way of others among them; all in order of their names."""
    group = {name: {name} for name in tables}
    for key in keys:
        one, other = group.get(key.child), group.get(key.parent)
        if one is None or other is None or one is other:
            continue
        one |= other
        group.update(dict.fromkeys(other, one))
    return [sorted(names) for name, names in sorted(group.items()) if name == min(names)]


def parents_first(tables: Collection[str], keys: Sequence[ForeignKey]) -> tuple[list[str], bool]:
    """Tables in an order in which each comes after those that it points to, and whether there is one.

    False if they point to each other in a circle; a table that points to itself alone is none.
    """
    left = {name: {key.parent for key in keys if key.child == name != key.parent} & set(tables) for name in tables}
    ordered: list[str] = []
    whole = True
    while left:
        free = sorted(name for name, parents in left.items() if not parents & left.keys())
        if not free:
            whole = False
            free = [min(left)]
        for name in free:
            del left[name]
        ordered += free
    return ordered, whole
