"""`gdq switchover --check`: all that stands in the way of a switchover, read from both databases.

Nothing is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

from psycopg import Connection

from gdq.consumer import ConsumerInfo, consumer_info
from gdq.consumers.replica.conflicts import conflict_info
from gdq.consumers.replica.held_replicas import replica_tables
from gdq.consumers.replica.replay import replica_dead_letters
from gdq.consumers.replica.sessions import require_usage
from gdq.consumers.replica.skip import skip_info
from gdq.consumers.replica.writing_side import read_state
from gdq.consumers.switchover.definitions import SEQUENCES, differing_definitions
from gdq.consumers.switchover.obstacle import Obstacle, error, left, warning
from gdq.consumers.switchover.pair import Pair, named_rows, place
from gdq.consumers.views.target import Target
from gdq.errors import GdqError, InstallError
from gdq.installer.version import check_version, installed_mark
from gdq.queue import TableInfo, queue_info, table_info
from gdq.sequence import sequence_info
from gdq.view.view import view_info

MAX_LAG = timedelta(seconds=60)

_APPLICATIONS = "'^(pg_.*|information_schema|gdq|gdq_log|gdq_target)$'"

# Partitions belong to their roots, temporary tables to their session, and others to views of gdq.
_TABLES = f"""
select c.oid::regclass::text as name, c.relpersistence = 'u' as unlogged
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relkind = any ('{{r,p}}') and not c.relispartition and c.relpersistence <> 't'
   and n.nspname !~ {_APPLICATIONS}
   and not exists (select from pg_depend e
                    where e.classid = 'pg_class'::regclass and e.objid = c.oid and e.deptype = 'e')
   and not exists (select from unnest(%s::text[]) t(name) where to_regclass(t.name) = c.oid)
 order by 1"""

_COLUMNS = """
select t.name, a.attname::text from unnest(%s::text[]) t(name)
  join pg_attribute a on a.attrelid = to_regclass(t.name) and a.attnum > 0 and not a.attisdropped
   and a.attgenerated = ''
 order by t.name, a.attnum"""

_PRESENT = """
select t.name, c.relpersistence = 'u' from unnest(%s::text[]) t(name)
  join pg_class c on c.oid = to_regclass(t.name) and c.relkind = any ('{r,p}')"""

_PREPARED = "select p.gid, p.owner::text from pg_prepared_xacts p where p.database = current_database() order by 1"

_DATABASE = """
select pg_encoding_to_char(d.encoding)::text as encoding, d.datcollate::text as collation, d.datctype::text as ctype,
       d.datlocprovider::text as provider, d.datcollversion as version,
       pg_database_collation_actual_version(d.oid) as actual
  from pg_database d where d.datname = current_database()"""

# LOCK TABLE in the mode that keeps writers out needs one of three rights.
_RIGHTS = """
select t.name, array_remove(array[
         case when not has_table_privilege(t.name, 'insert') then 'insert' end,
         case when not has_table_privilege(t.name, 'update') then 'update' end,
         case when not has_table_privilege(t.name, 'delete') then 'delete' end,
         case when not has_table_privilege(t.name, 'truncate') then 'truncate' end,
         case when not has_table_privilege(t.name, 'trigger') then 'trigger' end], null)
  from unnest(%s::text[]) t(name)"""

_MAY_SUPPRESS = "select has_parameter_privilege('session_replication_role', 'set'), current_user::text"
_SEQUENCE_RIGHTS = """
select s from unnest(%s::text[]) s
 where not (has_sequence_privilege(s, 'select') and has_sequence_privilege(s, 'update'))"""

_RUNNING = """
select array_agg(a.pid order by a.pid) from pg_stat_activity a
 where a.datname = current_database() and a.application_name = %s"""

# The tables below a partitioned table or inheritance parent, at any height, that is not among them.
_ROOTS = """
with recursive above(name, relid) as (
  select t.name, i.inhparent from unnest(%s::text[]) t(name) join pg_inherits i on i.inhrelid = t.name::regclass
   union
  select a.name, i.inhparent from above a join pg_inherits i on i.inhrelid = a.relid)
