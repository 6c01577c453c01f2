"""What sessions of gdq wait for: locks that others hold, told while a command is at work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psycopg

from gdq.conninfo import connect, sessions_by_database
from gdq.qualified_sql import qualified

# A wait that is met at two looks is told: no statement that takes a lock for a moment is.
_LOOK_SECONDS = 5.0

# A prepared transaction has no process; the lock of its own number says which of the locks without one it holds.
_HOLDERS = qualified("""
with waiting as (
  select l.database, l.relation, l.transactionid, b.blocker
    from pg_catalog.pg_locks l, pg_catalog.unnest(pg_catalog.pg_blocking_pids(l.pid)) b(blocker)
   where not l.granted and l.pid = any (%(busy)s) and b.blocker <> all (%(own)s)),
prepared as (
  select p.gid, h.database, h.relation, h.transactionid
    from pg_catalog.pg_prepared_xacts p
    join pg_catalog.pg_locks o on o.transactionid = p.transaction and o.granted and o.pid is null
    join pg_catalog.pg_locks h on h.virtualtransaction = o.virtualtransaction and h.granted and h.pid is null)
select distinct w.blocker, a.application_name, a.state,
       case when c.oid is not null then pg_catalog.format('%%I.%%I', n.nspname, c.relname) end,
       (select min(p.gid) from prepared p
         where w.blocker = 0 and (p.transactionid = w.transactionid
                                  or (p.relation = w.relation and p.database = w.database)))
  from waiting w
  join pg_catalog.pg_database d on d.datname = pg_catalog.current_database()
  left join pg_catalog.pg_class c on w.database = d.oid and c.oid = w.relation
  left join pg_catalog.pg_namespace n on n.oid = c.relnamespace
  left join pg_catalog.pg_stat_activity a on a.pid = w.blocker
 order by 1, 4""")


@contextlib.contextmanager
def told_waits(tell: Callable[[str], None], every: float = _LOOK_SECONDS) -> Iterator[None]:
    """Have a thread tell, while the block runs, for whom this process's sessions wait at two looks in a row."""
    ended = threading.Event()
    threading.Thread(target=_watch, args=[tell, every, ended], name="gdq waits", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(tell: Callable[[str], None], every: float, ended: threading.Event) -> None:
    met, told = set[str](), set[str]()
    while not ended.wait(every):
        databases = sessions_by_database("gdq:waits").items()
        now = {line for conninfo, sessions in databases for line in _waits(conninfo, sessions)}
        for line in sorted(now & met - told):
            tell(line)
        told, met = (told | met) & now, now


def _waits(conninfo: str, sessions: Mapping[int, bool]) -> list[str]:
    """A line for each transaction of others that one of these sessions waits for. They say whether they are busy."""
    busy = [pid for pid, is_busy in sessions.items() if is_busy]
    if not busy:
        return []
    # the server may be gone, as its sessions will tell
    with contextlib.suppress(psycopg.OperationalError), contextlib.closing(connect(conninfo, autocommit=True)) as other:
        found = other.execute(_HOLDERS, {"busy": busy, "own": list(sessions)}).fetchall()
        return [_line(other.info.dbname, row) for row in found]
    return []


def _line(place: str, row: tuple[Any, ...]) -> str:
    pid, program, state, table, gid = row
    known = ", ".join(filter(None, [program, state]))
    holder = f"process {pid}{f' ({known})' if known else ''}" if pid else f'the prepared transaction "{gid or "?"}"'
    what = f"a lock of table {table}" if table is not None else "a row or a lock"
    return f"waiting in database {place} for {holder}, which holds {what}"
