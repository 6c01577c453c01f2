"""gdq's own tables in the schema gdq_target of a target's database: used only if they are as gdq makes them.

A table gdq_target.position that somebody else has made could have a trigger, a rule or a policy, whose code would run
with the rights of whoever refreshes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from psycopg import Connection

from gdq.errors import GdqError
from gdq.sql_text import pinned

# The shapes of the tables: columns with type, NOT NULL and default.
OWN_TABLES: Mapping[str, tuple[str, ...]] = {
    "position": (
        "view text not null",
        "source text not null",
        "target text not null",
        "plan text not null",
        "position text not null",
        "updated_at timestamp with time zone not null default now()",
    ),
    "chunked_copy": (
        "copy text not null",
        "table_name text not null",
        "range_no integer not null",
        "target text not null",
        "described text",
        "after text",
        "upto text",
        "until text",
        "whole boolean not null",
        "snapshot text",
        "position text",
        "row_count bigint not null",
        "arrived boolean not null",
        "updated_at timestamp with time zone not null default now()",
    ),
    "chunked_doubt": (
        "copy text not null",
        "table_name text not null",
        "reading integer not null",
        "image bigint not null",
    ),
    "mirror": (
        "name text not null",
        "queue text not null",
        "target text not null",
        "history text",
        "tick bigint",
        "positions jsonb not null",
        "updated_at timestamp with time zone not null default now()",
    ),
    "replica": (
        "name text not null",
        "queue text not null",
        "source text not null",
        "position text not null",
        "updated_at timestamp with time zone not null default now()",
    ),
    "replica_table": (
        "replica text not null",
        "table_name text not null",
        "source_oid bigint",
        "snapshot text not null",
        "columns jsonb not null",
        "handed_over boolean not null",
        "copied_at timestamp with time zone not null default now()",
    ),
    "replica_conflict": (
        "conflict_id bigint not null generated",
        "replica text not null",
        "table_name text not null",
        "kind text not null",
        "key jsonb not null",
        "local jsonb",
        "remote jsonb",
        "tick bigint not null",
        "noted_at timestamp with time zone not null default now()",
        "resolution text not null",
    ),
    "replica_dead_letter": (
        "dead_letter_id bigint not null generated",
        "replica text not null",
        "table_name text not null",
        "operation text not null",
        "key jsonb not null",
        "local jsonb",
        "remote jsonb",
        "sqlstate text",
        "reason text not null",
        "tick bigint not null",
        "died_at timestamp with time zone not null default now()",
    ),
    "switchover": (
        "replica text not null",
        "queue text not null",
        "side text not null",
        "turns integer not null",
        "other text not null",
        "changed_at timestamp with time zone not null default now()",
    ),
    "replica_skip": (
        "skip_id bigint not null generated",
        "replica text not null",
        "table_name text not null",
        "changes bigint not null",
        "events text[] not null",
        "tick_from bigint not null",
        "tick_to bigint not null",
        "skipped_at timestamp with time zone not null default now()",
    ),
    "replica_definition": (
        "replica text not null",
        "source_oid bigint not null",
        "kind text not null",
        "source_id bigint not null",
        "name text not null",
        "definition text not null",
        "unique_columns text[]",
        "made boolean not null",
    ),
    "compare_run": ("made text", "relid oid", 'identity "char"', "index_name name"),
    "slot_asked": ("slot_name text not null", "asked_at timestamp with time zone not null default now()"),
    "slot_position": (
        "slot_name text not null",
        "lsn pg_lsn not null",
        "updated_at timestamp with time zone not null default now()",
    ),
    "slot_view": ("slot_name text not null", "lsn pg_lsn not null", "tables text", "snapshot text"),
}

# A role is trusted if the session has its rights anyway. For a superuser, who has everybody's, only superusers are, and
# the owner of gdq in the source's own database. A database's owner is not.
_TRUSTED = """
with me as (select r.oid, r.rolsuper from pg_catalog.pg_roles r where r.rolname = current_user),
     trusted as (
       select r.oid from pg_catalog.pg_roles r, me
        where r.oid = me.oid or r.rolsuper or (not me.rolsuper and pg_catalog.pg_has_role(me.oid, r.oid, 'MEMBER'))
           or (%(source)s and r.oid = (select n.nspowner from pg_catalog.pg_namespace n where n.nspname = 'gdq')))"""

_FAULTS = f"""{_TRUSTED}
select 'schema', n.nspname::text, 'belongs to ' || pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(n.nspowner)),
       null::text[]
  from pg_catalog.pg_namespace n
 where n.nspname = 'gdq_target' and n.nspowner not in (select t.oid from trusted t)
