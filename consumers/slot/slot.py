"""Slots and publications of gdq: create, drop and list them, with the write-ahead log that each slot retains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from psycopg import Connection, sql

from gdq.call import rows, scalar
from gdq.consumers.slot.publication import narrowed_publication, remember_publication
from gdq.consumers.views.own_objects import check_own_tables
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.sql_text import raw

_PREFIX = "gdq_"
# PostgreSQL does not accept a deferrable primary key as replica identity.
_IDENTITIES = qualified("""
    select pg_catalog.format('%%I.%%I', s.nspname, c.relname), c.relreplident = 'f', i.indexrelid is not null,
           exists (select from pg_catalog.pg_attribute a
                    where a.attrelid = c.oid and a.attgenerated <> '' and not a.attisdropped),
           exists (select from pg_catalog.pg_attribute a
                    where a.attrelid = c.oid and a.attgenerated <> '' and a.attnum = any (i.indkey))
      from pg_catalog.pg_class c join pg_catalog.pg_namespace s on s.oid = c.relnamespace
      left join pg_catalog.pg_index i on i.indrelid = c.oid and i.indimmediate
            and case when c.relreplident = 'd' then i.indisprimary when c.relreplident = 'i' then i.indisreplident end
     where c.relkind = 'r'
       and (c.oid = %s::pg_catalog.regclass
            or c.oid = any (array(select t.relid::oid from pg_catalog.pg_partition_tree(%s::pg_catalog.regclass) t)))
     order by c.oid""")
_PUBLISHED = qualified("select true from pg_catalog.pg_publication where pubname = %s")
_NAME = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A slot of gdq: `active` if a process reads it, and the bytes of write-ahead log that it retains.

    `lost`: the server removed unread log; drop the slot and create it again. `retained_bytes` is None then.
    `publication`: the publication it reads, None if that is gone. `narrowed`: changes that the publication does not
    send, or did not send for a while (gdq.consumers.slot.publication); None if it sends all.
    """

    slot_name: str
    publication: str | None
    active: bool
    confirmed_lsn: str | None
    retained_bytes: int | None
    lag_bytes: int | None
    lost: bool
    narrowed: str | None = None


def slot_name(queue: str, consumer: str) -> str:
    """The name of a consumer's slot; GdqError if PostgreSQL does not allow it."""
    name = f"{_PREFIX}{queue}_{consumer}"
    if not _NAME.fullmatch(name) or len(name) > 63:
        raise GdqError(
            f"no slot can be named {name}",
            hint="Queue and consumer of a slot are lower-case letters, digits and _, 58 together.",
        )
    return name


def publication_name(queue: str) -> str:
    """The name of the publication that a queue's slots read."""
    return f"{_PREFIX}{queue}"


def create_slot(
    connection: Connection[Any], queue: str, consumer: str, tables: Sequence[str] = (), *, two_phase: bool = False
) -> str:
    """Create a consumer's slot, and the queue's publication over `tables` unless it exists; returns the slot's name.

    The slot retains the server's write-ahead log from now on, until it is read or dropped. A stored position of a slot
    of this name (from a dump, say) is deleted. `tables`: qualified names; required for a new publication, refused if
    the existing one has others. `two_phase`: prepared transactions are sent at PREPARE. Needs an autocommit
    connection of a role with REPLICATION; drops a new publication again if creating the slot fails. GdqError for a
    table whose UPDATE and DELETE would fail once published, and for a name that also fits another queue's slots;
    psycopg.errors.DuplicateObject if the slot exists.
    """
    name, publication = slot_name(queue, consumer), publication_name(queue)
    check_primary(connection, "a new slot")
    check_wal_level(connection)
    _check_names(connection, name, publication)
    create = "select pg_catalog.pg_create_logical_replication_slot(%s, 'pgoutput', false, %s)"
    with ExitStack() as undo:
        made = _make_publication(connection, publication, tables)
        if made:
            undo.callback(connection.execute, sql.SQL("drop publication {}").format(sql.Identifier(publication)))
        if made or not any(info.publication == publication for info in slot_info(connection)):
            remember_publication(connection, publication)
        connection.execute(create, [name, two_phase])
        undo.callback(connection.execute, "select pg_catalog.pg_drop_replication_slot(%s)", [name])
        _forget(connection, name)
        undo.pop_all()
    return name


