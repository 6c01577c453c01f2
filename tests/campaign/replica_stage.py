"""What a campaign against a replica runs on: two servers, the ticker and the replica under a supervisor."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import psycopg

from gdq.call import try_while_locked
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install
from gdq.source import Position
from tests.campaign.replica_writer import LARGE, LARGE_TABLE, SCHEMA, TABLES
from tests.campaign.supervisor import Supervisor

Asked = TypeVar("Asked")

_PASSWORD = "secret of the campaign"
_START_SECONDS = 120.0
_ROOT = Path(__file__).parent.parent.parent
_SETTINGS: dict[str, str | float | bool] = {
    "max_connections": 60,
    # a write that a SIGKILL cuts off leaves half a page
    "full_page_writes": True,
    "autovacuum_naptime": "5s",
}

# The labels of the versions that live in a snapshot, by the audit.
_ALIVE = """
select v.label
  from app.audit a cross join lateral (values (a.born, 1), (a.died, -1)) v(label, n)
 where a.tbl = %s and v.label is not null and pg_visible_in_snapshot(a.xid, %s::pg_snapshot)
 group by 1 having sum(v.n) > 0"""
_COLUMNS = """
select string_agg(quote_ident(attname), ', ' order by attname) from pg_attribute
 where attrelid = %s::regclass and attnum > 0 and not attisdropped"""


def _asked_again(ask: Callable[[ReplicaStage], Asked]) -> Callable[[ReplicaStage], Asked]:
    """A question to a server, asked until it is answered: one that was struck may end the first sessions it takes."""

    @wraps(ask)
    def answered(stage: ReplicaStage) -> Asked:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return ask(stage)
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    return answered


@dataclass
class ReplicaStage:
    """The servers of one run and its programs. `copy_rows`: those of the large table, 0 without it.

    `apply_workers`: tables whose changes are applied at once.
    """

    source: EmbeddedServer
    target: EmbeddedServer
    logs: Path
    copy_rows: int = 0
    apply_workers: int = 1

    def __post_init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "GDQ_DSN"))}
        environment = kept | {
            "GDQ_DSN": self.source_dsn("gdq_owner"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(_ROOT),
        }
        self.supervisor = Supervisor(self.logs, environment)
        gdq = [sys.executable, "-m", "gdq"]
        replicate = ["replicate", "q", "mirror", "--to", self.target_dsn(), "--follow"]
        replicate += ["--apply-workers", str(self.apply_workers)]
        if self.copy_rows:
            replicate += ["--chunk-rows", str(min(200_000, max(self.copy_rows // 100, 1)))]
        self._ticker = self.supervisor.add("ticker", [*gdq, "ticker"])
        self._replica = self.supervisor.add("replica", [*gdq, *replicate])

    def source_dsn(self, user: str = "postgres") -> str:
        return self.source.conninfo(user, "shop", None if user == "postgres" else _PASSWORD)

    def target_dsn(self) -> str:
        return self.target.conninfo(dbname="copy")

    def start(self) -> None:
        self.supervisor.start()

    def stop(self) -> None:
        self.supervisor.stop()

    def replica_exits(self) -> Counter[int]:
        return self._replica.exits

    def program(self, name: str) -> Any:
        return self.supervisor.programs[name]

    def connect(self, dsn: str) -> psycopg.Connection[Any]:
        """A connection, tried until the server is there."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return psycopg.connect(dsn, autocommit=True, connect_timeout=10)
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    @_asked_again
    def force_tick(self) -> int:
        """The number of a tick that is made now."""
        with self.connect(self.source_dsn("gdq_owner")) as owner:
            row = owner.execute("select gdq.force_tick('q')").fetchone()
        assert row is not None
        return int(row[0])

    @_asked_again
    def applied_tick(self) -> int | None:
        """The tick that the target stands at, with all tables copied; None before that."""
        with self.connect(self.target_dsn()) as there:
            row = there.execute("select to_regclass('gdq_target.replica_conflict')").fetchone()
            if row == (None,):
                return None
            found = there.execute(
                """select r.position, (select count(*) from gdq_target.replica_table t where t.handed_over)
                     from gdq_target.replica r"""
            ).fetchone()
        return None if found is None or found[1] < len(TABLES) + bool(self.copy_rows) else Position.parse(found[0]).tick

    @_asked_again
    def brought_rows(self) -> int | None:
        """How many rows of the large table its parts have brought; None once all are there."""
        with self.connect(self.target_dsn()) as there:
            row = there.execute("select to_regclass('gdq_target.chunked_copy')").fetchone()
            if row == (None,):
                return 0
            query = "select from gdq_target.replica_table where table_name = %s and columns->'mark' is null"
            if there.execute(query, [LARGE]).rowcount:
                return None
            row = there.execute("select coalesce(sum(row_count), 0)::bigint from gdq_target.chunked_copy").fetchone()
        assert row is not None
        return int(row[0])

    @_asked_again
    def memory_bytes(self) -> dict[str, int]:
        """What the program and its sessions on either side have of their own now; buffers that are shared aside."""
        found: dict[str, int] = {}
        if (pid := self._replica.pid) is not None:
            found["program"] = _own_bytes(pid)
        for side, dsn in (("source", self.source_dsn()), ("target", self.target_dsn())):
            with self.connect(dsn) as su:
                query = "select pid from pg_stat_activity where application_name like 'gdq:q/mirror%'"
                found[f"session in the {side}"] = max((_own_bytes(pid) for (pid,) in su.execute(query)), default=0)
        return found

    def started_again(self) -> int:
        """How often the program's log says that a copy has started again."""
        return self._replica.log.read_text(encoding="utf-8", errors="replace").count("started again")

    def differing_labels(self) -> dict[str, tuple[list[int], list[int]]]:
        """The tables whose rows are not those of the source at the target's position: what is missing, what is extra.

        The target stands at the later of its position and of the snapshot of a table's copy.
        """
        found = {}
        with self.connect(self.target_dsn()) as there, self.connect(self.source_dsn()) as here:
            there.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            # a batch that truncates tables locks them in another order
            position, copies, rows = try_while_locked(lambda: _target_labels(there))
            for table in TABLES:
                query = "select gdq.snapshot_max(%s::pg_snapshot, %s::pg_snapshot)::text"
                snapshot = here.execute(query, [Position.parse(position).snapshot, copies[f"app.{table}"]]).fetchone()
                assert snapshot is not None
                alive = Counter(label for (label,) in here.execute(_ALIVE, [table, snapshot[0]]))
                if alive != rows[table]:
                    lacking, extra = sorted(alive - rows[table]), sorted(rows[table] - alive)
                    found[table] = (lacking[:5], extra[:5])
        return found

    def differing_rows(self) -> list[str]:
        """What differs in columns and values when nobody writes."""
        found = []
        with self.connect(self.target_dsn()) as there, self.connect(self.source_dsn()) as here:
            if self.copy_rows:
                query = f"select count(*), sum(hashtextextended(t::text, 0)) from {LARGE} t".encode()
                ours, theirs = (c.execute(query).fetchone() for c in (here, there))
                found += [f"{LARGE}: {ours} in the source, {theirs} in the target"] if ours != theirs else []
            for table in TABLES:
                ours, theirs = (c.execute(_COLUMNS, [f"app.{table}"]).fetchone() for c in (here, there))
                assert ours is not None
                if ours != theirs:
                    found.append(f"{table} has the columns {ours}, its copy {theirs}")
                    continue
                query = f"select row({ours[0]})::text from app.{table}".encode()
                rows, copies = (Counter(c.execute(query).fetchall()) for c in (here, there))
                if rows != copies:
                    found.append(f"{table}: {len(rows)} rows, missing {rows - copies}, extra {copies - rows}"[:500])
        return found


