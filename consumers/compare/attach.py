"""Attaches both paths to tables for a while and detaches them: the queue, its triggers, the publication, the slot.

A run's objects have special names, and a run notes its changes in the database before it makes them. So the next run
finds the remains of a killed one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psycopg
from psycopg import Connection, sql

from gdq.call import scalar, try_while_locked
from gdq.consumer import register_consumer, unregister_consumer
from gdq.consumers.slot import slot
from gdq.consumers.views.own_objects import check_own_tables
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.queue import add_table, create_queue, drop_queue, remove_table, table_info
from gdq.sql_text import raw

COMPARE_QUEUE = "gdq_compare"

log = logging.getLogger(__name__)

_LOCK = "select pg_catalog.pg_try_advisory_lock(pg_catalog.hashtext('gdq compare'), 0)"
_DROP_TRIES = 20

# Tables with many writers are the ones that are compared, and a table that cannot be locked keeps its triggers.
_patiently = partial(try_while_locked, seconds=40.0, pause_max=2.0)
_SLOT_SECONDS = 30
_NOTES = "gdq_target.compare_run"
_NOTED = """made pg_catalog.text, relid pg_catalog.oid, identity pg_catalog."char", index_name pg_catalog.name"""
_IDENTITY = {"d": "default", "n": "nothing", "f": "full"}

_TREE = qualified("""
    select c.oid::bigint, pg_catalog.format('%%I.%%I', s.nspname, c.relname), c.relkind::text,
           c.relreplident::text, c.relpersistence::text, pg_catalog.pg_has_role(c.relowner, 'usage'),
           (select n.nspowner::regrole::text from pg_catalog.pg_namespace n where n.nspname = 'gdq'
               and not pg_catalog.has_table_privilege(n.nspowner, c.oid, 'trigger'))
      from pg_catalog.pg_class c join pg_catalog.pg_namespace s on s.oid = c.relnamespace
     where c.oid = %s::pg_catalog.regclass
        or c.oid = any (array(select t.relid::oid from pg_catalog.pg_partition_tree(%s::pg_catalog.regclass) t))
     order by c.oid <> %s::pg_catalog.regclass, c.oid""")


def attached_consumer_name(connection: Connection[Any]) -> str:
    """The name of a run's consumer; it contains the database's OID, since slot names are unique in the whole server."""
    oid = scalar(
        connection, qualified("select oid::bigint from pg_catalog.pg_database where datname = current_database()")
    )
    return f"db{oid}"


def check_attachable(connection: Connection[Any], tables: Sequence[str], *, identity_full: bool = False) -> list[str]:
    """The qualified names of the tables, checked for both paths; writes nothing.

    GdqError for an unsuitable server, role or table, for example a table whose UPDATE and DELETE would fail once it is
    published.
    """
    slot.check_primary(connection, "gdq compare")
    if not _has_gdq(connection):
        raise GdqError("gdq is not installed in this database", hint="gdq install")
    slot.check_wal_level(connection)
    _check_role(connection)
    names = [_check_table(connection, table, identity_full=identity_full) for table in tables]
    if len(set(names)) < len(names):
        raise GdqError("a table is named twice")
    return names


def _check_role(connection: Connection[Any]) -> None:
    may = qualified("""
        select case
          when not (select r.rolreplication or r.rolsuper from pg_catalog.pg_roles r where r.rolname = current_user)
            then 'has no REPLICATION'
          when not pg_catalog.has_database_privilege(pg_catalog.current_database(), 'create')
            then 'may not CREATE in this database, which a publication needs'
          when not pg_catalog.has_schema_privilege('gdq', 'usage') or exists (
            select from pg_catalog.pg_proc p
             where p.pronamespace = pg_catalog.to_regnamespace('gdq') and p.proname = any ('{create_queue,add_table}')
               and not pg_catalog.has_function_privilege(p.oid, 'execute'))
            then 'is not a member of gdq_admin' end""")
    lacks = scalar(connection, may)
    if lacks:
        raise GdqError(f"role {connection.info.user} {lacks}", hint="Connect as a superuser, or see: gdq docs compare")


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
    slot.check_publishable(connection, table, identity_full=identity_full)
    return root


def lock_attach(connection: Connection[Any], *, wait_seconds: float = 0.0) -> None:
    """Keep other runs out of this database until the connection ends; GdqError if one runs and does not end soon."""
    until = time.monotonic() + wait_seconds
    while not scalar(connection, _LOCK):
        if time.monotonic() >= until:
            raise GdqError("another gdq compare is at work in this database")
        time.sleep(0.1)


def attach_slot(connection: Connection[Any], tables: Sequence[str], *, identity_full: bool = False) -> None:
    """Create the publication and the slot; `identity_full`: first set the tables' replica identity to full."""
    _note(connection)
    if identity_full:
        for table in tables:
            for oid, name, kind, identity, *_ in connection.execute(_TREE, [table] * 3).fetchall():
                if kind in "rp" and identity != "f":
                    _patiently(partial(_set_full, connection, oid, name))
    connection.execute(f"set statement_timeout = '{_SLOT_SECONDS}s'")
    try:
        slot.create_slot(connection, COMPARE_QUEUE, attached_consumer_name(connection), tables)
    except psycopg.errors.QueryCanceled:
        raise GdqError(
            f"no slot could be made within {_SLOT_SECONDS} s: it waits for the transactions that are running",
            hint="Look for old ones in pg_stat_activity, by xact_start.",
        ) from None
    finally:
        connection.execute("reset statement_timeout")