def _check_names(connection: Connection[Any], name: str, publication: str) -> None:
    """GdqError if a slot could be taken for one of another queue, because one queue's name begins with the other's."""
    query = qualified("""select pubname::text from pg_catalog.pg_publication
                where pg_catalog.starts_with(%s, pubname || '_') and pg_catalog.starts_with(pubname, %s || '_')""")
    other = scalar(connection, query, name, publication)
    if other:
        raise GdqError(
            f"slot {name} would be taken for one of publication {other}", hint="Give the consumer another name."
        )
    for info in slot_info(connection):
        shorter = info.publication is not None and len(info.publication) < len(publication)
        if shorter and info.slot_name.startswith(f"{publication}_"):
            raise GdqError(
                f"slot {info.slot_name} of publication {info.publication} would be taken for one of {publication}",
                hint="Drop that slot first, or give the queue another name.",
            )


def _make_publication(connection: Connection[Any], publication: str, tables: Sequence[str]) -> bool:
    """Create the publication; False if it exists, GdqError if it exists with other tables."""
    query = qualified("""select array_agg(pg_catalog.format('%%I.%%I', schemaname, tablename))
                 from pg_catalog.pg_publication_tables where pubname = %s""")
    there = scalar(connection, _PUBLISHED, publication)
    if there:
        wanted = sorted(_resolved(connection, table) for table in tables)
        published = scalar(connection, query, publication) or []
        if wanted and wanted != sorted(published):
            raise GdqError(
                f"publication {publication} has other tables: {', '.join(published) or 'none'}",
                hint="Leave the tables out, or drop the slots of this queue first.",
            )
        return False
    if not tables:
        raise GdqError(f"there is no publication {publication} yet", hint="Name the tables that the slot reads.")
    for table in tables:
        check_publishable(connection, table)
    listed = sql.SQL(", ").join(raw(_resolved(connection, table)) for table in tables)
    connection.execute(
        sql.SQL("create publication {} for table {} with (publish_via_partition_root = true)").format(
            sql.Identifier(publication), listed
        )
    )
    return True


def is_standby(connection: Connection[Any]) -> bool:
    """True if the server is a standby: its slots are not those of the primary, and nothing can be written to it."""
    return bool(scalar(connection, "select pg_catalog.pg_is_in_recovery()"))


def check_primary(connection: Connection[Any], what: str) -> None:
    """GdqError if the server is a standby; `what` is the caller's task."""
    if is_standby(connection):
        raise GdqError(f"{what} needs the primary server, this is a standby", hint="Connect to the primary.")


def check_wal_level(connection: Connection[Any]) -> None:
    """GdqError if the server's wal_level is too low for a slot."""
    level = scalar(connection, "select pg_catalog.current_setting('wal_level')")
    if level != "logical":
        raise GdqError(
            f"a slot needs wal_level logical, the server has {level}",
            hint="Set it and restart the server; the queue needs neither.",
        )


def check_publishable(connection: Connection[Any], table: str, *, identity_full: bool = False) -> None:
    """GdqError if publishing a table would make its UPDATE and DELETE, or those of a partition, fail.

    `identity_full`: the table will get REPLICA IDENTITY FULL. For a partitioned table the server checks the partitions.
    """
    full_too = connection.info.server_version >= 180000
    for name, full, keyed, generated, generated_key in connection.execute(_IDENTITIES, [table, table]):
        if not full and not identity_full and not keyed:
            raise GdqError(
                f"table {name} has no replica identity: UPDATE and DELETE would fail once it is published",
                hint="Give it a primary key or REPLICA IDENTITY FULL.",
            )
        if (full or identity_full) and generated and full_too:
            raise GdqError(
                f"table {name} has generated columns and REPLICA IDENTITY FULL:"
                " UPDATE and DELETE would fail once it is published",
                hint="Set its REPLICA IDENTITY to DEFAULT or to an index.",
            )
        if not (full or identity_full) and generated_key and full_too:
            raise GdqError(
                f"table {name} has a generated column in its replica identity:"
                " UPDATE and DELETE would fail once it is published",
                hint="Set its REPLICA IDENTITY to another index.",
            )


