"""Both paths put on tables for a while, and taken off again: the queue, its triggers, the publication, the slot.

What a run makes has names of its own, and what it changes is noted in the database first. So whoever comes after a run
that was killed finds what it left.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import psycopg
from psycopg import Connection, sql

from gdq.call import scalar, try_while_locked
from gdq.consumer import register_consumer, unregister_consumer
from gdq.consumers.slot.slot import (
    check_publishable,
    check_wal_level,
    create_slot,
    drop_slot,
    publication_name,
    slot_name,
)
from gdq.errors import GdqError
from gdq.queue import add_table, create_queue, drop_queue, remove_table, table_info
from gdq.sql_text import raw

QUEUE = "gdq_compare"

log = logging.getLogger(__name__)

_LOCK = "select pg_catalog.pg_try_advisory_lock(pg_catalog.hashtext('gdq compare'), 0)"
_DROP_TRIES = 20
_SLOT_SECONDS = 30
_NOTES = "gdq_target.compare_run"
_IDENTITY = {"d": "default", "n": "nothing", "f": "full"}

_TREE = """
    select c.oid::bigint, pg_catalog.format('%%I.%%I', s.nspname, c.relname), c.relkind::text,
           c.relreplident::text, c.relpersistence::text, pg_catalog.pg_has_role(c.relowner, 'usage'),
           (select n.nspowner::regrole::text from pg_catalog.pg_namespace n where n.nspname = 'gdq'
               and not pg_catalog.has_table_privilege(n.nspowner, c.oid, 'trigger'))
      from pg_catalog.pg_class c join pg_catalog.pg_namespace s on s.oid = c.relnamespace
     where c.oid = %s::pg_catalog.regclass
        or c.oid in (select t.relid from pg_catalog.pg_partition_tree(%s::pg_catalog.regclass) t)
     order by c.oid <> %s::pg_catalog.regclass, c.oid"""


def consumer_name(connection: Connection[Any]) -> str:
    """The consumer of a run: slots are the server's, so it names the database."""
    oid = scalar(connection, "select oid::bigint from pg_catalog.pg_database where datname = current_database()")
    return f"db{oid}"


def check(connection: Connection[Any], tables: Sequence[str], *, identity_full: bool = False) -> list[str]:
    """The qualified names of tables that both paths can be put on. Writes nothing.

    GdqError in one line for a server, role or table that will not do: above all a table whose UPDATE and DELETE the
    server would refuse once it is published.
    """
    if scalar(connection, "select pg_catalog.pg_is_in_recovery()"):
        raise GdqError("this server is a standby: triggers and a publication need the primary")
    if not _has_gdq(connection):
        raise GdqError("gdq is not installed in this database", hint="gdq install")
    check_wal_level(connection)
    _check_role(connection)
    names = [_check_table(connection, table, identity_full=identity_full) for table in tables]
    if len(set(names)) < len(names):
        raise GdqError("a table is named twice")
    return names


def _check_role(connection: Connection[Any]) -> None:
    may = """
        select case
          when not (select r.rolreplication or r.rolsuper from pg_catalog.pg_roles r where r.rolname = current_user)
            then 'has no REPLICATION'
          when not pg_catalog.has_database_privilege(pg_catalog.current_database(), 'create')
            then 'may not CREATE in this database, which a publication needs'
          when not pg_catalog.has_schema_privilege('gdq', 'usage') or exists (
            select from pg_catalog.pg_proc p
             where p.pronamespace = pg_catalog.to_regnamespace('gdq') and p.proname in ('create_queue', 'add_table')
               and not pg_catalog.has_function_privilege(p.oid, 'execute'))
            then 'is not a member of gdq_admin' end"""
    lacks = scalar(connection, may)
    if lacks:
        raise GdqError(f"role {connection.info.user} {lacks}", hint="Connect as a superuser, or see docs/compare.md.")


def _check_table(connection: Connection[Any], table: str, *, identity_full: bool) -> str:
    rows = connection.execute(_TREE, [table] * 3).fetchall()
    root = str(rows[0][1])
    for oid, name, kind, _, persistence, owned, needy in rows:
        if oid == rows[0][0] and kind not in "rp":
            raise GdqError(f"{name} is not a table")
        if persistence != "p":
            raise GdqError(f"table {name} is unlogged or temporary: a slot does not see it")
        if not owned:
            raise GdqError(f"role {connection.info.user} does not own table {name}, which publishing it needs")
        if needy is not None:
            raise GdqError(f"gdq has no right to put triggers on {name}", hint=f"GRANT TRIGGER ON {name} TO {needy};")
    check_publishable(connection, table, identity_full=identity_full)
    return root