def _target_labels(there: psycopg.Connection[Any]) -> tuple[str, dict[str, str], dict[str, Counter[int]]]:
    """The target's position, the snapshots of its copies, and its rows, all of one moment."""
    with there.transaction():
        # a copy begins with TRUNCATE, which hides all rows from older snapshots
        there.execute(f"lock table {', '.join(f'app.{t}' for t in TABLES)} in access share mode".encode())
        row = there.execute("select position from gdq_target.replica").fetchone()
        assert row is not None
        copies = dict(there.execute("select table_name, snapshot from gdq_target.replica_table").fetchall())
        rows = {t: Counter(n for (n,) in there.execute(f"select label from app.{t}".encode())) for t in TABLES}
    return row[0], copies, rows


def _own_bytes(pid: int) -> int:
    """The memory that a process does not share; 0 if it has gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return 0


@contextmanager
def set_up(major: int, folder: Path, copy_rows: int = 0, apply_workers: int = 1) -> Iterator[ReplicaStage]:
    """Two servers with everything that the campaign needs, until the end of the block.

    `copy_rows`: of a large table, whose first copy begins with the programs; 0: there is none.
    """
    binaries = find_binaries(major)
    with (
        EmbeddedServer(binaries=binaries, settings=_SETTINGS, in_memory=True) as source,
        EmbeddedServer(binaries=binaries, settings=_SETTINGS, in_memory=True) as target,
    ):
        stage = ReplicaStage(source, target, folder, copy_rows, apply_workers)
        with psycopg.connect(source.conninfo(), autocommit=True) as su:
            for user, rights in (("gdq_owner", "createrole"), ("app", "nocreaterole")):
                su.execute(f"create role {user} login {rights} password '{_PASSWORD}'".encode())
            su.execute("create database shop owner gdq_owner")
        install(stage.source_dsn("gdq_owner"))
        with psycopg.connect(stage.source_dsn(), autocommit=True) as su:
            su.execute("select gdq.create_event_triggers()")
            su.execute("create schema app authorization app; grant usage on schema app to gdq_owner")
            su.execute("alter default privileges for role app grant trigger, select on tables to gdq_owner")
        with psycopg.connect(stage.source_dsn("app"), autocommit=True) as app:
            app.execute(SCHEMA.encode())
            if copy_rows:
                app.execute(LARGE_TABLE.encode())
                rows = f"select i, 0, 'note ' || md5(i::text) from generate_series(1, {copy_rows}::bigint) i"
                app.execute(f"insert into {LARGE} {rows}".encode())
                app.execute(f"vacuum analyze {LARGE}".encode())
        with psycopg.connect(stage.source_dsn("gdq_owner"), autocommit=True) as owner:
            owner.execute(
                "select gdq.create_queue('q', ticker_max_lag => '200 ms', rotation_period => '3 s',"
                " rotation_bytes => 262144)"
            )
            for table in [*(f"app.{table}" for table in TABLES), *([LARGE] if copy_rows else [])]:
                owner.execute("select gdq.add_table('q', %s::regclass)", [table])
        with psycopg.connect(target.conninfo(), autocommit=True) as su:
            su.execute("create database copy")
        with psycopg.connect(stage.target_dsn(), autocommit=True) as there:
            there.execute(b"create schema app;" + SCHEMA.encode() + (LARGE_TABLE.encode() if copy_rows else b""))
        yield stage
