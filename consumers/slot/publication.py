"""Altered publications: narrowed_publication() finds the tables and changes that a publication no longer sends.

If somebody removes a table, rows (by a filter), columns or operations from a publication, their changes never come, and
the stream does not say so. So create_slot() records the published tables in the publication's comment, and
narrowed_publication() compares.
"""

from __future__ import annotations

import json
from typing import Any

from psycopg import Connection, sql

from gdq.call import scalar
from gdq.qualified_sql import qualified

_PREFIX = "gdq create-slot published: "

# A table that is published again, or with another filter, gets another row in pg_publication_rel.
_TABLES = qualified("""
    select pg_catalog.jsonb_object_agg(pg_catalog.format('%%I.%%I', t.schemaname, t.tablename),
             pg_catalog.jsonb_build_array(c.oid::bigint, r.oid::bigint))::text
      from pg_catalog.pg_publication p
      join pg_catalog.pg_publication_tables t on t.pubname = p.pubname
      join pg_catalog.pg_namespace n on n.nspname = t.schemaname
      join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = t.tablename
      left join pg_catalog.pg_publication_rel r on r.prpubid = p.oid and r.prrelid = c.oid
     where p.pubname = %s""")
_FACTS = qualified("""
    select array_remove(array[case when not p.pubinsert then 'INSERT' end,
                              case when not p.pubupdate then 'UPDATE' end,
                              case when not p.pubdelete then 'DELETE' end,
                              case when not p.pubtruncate then 'TRUNCATE' end], null),
           not p.pubviaroot and exists (select from pg_catalog.pg_publication_rel r
                                          join pg_catalog.pg_partitioned_table t on t.partrelid = r.prrelid
                                         where r.prpubid = p.oid),
           p.xmin::text, pg_catalog.obj_description(p.oid, 'pg_publication'),
           (select system_identifier::text from pg_catalog.pg_control_system()),
           pg_catalog.pg_has_role(p.pubowner, 'usage')
      from pg_catalog.pg_publication p where p.pubname = %s""")
_NARROWED = qualified("""
    select pg_catalog.format('%%I.%%I', s.nspname, c.relname),
           pg_catalog.pg_get_expr(r.prqual, r.prrelid),
           case when r.prattrs is not null then array(
             select a.attname::text from pg_catalog.pg_attribute a
              where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
                and a.attnum <> all (r.prattrs::smallint[]) order by a.attnum) else '{}' end
      from pg_catalog.pg_publication p
      join pg_catalog.pg_publication_rel r on r.prpubid = p.oid
      join pg_catalog.pg_class c on c.oid = r.prrelid
      join pg_catalog.pg_namespace s on s.oid = c.relnamespace
     where p.pubname = %s and (r.prqual is not null or r.prattrs is not null)
     order by 1""")

_NAME = qualified("""
    select pg_catalog.format('%%I.%%I', s.nspname, c.relname)
      from pg_catalog.pg_class c join pg_catalog.pg_namespace s on s.oid = c.relnamespace where c.oid = %s::oid""")
_KNOWN = "select n from (values (%s)) v(n) where pg_catalog.to_regclass(n) is not null"


def remember_publication(connection: Connection[Any], publication: str) -> None:
    """Record the published tables in the publication's comment, unless the comment or publication is not ours."""
    query = qualified("""select pg_catalog.obj_description(oid, 'pg_publication') from pg_catalog.pg_publication
                where pubname = %s and pg_catalog.pg_has_role(pubowner, 'usage')""")
    row = connection.execute(query, [publication]).fetchone()
    if row is None or not (row[0] or _PREFIX).startswith(_PREFIX):
        return
    _, _, xmin, _, system, _ = connection.execute(_FACTS, [publication]).fetchone() or (None,) * 6
    record = {"system": system, "xmin": xmin, "tables": _tables(connection, publication)}
    connection.execute(
        sql.SQL("comment on publication {} is {}").format(
            sql.Identifier(publication), sql.Literal(_PREFIX + json.dumps(record, ensure_ascii=False))
        )
    )


def narrowed_publication(connection: Connection[Any], publication: str) -> list[str] | None:
    """Texts about changes that a publication does not send, or did not send for a while; None if it is gone.

    Missing tables are known only if create_slot() made the publication or found it without a comment.
    """
    facts = connection.execute(_FACTS, [publication]).fetchone()
    if facts is None:
        return None
    without, leaves, xmin, comment, system, own = facts
    found = [f"no {', '.join(without)}"] if without else []
    found += ["changes of partitions under their own names: publish_via_partition_root is off"] if leaves else []
    for table, condition, columns in connection.execute(_NARROWED, [publication]).fetchall():
        found += [f"rows of {table} only where {condition}"] if condition else []
        found += [f"{table} without {', '.join(columns)}"] if columns else []
    record = _parse(comment)
    same = record.get("system") == system
    found += _changed(connection, record.get("tables") or {}, _tables(connection, publication), same=same)
    if same and record.get("xmin") != xmin and not without:
        found.append("its options were altered: operations may have been missing for a while")
    if comment is None and own:
        # from PostgreSQL 18 on a slot skips changes written while its publication is missing
        found.append("it was made anew, or its comment was removed: changes may have been missing for a while")
    return found


def _changed(
    connection: Connection[Any], then: dict[str, list[int]], now: dict[str, list[int]], *, same: bool
) -> list[str]:
    """Texts about tables no longer published, or published again; on the `same` server OIDs identify renamed tables."""
    numbers = {oid: row for oid, row in now.values()}  # noqa: C416
    found = []
    for name, (oid, row) in sorted(then.items()):
        if (oid in numbers) if same else (name in now):
            if same and numbers[oid] != row:
                found.append(f"{name} was taken out or filtered and published again: changes in between are missing")
            continue
        today = connection.execute(_NAME if same else _KNOWN, [oid if same else name]).fetchone()
        if today is not None:  # else it was dropped, and has no changes
            found.append(f"{today[0]} is not published any more")
    return found


def _tables(connection: Connection[Any], publication: str) -> dict[str, list[int]]:
    """By table name, the OIDs of the table and of its row in pg_publication_rel."""
    return dict(json.loads(scalar(connection, _TABLES, publication) or "{}"))


def _parse(comment: str | None) -> dict[str, Any]:
    """The content that remember_publication() wrote; empty if somebody has changed the comment."""
    try:
        found = json.loads((comment or "").removeprefix(_PREFIX))
    except ValueError:
        return {}
    return found if isinstance(found, dict) and (comment or "").startswith(_PREFIX) else {}