def attach_queue(connection: Connection[Any], tables: Sequence[str]) -> str:
    """Create the queue with its triggers and consumer; returns a snapshot that divides uncaptured and captured changes.

    Tables are added one by one, since writers may lock them in another order. Creating a trigger waits for the table's
    writers, so a transaction that the snapshot does not see is captured as a whole.
    """
    create_queue(connection, COMPARE_QUEUE)
    register_consumer(connection, COMPARE_QUEUE, attached_consumer_name(connection))
    for table in tables:
        _patiently(partial(add_table, connection, COMPARE_QUEUE, table))
    return str(scalar(connection, qualified("select pg_catalog.pg_current_snapshot()::text")))


def attached_leftovers(connection: Connection[Any]) -> list[str]:
    """The remains of a killed run in this database, in words. Call under lock_attach().

    GdqError for objects with a run's names but without a run's notes: no run has created these.
    """
    name = slot.slot_name(COMPARE_QUEUE, attached_consumer_name(connection))
    publication = slot.publication_name(COMPARE_QUEUE)
    found = []
    if _has_gdq(connection) and _has_queue(connection):
        found.append(f"queue {COMPARE_QUEUE} with its triggers")
    if scalar(connection, qualified("select true from pg_catalog.pg_replication_slots where slot_name = %s"), name):
        found.append(f"slot {name}")
    if scalar(connection, qualified("select true from pg_catalog.pg_publication where pubname = %s"), publication):
        found.append(f"publication {publication}")
    if _has_notes(connection):
        found += [f"replica identity of {table}" for _, table, _, _ in _identities(connection)]
        return found or [f"table {_NOTES}"]
    if found:
        raise GdqError(
            f"objects with names of gdq compare exist that it did not create: {', '.join(found)}",
            hint="Drop them if nobody needs them.",
        )
    return []