union all
select 'table', 'gdq_target.' || c.relname,
       case when c.relowner not in (select t.oid from trusted t)
            then 'belongs to ' || pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(c.relowner))
            when c.relkind <> 'r' or c.relpersistence <> 'p' or c.relispartition
                 or exists (select from pg_catalog.pg_inherits i where c.oid in (i.inhrelid, i.inhparent))
            then 'is no ordinary table'
            when exists (select from pg_catalog.pg_trigger t where t.tgrelid = c.oid) then 'has a trigger'
            when exists (select from pg_catalog.pg_rewrite r where r.ev_class = c.oid) then 'has a rule'
            when c.relrowsecurity or exists (select from pg_catalog.pg_policy p where p.polrelid = c.oid)
            then 'has row level security'
            when exists (select from pg_catalog.pg_constraint k
                          where k.conrelid = c.oid and k.contype not in ('p', 'n'))
            then 'has another constraint'
            when exists (select from pg_catalog.pg_index i
                          where i.indrelid = c.oid
                            and not (i.indisprimary and i.indkey[0] = 1 and i.indclass[0] < 16384))
            then 'has another index' end,
       array(select a.attname || ' ' || pg_catalog.format_type(a.atttypid, a.atttypmod)
                    || case when a.attnotnull then ' not null' else '' end
                    || case when a.attgenerated <> '' or a.attidentity <> '' then ' generated' else '' end
                    || case when a.attcollation <> t.typcollation then ' collate' else '' end
                    || coalesce(' default ' || pg_catalog.pg_get_expr(d.adbin, d.adrelid), '')
               from pg_catalog.pg_attribute a join pg_catalog.pg_type t on t.oid = a.atttypid
               left join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
              where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped order by a.attnum)
  from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where n.nspname = 'gdq_target' and c.relname = any (%(names)s)"""


_NOT_OURS = f"""{_TRUSTED}
select t.name, pg_catalog.pg_get_userbyid(c.relowner)::text,
       c.relkind = 'r' and c.relowner in (select t.oid from trusted t)
  from pg_catalog.unnest(%(names)s::text[]) t(name)
  join pg_catalog.pg_class c on c.oid = pg_catalog.to_regclass(t.name)"""

# Whether all of the tables that exist are those of the session, as check_tables_of_session() asks.
ALL_OURS = f"not exists (select from ({_NOT_OURS}) as f(name, owner, ours) where not f.ours)"

# The tables that each session has looked at.
_looked_at: WeakKeyDictionary[Connection[Any], set[str]] = WeakKeyDictionary()


def check_own_tables(connection: Connection[Any], *names: str, in_source: bool = False) -> None:
    """GdqError for a schema gdq_target, or a table of it with one of these names, that gdq has not made.

    Its owner must be trusted, and the table as gdq makes it; what is missing is no error. `in_source`: the
    connection leads to the database with gdq, not to that of a target elsewhere. A session looks once at a table:
    nobody but its owner, who is trusted, can alter it.
    """
    known = _looked_at.setdefault(connection, set())
    if known.issuperset(names):
        return
    with pinned(connection):
        found = connection.execute(_FAULTS, {"source": in_source, "names": list(names)}).fetchall()
    for kind, name, seen, columns in found:
        fault, wanted = seen, OWN_TABLES.get(name.removeprefix("gdq_target."))
        if fault is None and wanted is not None and tuple(columns) not in (wanted, wanted[:3]):  # older: no snapshot
            fault = "has other columns"
        known.add(name.removeprefix("gdq_target."))
        if fault is not None:
            known.clear()
            raise GdqError(
                f"{kind} {name} is not as gdq makes it: it {fault}",
                hint=f"Drop the {kind}, or refresh as a role that has its owner's rights; gdq makes it anew.",
            )


def check_tables_of_session(connection: Connection[Any], names: Sequence[str], *, in_source: bool) -> list[str]:
    """Those of the tables (quoted, qualified) that exist; GdqError if one is no table, or another role's.

    Call it in a transaction whose settings are pinned. `in_source`: as for check_own_tables().
    """
    found = connection.execute(_NOT_OURS, {"source": in_source, "names": list(names)}).fetchall()
    for name, owner, ours in found:
        if not ours:
            raise GdqError(
                f"{name} is not the table that a refresh made: it belongs to {owner}",
                hint=f"Drop it, or refresh as {owner}.",
            )
    return [name for name, _, _ in found]
