"""The origins of rows: what a replica writes bears its source's, and what came from the target does not go back there.

The origin of a database is what no two databases share: the identifier of its server, and its number there. It is the
setting gdq.origin of the replica's session in the target. Where the target is captured with its origins, each row of
the log says whether a replica wrote it, and of which source. Where the target's server has slots, a message at the
beginning of each transaction tells a slot's reader the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import psycopg
from psycopg import Connection
from psycopg.pq import TransactionStatus

from gdq.call import scalar
from gdq.consumers.replica.source_tables import SourceTable
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.slot.transaction import ORIGIN_PREFIX
from gdq.consumers.views.change_source import NEW_OPS, OLD_OPS
from gdq.errors import GdqError
from gdq.sql_text import quote, raw

# Which changes of the source a replica brings: those of any origin but the target, or only those of none.
TakenOrigin = Literal["any", "none"]

_DATABASE = """
select c.system_identifier || '/' || d.oid from pg_control_system() c, pg_database d
 where d.datname = current_database()"""

_KEPT = """
select array(select table_name from gdq_target.replica_table where source_oid is not null),
       array(select source from gdq_target.replica)"""

_MESSAGE = "select pg_catalog.pg_logical_emit_message(true, %s, %s)"


def origin_of(connection: Connection[Any]) -> str:
    """The origin of the database that a session is connected to."""
    return str(scalar(connection, _DATABASE))


@dataclass(frozen=True, slots=True)
class KeptTables:
    """What replicas keep in a database: the names of their tables, and the origins of their sources."""

    tables: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()


def kept_tables(connection: Connection[Any]) -> KeptTables:
    """The tables of a database that are targets of replicas; GdqError if the role may not see."""
    if scalar(connection, "select to_regclass('gdq_target.replica_table') is null"):
        return KeptTables()
    try:
        row = connection.execute(_KEPT).fetchone()
    except psycopg.errors.InsufficientPrivilege as error:
        raise GdqError(
            "the source is the target of replicas, too, and this role may not see of which tables",
            hint="Grant usage on schema gdq_target and select on all tables in it to the role.",
        ) from error
    assert row is not None
    return KeptTables(frozenset(row[0]), frozenset(row[1]))


def check_capture(kept: KeptTables, queue: str, tables: Iterable[SourceTable]) -> None:
    """GdqError for a table of which the source's log lacks what other replicas write, or does not tell that they do."""
    for table in tables:
        if table.table_name in kept.tables and not (table.always and table.origin):
            raise GdqError(
                f"table {table.table_name} is the target of a replica in the source too, and its log does not show "
                "what that replica writes",
                hint=f"gdq alter-table {queue} {table.table_name} --always --origin",
            )


class BearingConnection(psycopg.Connection[Any]):
    """A session of a target: each of its transactions may say, before all rows, which origin it bears.

    A slot's reader gets this message with the transaction. `told`: the origin; None if nobody is to be told.
    """

    told: str | None = None

    @contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Iterator[psycopg.Transaction]:
        outermost = self.info.transaction_status == TransactionStatus.IDLE
        with super().transaction(savepoint_name, force_rollback) as transaction:
            if outermost and self.told is not None:
                self.execute(_MESSAGE, [ORIGIN_PREFIX, self.told])
            yield transaction


def bear_origin(target: Connection[Any], origin: str, *, local: bool = False) -> None:
    """Have everything that the session writes bear an origin; `local`: in the open transaction alone.

    Without `local` it is a BearingConnection, of which only what is written within transaction() bears the origin in
    the server's log.
    """
    target.execute("select pg_catalog.set_config('gdq.origin', %s, %s)", [origin, local])
    if not scalar(target, "select pg_catalog.current_setting('wal_level') = 'logical'"):
        return  # no slot can read it
    if local:
        target.execute(_MESSAGE, [ORIGIN_PREFIX, origin])
    else:
        assert isinstance(target, BearingConnection)
        target.told = origin


@dataclass(frozen=True, slots=True)
class PassedOrigins:
    """The origins whose changes a replica passes over: that of the target, or all of them."""

    target: str
    taken: TakenOrigin

    def has(self, origin: str | None) -> bool:
        """True if changes of an origin are passed over; None: of no origin."""
        return origin is not None and (self.taken == "none" or origin == self.target)

    @property
    def _condition(self) -> str:
        """Condition of a log row that is passed over."""
        # an origin is made of digits and a slash
        return "ev_origin is not null" if self.taken == "none" else f"ev_origin = '{self.target}'"

    def leave_some(self, source: Connection[Any], log_rows: str) -> bool:
        """True if some of these log rows are not passed over."""
        query = f"select exists (select from ({log_rows}) d where ({self._condition}) is not true)"
        return bool(source.execute(raw(query)).fetchone() == (True,))

    def without(self, table: ReplicaTable, log_rows: str) -> str:
        """SELECT of log rows of a table that is captured with its origins, without those that are passed over.

        Of each key only those rows are left that come after the last one that is passed over: what the source made of
        a row before, the target has overwritten. So the old image that comes first is what the target has. Updates
        come as two rows, D and I, since an update of the key is one of two keys. Without a key rows only come and go,
        whatever becomes of others.
        """
        if not table.keyed:
            return f"select d.* from ({log_rows}) d where ({self._condition}) is not true"
        names = {quote(name): None for column in table.columns for name in (column.old, column.new)}
        columns = ", ".join([*names, *(["ev_unchanged"] if table.omits else [])])
        keys = [(quote(column.old), quote(column.new)) for column in table.columns if column.is_key]
        image = ", ".join(
            f"case when s.w < 0 then {old} else {new} end as k{place}" for place, (old, new) in enumerate(keys, 1)
        )
        listed = ", ".join(f"k{place}" for place, _ in enumerate(keys, 1))
        order = f"max(ev_id) filter (where {self._condition}) over (partition by {listed})"
        return f"""
            select ev_id, ev_op, {columns}
              from (select *, {order} as last_passed
                      from (select d.ev_id, d.ev_origin, {columns}, case when s.w < 0 then 'D' else 'I' end as ev_op,
                                   {image}
                              from ({log_rows}) d, (values (-1), (1)) s(w)
                             where case when s.w < 0 then d.ev_op in {OLD_OPS} else d.ev_op in {NEW_OPS} end) images
                   ) marked
             where ev_id > coalesce(last_passed, 0)"""