def detach_all(connection: Connection[Any]) -> None:
    """Remove a run's objects and restore replica identities. Call under lock_attach(), and again after a failure.

    Tables that others hold do not keep the rest: the slot goes first, then all that is free. GdqError about what is
    left if others hold a table all the time, with their processes.
    """
    consumer = attached_consumer_name(connection)
    _drop_slot(connection, consumer)
    left: dict[str, Callable[[], object]] = {}
    if _has_gdq(connection) and _has_queue(connection):
        unregister_consumer(connection, COMPARE_QUEUE, consumer)
        for table in table_info(connection, COMPARE_QUEUE):
            left[f"triggers of {table.table_name}"] = partial(
                remove_table, connection, COMPARE_QUEUE, table.table_name, force=True
            )
        left[f"queue {COMPARE_QUEUE}"] = partial(drop_queue, connection, COMPARE_QUEUE, force=True)
    if _has_notes(connection):
        for oid, name, identity, index in _identities(connection):
            left[f"replica identity of {name}"] = partial(_restore, connection, oid, name, identity, index)
    if left:
        with contextlib.suppress(psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            _patiently(partial(_do_what_is_free, left))
    if left:
        raise GdqError(
            f"not removed, as others hold the tables: {', '.join(left)}",
            hint=f"gdq compare --clean-up removes it when their transactions have ended: {_holders(connection)}",
        )
    if _has_notes(connection):
        with connection.transaction():
            _forget_notes(connection)


def _do_what_is_free(left: dict[str, Callable[[], object]]) -> None:
    """Do each action and take it off `left`; raises the error of the first that others kept, after all were tried."""
    kept: psycopg.Error | None = None
    for name, action in list(left.items()):
        try:
            action()
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            kept = kept or error
        else:
            del left[name]
    if kept is not None:
        raise kept


def _holders(connection: Connection[Any]) -> str:
    """The other sessions that hold locks on captured or noted tables or on the queue's logs, oldest first."""
    noted = f"union select relid from {_NOTES}" if _has_notes(connection) else ""
    logs = ""
    if _has_gdq(connection):
        logs = """or l.relation = any (array(select c.oid from pg_catalog.pg_class c
                                          where c.relnamespace = pg_catalog.to_regnamespace('gdq_log')))"""
    query = qualified(f"""
        select string_agg(distinct concat_ws(' ', 'process', a.pid,
                                             case when a.application_name <> '' then a.application_name end, a.state,
                                             'since ' || date_trunc('second', a.xact_start)), ', ')
          from pg_catalog.pg_locks l join pg_catalog.pg_stat_activity a on a.pid = l.pid
         where l.locktype = 'relation' and l.granted and l.pid <> pg_catalog.pg_backend_pid()
           and l.database = (select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())
           and (l.relation = any (array(select t.tgrelid from pg_catalog.pg_trigger t
                                         where pg_catalog.starts_with(t.tgname, '!gdq_') {noted})) {logs})""")
    return str(scalar(connection, query) or "they have ended by now")


def _forget_notes(connection: Connection[Any]) -> None:
    """Drop the notes, and the schema and table of positions if the run created them and nobody uses them."""
    check_own_tables(connection, "compare_run", "slot_position", in_source=True)
    made = {row[0] for row in connection.execute(f"select made from {_NOTES} where made is not null").fetchall()}
    connection.execute(f"drop table {_NOTES}")
    positions = scalar(connection, qualified("select pg_catalog.to_regclass('gdq_target.slot_position')::text"))
    if (
        "positions" in made
        and positions
        and not scalar(connection, "select true from gdq_target.slot_position limit 1")
    ):
        connection.execute("drop table gdq_target.slot_position")
    if "schema" in made:
        # another program may use the schema by now
        with contextlib.suppress(psycopg.errors.DependentObjectsStillExist), connection.transaction():
            connection.execute("drop schema gdq_target")


def _drop_slot(connection: Connection[Any], consumer: str) -> None:
    """Drop slot and publication, even if a walsender has not noticed yet that its reader is gone."""
    query = qualified("select active_pid from pg_catalog.pg_replication_slots where slot_name = %s")
    for number in range(_DROP_TRIES):
        try:
            slot.drop_slot(connection, COMPARE_QUEUE, consumer)
            return
        except psycopg.errors.ObjectInUse:
            if number == _DROP_TRIES - 1:
                raise
        if number:
            pid = scalar(connection, query, slot.slot_name(COMPARE_QUEUE, consumer))
            if pid is not None:
                connection.execute("select pg_catalog.pg_terminate_backend(%s)", [pid])
        time.sleep(0.1 * (number + 1))


def _note(connection: Connection[Any]) -> None:
    """Create the table of notes, and note whether schema gdq_target and the table of positions are new."""
    new_schema = scalar(connection, "select pg_catalog.to_regnamespace('gdq_target') is null")
    new_positions = (
        scalar(connection, qualified("select pg_catalog.to_regclass('gdq_target.slot_position')::text")) is None
    )
    with connection.transaction():
        connection.execute("create schema if not exists gdq_target")
        check_own_tables(connection, "slot_position", in_source=True)
        connection.execute(f"create table {_NOTES} ({_NOTED})")
        for made in ("schema",) * new_schema + ("positions",) * new_positions:
            connection.execute(f"insert into {_NOTES} (made) values (%s)", [made])


def _set_full(connection: Connection[Any], oid: int, name: str) -> None:
    note = qualified(f"""insert into {_NOTES} (relid, identity, index_name)
               select c.oid, c.relreplident,
                      (select x.relname from pg_catalog.pg_index i join pg_catalog.pg_class x on x.oid = i.indexrelid
                        where i.indrelid = c.oid and i.indisreplident and c.relreplident = 'i')
                 from pg_catalog.pg_class c where c.oid = %s""")
    with connection.transaction():
        connection.execute("set local lock_timeout = '500ms'")
        connection.execute(note, [oid])
        connection.execute(sql.SQL("alter table {} replica identity full").format(raw(name)))


def _restore(connection: Connection[Any], oid: int, name: str, identity: str, index: str | None) -> None:
    how = sql.SQL("using index {}").format(sql.Identifier(index)) if index else raw(_IDENTITY.get(identity, ""))
    there = qualified("""select true from pg_catalog.pg_index i join pg_catalog.pg_class x on x.oid = i.indexrelid
                where i.indrelid = %s and x.relname = %s""")
    with connection.transaction():
        connection.execute("set local lock_timeout = '500ms'")
        if identity == "i" and not scalar(connection, there, oid, index):
            # without a replica identity UPDATE fails on a published table
            log.warning("the replica identity of %s stays full: the index that it had, %s, is gone", name, index)
        else:
            connection.execute(sql.SQL("alter table {} replica identity {}").format(raw(name), how))
        connection.execute(qualified(f"delete from {_NOTES} where relid = %s"), [oid])


def _identities(connection: Connection[Any]) -> list[tuple[int, str, str, str | None]]:
    """The existing tables whose replica identity must be restored, with the former identity."""
    query = qualified(f"""select n.relid::bigint, pg_catalog.format('%I.%I', s.nspname, c.relname),
                       n.identity::text, n.index_name::text
                  from {_NOTES} n join pg_catalog.pg_class c on c.oid = n.relid
                  join pg_catalog.pg_namespace s on s.oid = c.relnamespace order by 1""")
    return connection.execute(query).fetchall()


def _has_gdq(connection: Connection[Any]) -> bool:
    return scalar(connection, qualified("select pg_catalog.to_regnamespace('gdq')::text")) is not None


def _has_queue(connection: Connection[Any]) -> bool:
    return bool(scalar(connection, qualified("select true from gdq.queue_info() where queue_name = %s"), COMPARE_QUEUE))


def _has_notes(connection: Connection[Any]) -> bool:
    return scalar(connection, qualified("select pg_catalog.to_regclass(%s)::text"), _NOTES) is not None