select name, relid::regclass::text from above where relid::regclass::text <> all (%s::text[]) order by 1, 2"""


def find_obstacles(pair: Pair, *, accepted: Collection[str] = (), max_lag: timedelta = MAX_LAG) -> list[Obstacle]:
    """What stands in the way of a switchover, errors first; `accepted`: left out, as CODE or CODE:OBJECT.

    GdqError if there is no such replica, or if the switch was made.
    """
    _refuse_made(pair)
    consumer = pair.consumer()
    tables = pair.tables()
    require_usage(pair.source, pair.target, tables)
    captured = {info.table_name: info for info in table_info(pair.source, pair.queue)}
    present = dict(pair.target.execute(_PRESENT, [tables]).fetchall())
    there = [table for table in tables if table in present]
    return left(
        [
            *_flow(pair, consumer, max_lag),
            *_taken(pair, tables),
            *_tables(pair, tables, captured),
            *_missing(tables, present),
            *_columns(pair, tables, captured),
            *_preparation(pair, tables, captured),
            *_databases(pair),
            *_rights(pair, tables, there),
            *_sequences(pair),
            *differing_definitions(pair, there),
        ],
        accepted,
    )


def not_made(pair: Pair) -> GdqError:
    """The error of a switch back before there was one."""
    return GdqError(
        f"there is nothing to switch back: no switch was made, the application writes to {place(pair.target)}",
        hint=f"gdq switchover {pair.queue} {pair.replica} --to ... makes one, without --back.",
    )


def half_done() -> GdqError:
    """The error of a command that is not for the time within a switch."""
    return GdqError("a switch is half done: no database takes writes", hint="Run it again: it goes on where it is.")


def _refuse_made(pair: Pair) -> None:
    """GdqError if the source takes no writes of the application, as it is the target of a switch."""
    here, there = read_state(pair.source), read_state(pair.target)
    if here is None or (here.queue, here.replica, here.side) != (pair.queue, pair.replica, "target"):
        return
    if there is not None and there.side == "target" and here.turns != there.turns:
        raise half_done()
    if here.turns == 0:
        raise not_made(pair)
    raise GdqError(
        f"the switch was made: the application writes to {place(pair.target)} {here.since}",
        hint="The same command with --back, or without it, says what stands in the way of the other direction.",
    )


def running_replica(pair: Pair) -> list[int]:
    """The processes in the source that serve a program which applies changes for the replica."""
    row = pair.source.execute(_RUNNING, [f"gdq:{pair.queue}/{pair.replica}"]).fetchone()
    return list(row[0] or ()) if row is not None else []


def _flow(pair: Pair, consumer: ConsumerInfo, max_lag: timedelta) -> Iterator[Obstacle]:
    """Of the changes that are under way, and of those who read them."""
    command = f"gdq replicate {pair.queue} {pair.replica}"
    if pids := running_replica(pair):
        problem = f"a program applies changes: pid {', '.join(map(str, pids))}"
        yield warning("replica_running", pair.replica, problem, f"Stop {command} just before the switch.")
    if consumer.lag is not None and consumer.lag > max_lag:
        problem = f"the replica is {consumer.lag.total_seconds():.0f} s behind, {consumer.unread_events} changes"
        yield error("lag", pair.replica, problem, f"Let it catch up: {command} ...")
    if conflicts := [info for info in conflict_info(pair.target) if info.replica_name == pair.replica]:
        problem = f"{len(conflicts)} conflicts were settled: rows of the target may differ"
        cure = "Compare the tables (gdq compare-tables), then: delete from gdq_target.replica_conflict"
        yield error("conflicts", pair.replica, problem, cure)
    if letters := [one for one in replica_dead_letters(pair.target) if one.replica_name == pair.replica]:
        problem = f"the target has refused rows: {len(letters)} dead letters"
        cure = f"gdq replica-dead-letters {pair.replica} --to ..., then replay them"
        yield error("dead_letters", pair.replica, problem, cure)
    if skips := [note for note in skip_info(pair.target) if note.replica_name == pair.replica]:
        problem = f"{sum(note.changes for note in skips)} changes were skipped: rows of the target differ"
        cure = f"gdq repair-tables {pair.queue} {pair.replica} --to ..., then --accept skipped_changes"
        yield error("skipped_changes", pair.replica, problem, cure)
    for other in consumer_info(pair.source, pair.queue):
        name = other.consumer_name
        if other.dead_letters or other.retries:
            problem = f"it has {other.dead_letters} dead letters and {other.retries} retries in the source"
            cure = f"gdq dead-letters {pair.queue} {name}, then replay or purge them"
            yield (error if name == pair.replica else warning)("dead_letters", name, problem, cure)
        if name != pair.replica:
            problem = "the consumer stays at the source, where no changes come after the switch"
            cure = f"Register it in the target before the switch: gdq register-consumer {pair.queue} {name}"
            yield warning("consumer_stays", name, problem, cure)


def _taken(pair: Pair, tables: Sequence[str]) -> Iterator[Obstacle]:
    """Of what the replica takes: nothing, or parts of tables."""
    if not tables:
        cure = f"gdq add-table {pair.queue} ..., then gdq replicate {pair.queue} {pair.replica} ..."
        yield error("table_not_taken", pair.replica, "the replica takes no table: nothing would be switched", cure)
    for name, root in pair.source.execute(_ROOTS, [list(tables), list(tables)]).fetchall():
        problem = f"the replica does not take {root}, through which its rows are written, past the fence"
        yield error("root_not_taken", name, problem, f"gdq add-table {pair.queue} {root}")


def _tables(pair: Pair, tables: Sequence[str], captured: dict[str, TableInfo]) -> Iterator[Obstacle]:
    """Of tables that the replica does not take, or not whole."""
    views = [Target(info.view_name, info.source, info.target) for info in view_info(pair.source)]
    of_views = [name for target in views for name in (target.table, target.state)]
    for name, unlogged in pair.source.execute(_TABLES, [of_views]).fetchall():
        if name in tables:
            continue
        if unlogged:
            cure = f"alter table {name} set logged, or accept that it is empty in the target"
            yield error("unlogged_table", name, "an unlogged table cannot be captured", cure)
        else:
            cure = f"gdq add-table {pair.queue} {name}" if name not in captured else f"gdq set-tables {pair.queue} ..."
            yield error("table_not_taken", name, "the replica does not take it: it stays behind", cure)
    try:
        copied = set(replica_tables(pair.target, pair.queue, pair.replica))
    except GdqError:
        copied = set()
    for name in tables:
        info = captured.get(name)
        if name not in copied:
            cure = f"gdq replicate {pair.queue} {pair.replica} ..."
            yield error("table_not_copied", name, "the replica has not copied it yet", cure)
        if info is None or info.state != "ok":
            problem = f"capture has a gap: {info.reason}" if info else "it is no longer captured"
            yield error("capture_gap", name, problem, f"gdq replicate {pair.queue} {pair.replica} copies it")
        if info is not None and info.always:
            problem = "captured with --always: what the replica writes after the switch would come back"
            cure = f"gdq alter-table {pair.queue} {name} --no-always"
            yield error("captured_always", name, problem, cure)


def _missing(tables: Sequence[str], present: dict[str, bool]) -> Iterator[Obstacle]:
    for name in tables:
        if name not in present:
            cure = f"pg_dump --schema-only --table='{name}' of the source, into the target"
            yield error("table_missing", name, f"the target has no table {name}", cure)
        elif present[name]:
            cure = f"alter table {name} set logged"
            yield error("table_unlogged_there", name, "it is unlogged in the target", cure)


def _columns(pair: Pair, tables: Sequence[str], captured: dict[str, TableInfo]) -> Iterator[Obstacle]:
    for table, column in pair.source.execute(_COLUMNS, [list(tables)]).fetchall():
        if table in captured and column not in captured[table].columns:
            cure = f"gdq alter-table {pair.queue} {table}, so that all columns are captured"
            problem = "the column is not captured: its values stay behind"
            yield error("column_not_captured", f"{table}.{column}", problem, cure)


def _preparation(pair: Pair, tables: Sequence[str], captured: dict[str, TableInfo]) -> Iterator[Obstacle]:
    """Of what --prepare makes in the target."""
    cure = f"gdq switchover {pair.queue} {pair.replica} --to ... --prepare"
    if installed_mark(pair.target) is None:
        yield error("gdq_missing", "target", "gdq is not installed in the target", cure)
        return
    try:
        check_version(pair.target)
    except InstallError as outdated:
        yield error("gdq_outdated", "target", str(outdated), cure)
        return
    if read_state(pair.target) is None or read_state(pair.source) is None:
        problem = "the databases are not prepared for the switchover"
        yield error("not_prepared", pair.replica, problem, cure)
        return
    queues = {info.queue_name for info in queue_info(pair.target)}
    there = {info.table_name: info for info in table_info(pair.target, pair.queue)} if pair.queue in queues else {}
    for table in tables:
        info = there.get(table)
        if info is None or info.state != "ok" or info.always:
            problem = f"queue {pair.queue} of the target does not capture the table" if info is None else (
                f"its capture in the target is not as it should: {info.reason or 'option always'}"
            )  # fmt: skip
            yield error("not_prepared", table, problem, cure)
        elif table in captured and set(info.key or ()) != set(captured[table].key or ()):
            ours, theirs = (", ".join(one.key or ()) or "none" for one in (captured[table], info))
            problem = f"the key of its rows is {ours} in the source and {theirs} in the target: no way back finds them"
            yield error("key_differs", table, problem, f"alter table {table} on one side, then once more: {cure}")
    if has_event_triggers(pair.source) and not has_event_triggers(pair.target):
        problem = "the event triggers that follow DDL are missing in the target"
        yield error("event_triggers_missing", "target", problem, "gdq create-event-triggers, by a superuser")


def has_event_triggers(connection: Connection[Any]) -> bool:
    """True if gdq's event triggers follow DDL in a database."""
    query = "select exists (select from pg_event_trigger e where e.evtname = '!gdq_ddl' and e.evtenabled <> 'D')"
    row = connection.execute(query).fetchone()
    return row is not None and bool(row[0])