def drop_slot(connection: Connection[Any], queue: str, consumer: str) -> bool:
    """Drop a consumer's slot, and with the last slot the queue's publication; False if there was no such slot.

    psycopg.errors.ObjectInUse while the slot is read, GdqError if it belongs to another database.
    """
    name, publication = slot_name(queue, consumer), publication_name(queue)
    check_primary(connection, "dropping a slot")
    query = qualified(
        "select database::text, database = current_database() from pg_catalog.pg_replication_slots where slot_name = %s"
    )
    database, there = connection.execute(query, [name]).fetchone() or (None, False)
    if database is not None and not there:
        raise GdqError(f"slot {name} is in database {database}", hint="Connect to that database and drop it there.")
    if there:
        connection.execute("select pg_catalog.pg_drop_replication_slot(%s)", [name])
    published = scalar(
        connection, qualified("select true from pg_catalog.pg_publication where pubname = %s"), publication
    )
    if published and not any(info.publication == publication for info in slot_info(connection)):
        connection.execute(sql.SQL("drop publication if exists {}").format(sql.Identifier(publication)))
    _forget(connection, name)
    return bool(there)


def _forget(connection: Connection[Any], name: str) -> None:
    """Delete the stored positions of a slot."""
    for table in ("slot_position", "slot_view", "slot_asked"):
        if scalar(connection, qualified("select pg_catalog.to_regclass(%s)::text"), f"gdq_target.{table}"):
            check_own_tables(connection, table, in_source=True)
            forget = sql.SQL("delete from gdq_target.{} where slot_name operator(pg_catalog.=) %s").format(
                sql.Identifier(table)
            )
            connection.execute(forget, [name])


def slot_info(connection: Connection[Any]) -> list[SlotInfo]:
    """The slots of gdq in this database; on a standby those of the standby itself, not of its primary."""
    query = qualified("""
        select s.slot_name::text,
               (select p.pubname::text from pg_catalog.pg_publication p
                 where pg_catalog.starts_with(s.slot_name, p.pubname || '_') order by length(p.pubname) desc limit 1)
                 as publication,
               s.active, s.confirmed_flush_lsn::text as confirmed_lsn,
               (w.lsn - s.restart_lsn)::bigint as retained_bytes,
               (w.lsn - s.confirmed_flush_lsn)::bigint as lag_bytes,
               coalesce(s.wal_status = 'lost', false) as lost, null as narrowed
          from pg_catalog.pg_replication_slots s
         cross join (select case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()
                                 else pg_catalog.pg_current_wal_lsn() end) w(lsn)
         where s.database = pg_catalog.current_database() and s.plugin = 'pgoutput'
           and pg_catalog.starts_with(s.slot_name, %s)
         order by 1""")
    found = rows(connection, SlotInfo, query, _PREFIX)
    missing = {
        name: narrowed_publication(connection, name) for name in {one.publication for one in found} if name is not None
    }
    return [
        replace(one, narrowed="; ".join(missing[one.publication] or ()) or None) if one.publication else one
        for one in found
    ]


def slot_of_view(connection: Connection[Any], queue: str, view: str) -> str | None:
    """The name of a view's slot; None if the view has none."""
    query = qualified("""select slot_name::text from pg_catalog.pg_replication_slots
                where slot_name = %s and database = pg_catalog.current_database()""")
    found = scalar(connection, query, f"{_PREFIX}{queue}_{view}")
    return None if found is None else str(found)


def _resolved(connection: Connection[Any], table: str) -> str:
    """A table's qualified and quoted name; the server's error if there is no such table."""
    query = qualified("""select pg_catalog.format('%%I.%%I', s.nspname, c.relname) from pg_catalog.pg_class c
                 join pg_catalog.pg_namespace s on s.oid = c.relnamespace where c.oid = %s::pg_catalog.regclass""")
    return str(scalar(connection, query, table))