def lock(connection: Connection[Any], *, wait_seconds: float = 0.0) -> None:
    """Keep other runs out of this database until the connection ends; GdqError when one is at work, and stays."""
    until = time.monotonic() + wait_seconds
    while not scalar(connection, _LOCK):
        if time.monotonic() >= until:
            raise GdqError("another gdq compare is at work in this database")
        time.sleep(0.1)


def attach_slot(connection: Connection[Any], tables: Sequence[str], *, identity_full: bool = False) -> None:
    """Make the publication and the slot; with `identity_full` set the replica identity of the tables before."""
    _note(connection)
    if identity_full:
        for table in tables:
            for oid, name, kind, identity, *_ in connection.execute(_TREE, [table] * 3).fetchall():
                if kind in "rp" and identity != "f":
                    try_while_locked(partial(_set_full, connection, oid, name))
    connection.execute(f"set statement_timeout = '{_SLOT_SECONDS}s'")
    try:
        create_slot(connection, QUEUE, consumer_name(connection), tables)
    except psycopg.errors.QueryCanceled:
        raise GdqError(
            f"no slot could be made within {_SLOT_SECONDS} s: it waits for the transactions that are running",
            hint="Look for old ones in pg_stat_activity, by xact_start.",
        ) from None
    finally:
        connection.execute("reset statement_timeout")


def attach_queue(connection: Connection[Any], tables: Sequence[str]) -> str:
    """Make the queue with its triggers and consumer; returns the snapshot between earlier and later changes.

    One table at a time, since writers may take them in another order. Triggers wait for those who have written to their
    table, so a transaction that the snapshot does not see is captured as a whole.
    """
    create_queue(connection, QUEUE)
    register_consumer(connection, QUEUE, consumer_name(connection))
    for table in tables:
        try_while_locked(partial(add_table, connection, QUEUE, table))
    return str(scalar(connection, "select pg_catalog.pg_current_snapshot()::text"))


def _detach_queue(connection: Connection[Any], consumer: str) -> None:
    """Drop the queue, after its tables one at a time."""
    unregister_consumer(connection, QUEUE, consumer)
    for table in table_info(connection, QUEUE):
        try_while_locked(partial(remove_table, connection, QUEUE, table.table_name, force=True))
    try_while_locked(partial(drop_queue, connection, QUEUE, force=True))


def leftovers(connection: Connection[Any]) -> list[str]:
    """What a killed run has left in this database, in words. Call under lock().

    GdqError for something of a run's names that no run has made: it leaves notes from its beginning to its end.
    """
    slot, publication = slot_name(QUEUE, consumer_name(connection)), publication_name(QUEUE)
    found = []
    if _has_gdq(connection) and _has_queue(connection):
        found.append(f"queue {QUEUE} with its triggers")
    if scalar(connection, "select true from pg_catalog.pg_replication_slots where slot_name = %s", slot):
        found.append(f"slot {slot}")
    if scalar(connection, "select true from pg_catalog.pg_publication where pubname = %s", publication):
        found.append(f"publication {publication}")
    if _has_notes(connection):
        found += [f"replica identity of {name}" for _, name, _, _ in _identities(connection)]
        return found or [f"table {_NOTES}"]
    if found:
        raise GdqError(
            f"there is something of the names that gdq compare uses, but not made by it: {', '.join(found)}",
            hint="Drop it if nobody needs it.",
        )
    return []


def clean_up(connection: Connection[Any]) -> None:
    """Remove what a run made and restore what it changed. Call under lock(), and again after a failure.

    psycopg.errors.LockNotAvailable when writers hold a table all the time.
    """
    consumer = consumer_name(connection)
    if _has_gdq(connection) and _has_queue(connection):
        _detach_queue(connection, consumer)
    _drop_slot(connection, consumer)
    if not _has_notes(connection):
        return
    for oid, name, identity, index in _identities(connection):
        try_while_locked(partial(_restore, connection, oid, name, identity, index))
    with connection.transaction():
        _forget_notes(connection)