def _databases(pair: Pair) -> Iterator[Obstacle]:
    """Of the databases as such: large objects, prepared transactions, encodings, collations."""
    row = pair.source.execute("select count(*) from pg_largeobject_metadata").fetchone()
    if row is not None and row[0]:
        problem = f"{row[0]} large objects are copied by no replica"
        yield error("large_objects", "source", problem, "Move them by pg_dump --large-objects, or to bytea.")
    for connection, side in ((pair.source, "source"), (pair.target, "target")):
        for gid, owner in connection.execute(_PREPARED).fetchall():
            cure = f"commit prepared '{gid}' or rollback prepared '{gid}', by {owner}"
            yield error("prepared_transaction", gid, f"a prepared transaction of the {side} holds locks", cure)
    [here], [there] = named_rows(pair.source, _DATABASE), named_rows(pair.target, _DATABASE)
    if here.encoding != there.encoding:
        problem = f"{here.encoding} in the source, {there.encoding} in the target"
        yield error("encoding_differs", "database", problem, f"Make it with encoding {here.encoding}.")
    if (here.collation, here.ctype, here.provider) != (there.collation, there.ctype, there.provider):
        problem = f"{here.collation} ({here.provider}) in the source, {there.collation} ({there.provider}) there"
        cure = "Texts sort otherwise, and may be equal otherwise: make the database alike, or accept it."
        yield error("collation_differs", "database", problem, cure)
    elif here.version != there.version:
        problem = f"collation version {here.version} in the source, {there.version} in the target"
        yield warning("collation_differs", "database", problem, "Texts may sort otherwise after the switch.")
    if there.version != there.actual:
        problem = f"the target's indexes are of collation version {there.version}, its system has {there.actual}"
        cure = "reindex database; alter database ... refresh collation version"
        yield error("collation_outdated", "target", problem, cure)


def _rights(pair: Pair, tables: Sequence[str], there: Sequence[str]) -> Iterator[Obstacle]:
    """Of gdq's own roles in both databases: each is written to by the replica sooner or later."""
    for connection, side, names in ((pair.source, "source", tables), (pair.target, "target", there)):
        row = connection.execute(_MAY_SUPPRESS).fetchone()
        may_suppress, role = row or (False, "")
        if not may_suppress:
            problem = f"{role} cannot keep triggers of the {side} from firing for the replica"
            cure = f"grant set on parameter session_replication_role to {role}"
            yield error("lacking_rights", side, problem, cure)
        for table, lacking in connection.execute(_RIGHTS, [list(names)]).fetchall():
            if lacking:
                problem = f"{role} lacks {', '.join(lacking)} in the {side}"
                cure = f"grant {', '.join(lacking)} on {table} to {role}"
                yield error("lacking_rights", table, problem, cure)


def _sequences(pair: Pair) -> Iterator[Obstacle]:
    names = [row.name for row in named_rows(pair.source, SEQUENCES)]
    published = {info.sequence_name for info in sequence_info(pair.source, pair.queue)}
    for name in names:
        if name not in published:
            problem = "its value does not reach the target before the switch, nor come back after it"
            yield error("sequence_not_published", name, problem, f"gdq add-sequence {pair.queue} {name}")
    for connection, side in ((pair.source, "source"), (pair.target, "target")):
        known = [row.name for row in named_rows(connection, SEQUENCES) if row.name in names]
        for (name,) in connection.execute(_SEQUENCE_RIGHTS, [known]).fetchall():
            problem = f"its value cannot be read and set in the {side}"
            yield error("lacking_rights", name, problem, f"grant all on sequence {name} to the role of gdq")