def _forget_notes(connection: Connection[Any]) -> None:
    """Drop the notes, with those of our tables that they say are new and that nobody has used."""
    made = {row[0] for row in connection.execute(f"select made from {_NOTES} where made is not null").fetchall()}
    connection.execute(f"drop table {_NOTES}")
    positions = scalar(connection, "select pg_catalog.to_regclass('gdq_target.slot_position')::text")
    if (
        "positions" in made
        and positions
        and not scalar(connection, "select true from gdq_target.slot_position limit 1")
    ):
        connection.execute("drop table gdq_target.slot_position")
    if "schema" in made:
        # somebody may have use for it by now
        with contextlib.suppress(psycopg.errors.DependentObjectsStillExist), connection.transaction():
            connection.execute("drop schema gdq_target")


def _drop_slot(connection: Connection[Any], consumer: str) -> None:
    """Drop slot and publication, even where a walsender has not heard yet that its reader is gone."""
    query = "select active_pid from pg_catalog.pg_replication_slots where slot_name = %s"
    for number in range(_DROP_TRIES):
        try:
            drop_slot(connection, QUEUE, consumer)
            return
        except psycopg.errors.ObjectInUse:
            if number == _DROP_TRIES - 1:
                raise
        if number:
            pid = scalar(connection, query, slot_name(QUEUE, consumer))
            if pid is not None:
                connection.execute("select pg_catalog.pg_terminate_backend(%s)", [pid])
        time.sleep(0.1 * (number + 1))


def _note(connection: Connection[Any]) -> None:
    """Make the table of notes, and say in it which of our tables is new here."""
    new_schema = scalar(connection, "select pg_catalog.to_regnamespace('gdq_target')::text") is None
    new_positions = scalar(connection, "select pg_catalog.to_regclass('gdq_target.slot_position')::text") is None
    with connection.transaction():
        connection.execute("create schema if not exists gdq_target")
        connection.execute(f'create table {_NOTES} (made text, relid oid, identity "char", index_name name)')
        for made in ("schema",) * new_schema + ("positions",) * new_positions:
            connection.execute(f"insert into {_NOTES} (made) values (%s)", [made])


def _set_full(connection: Connection[Any], oid: int, name: str) -> None:
    note = f"""insert into {_NOTES} (relid, identity, index_name)
               select c.oid, c.relreplident,
                      (select x.relname from pg_catalog.pg_index i join pg_catalog.pg_class x on x.oid = i.indexrelid
                        where i.indrelid = c.oid and i.indisreplident and c.relreplident = 'i')
                 from pg_catalog.pg_class c where c.oid = %s"""
    with connection.transaction():
        connection.execute("set local lock_timeout = '500ms'")
        connection.execute(note, [oid])
        connection.execute(sql.SQL("alter table {} replica identity full").format(raw(name)))


def _restore(connection: Connection[Any], oid: int, name: str, identity: str, index: str | None) -> None:
    how = sql.SQL("using index {}").format(sql.Identifier(index)) if index else raw(_IDENTITY.get(identity, ""))
    there = """select true from pg_catalog.pg_index i join pg_catalog.pg_class x on x.oid = i.indexrelid
                where i.indrelid = %s and x.relname = %s"""
    with connection.transaction():
        connection.execute("set local lock_timeout = '500ms'")
        if identity == "i" and not scalar(connection, there, oid, index):
            # without any identity UPDATE fails on a table that is published
            log.warning("the replica identity of %s stays full: the index that it had, %s, is gone", name, index)
        else:
            connection.execute(sql.SQL("alter table {} replica identity {}").format(raw(name), how))
        connection.execute(f"delete from {_NOTES} where relid = %s", [oid])


def _identities(connection: Connection[Any]) -> list[tuple[int, str, str, str | None]]:
    """The tables whose replica identity must be restored, with the former identity; not dropped tables."""
    query = f"""select n.relid::bigint, pg_catalog.format('%I.%I', s.nspname, c.relname),
                       n.identity::text, n.index_name::text
                  from {_NOTES} n join pg_catalog.pg_class c on c.oid = n.relid
                  join pg_catalog.pg_namespace s on s.oid = c.relnamespace order by 1"""
    return connection.execute(query).fetchall()


def _has_gdq(connection: Connection[Any]) -> bool:
    return scalar(connection, "select pg_catalog.to_regnamespace('gdq')::text") is not None


def _has_queue(connection: Connection[Any]) -> bool:
    return bool(scalar(connection, "select true from gdq.queue_info() where queue_name = %s", QUEUE))


def _has_notes(connection: Connection[Any]) -> bool:
    return scalar(connection, "select pg_catalog.to_regclass(%s)::text", _NOTES) is not None
