"""What a campaign runs on: two servers, the proxies and PgBouncer before them, tables, queues, consumers and views."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psycopg
from psycopg.conninfo import make_conninfo

from gdq.consumers.slot.slot import create_slot
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install
from gdq.view.view import create_view
from tests.campaign.disk import Disk, small_disk
from tests.campaign.proxy import Proxy

PASSWORD = "secret of the campaign"
ROOT = Path(__file__).parent.parent.parent
PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
PART_REGIONS = 3

_APP = f"""
create sequence app.label;
create table app.audit (tbl text, born bigint, died bigint);
create table app.acct (id bigint primary key, region int not null, label bigint not null, prev bigint,
                       amount numeric(12,2), pad text);
create table app.item (id bigint primary key, acct bigint, region int not null, label bigint not null, prev bigint,
                       note text);
create table app.part (id bigint, region int, label bigint not null, prev bigint, note text,
                       primary key (id, region)) partition by list (region);
{"".join(f"create table app.part{n} partition of app.part for values in ({n});" for n in range(PART_REGIONS))}
create table app.part_rest partition of app.part default;
alter table app.item replica identity full;
"""
_SEEN = """
create schema seen;
create table seen.beat (consumer text, beat bigint, at timestamptz default clock_timestamp());
"""
_CHANGES = "create table seen.{} (n bigint generated always as identity, tbl text, born bigint, died bigint);"

VIEWS = {
    "by_region": (
        "q",
        "select region, count(*) as n, sum(label) as labels, sum(amount) as amount from app.acct group by region",
    ),
    "joined": (
        "q",
        """select i.id, i.label as item_label, i.region, a.label as acct_label
             from app.item i join app.acct a on a.id = i.acct""",
    ),
    "small_parts": ("small", "select region, count(*) as n, min(label) as l from app.part group by region"),
    "away": (
        "q",
        "select region, count(*) as n, max(label) as newest, sum(label) as labels from app.part group by region",
    ),
    "lake_delta": ("q", "select id, region, label from app.acct where id < 1000"),
    "lake_iceberg": ("q", "select region, count(*) as n, max(label) as newest from app.item group by region"),
}
FAR_VIEWS = ("away",)
LAKE_VIEWS = ("lake_delta", "lake_iceberg")
CONSUMERS = ("same", "far", "crew", "slot", "mirror")
MEMBERS = ("m1", "m2")


class ClockServer(EmbeddedServer):
    """A server that begins with variables of its own, by which its clock can be moved."""

    environment: ClassVar[dict[str, str]] = {}

    def _pg_ctl(self, verb: str, *options: str) -> None:
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment if verb == "start" else {})
        try:
            super()._pg_ctl(verb, *options)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@dataclass
class Stage:
    """Servers, proxies and connection strings of one run."""

    folder: Path
    primary: EmbeddedServer
    target: EmbeddedServer
    front: Proxy
    app: Proxy
    disk: Disk
    database: str = "campaign"
    pooled_port: int = 0
    clock: Path | None = None

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def dsn(self, user: str, port: int | None = None, **more: str) -> str:
        """A connection string for the source, by default to the server itself."""
        password = self.primary.password if user == "postgres" else PASSWORD
        return make_conninfo(
            host="127.0.0.1",
            port=port or self.primary.port,
            user=user,
            dbname=self.database,
            password=password,
            connect_timeout="10",
            **more,
        )

    @property
    def owner_dsn(self) -> str:
        """What gdq's programs get: through the proxy that faults strike."""
        return self.dsn("gdq_owner", self.front.port)

    @property
    def app_dsn(self) -> str:
        """What the writers get: through a proxy that only follows a promotion."""
        return self.dsn("app", self.app.port)

    @property
    def pooled_dsn(self) -> str:
        return f"host=127.0.0.1 port={self.pooled_port} user=anybody dbname={self.database} connect_timeout=10"

    @property
    def target_dsn(self) -> str:
        return make_conninfo(self.target.conninfo("far", "far", PASSWORD), connect_timeout="10")

    def connect(self, user: str = "postgres", **more: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn(user), autocommit=True, **more)

    def environment(self) -> dict[str, str]:
        """The environment of gdq's programs."""
        passfile = self.folder / "pgpass"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "GDQ_DSN"))}
        return kept | {
            "GDQ_DSN": self.owner_dsn,
            "PGPASSFILE": str(passfile),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
        }


@contextmanager
def set_up(major: int, folder: Path) -> Iterator[Stage]:
    """Two servers with everything that a campaign needs, until the end of the block."""
    with ExitStack() as opened:
        binaries = find_binaries(major)
        settings: dict[str, str | float | bool] = {
            "wal_level": "logical",
            "max_connections": 120,
            "shared_buffers": "256MB",
            "max_wal_size": "1GB",
            "max_wal_senders": 8,
            "hot_standby": True,
            "log_min_duration_statement": 5000,
            "log_lock_waits": True,
            "max_prepared_transactions": 60,
            # a write that a SIGKILL or a full disk cuts off leaves half a page
            "full_page_writes": True,
        }
        disk = opened.enter_context(small_disk())
        clock = opened.enter_context(_movable_clock(folder))
        primary = opened.enter_context(ClockServer(binaries=binaries, settings=settings))
        disk.take_wal(primary)
        target = opened.enter_context(
            EmbeddedServer(binaries=binaries, settings={"max_connections": 50, "full_page_writes": True})
        )
        front, app = Proxy(primary.port), Proxy(primary.port)
        opened.callback(front.close)
        opened.callback(app.close)
        stage = Stage(folder, primary, target, front, app, disk, clock=clock)
        stage.logs.mkdir(parents=True, exist_ok=True)
        _prepare_target(stage)
        _prepare_source(stage)
        yield stage


@contextmanager
def _movable_clock(folder: Path) -> Iterator[Path | None]:
    """A file that says how far the clock of servers is from the true time; None without libfaketime."""
    found = [Path(os.environ.get("GDQ_FAKETIME") or "/nowhere"), *Path("/usr/lib").glob("*/faketime/libfaketime.so.1")]
    library = next((path for path in found if path.exists()), None)
    if library is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="gdq-clock-") as place:
        Path(place).chmod(0o755)
        path = Path(place) / "clock"
        path.write_text("+0s\n")
        path.chmod(0o644)
        ClockServer.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(path),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        yield path


def _prepare_target(stage: Stage) -> None:
    with psycopg.connect(stage.target.conninfo(), autocommit=True) as su:
        su.execute(f"create role far login password '{PASSWORD}'".encode())
        su.execute("create database far owner far")
    with psycopg.connect(stage.target_dsn, autocommit=True) as there:
        there.execute((_SEEN + _CHANGES.format("far")).encode())
        there.execute("create table seen.position (position text)")
        there.execute("create schema views")
    line = f"127.0.0.1:{stage.target.port}:far:far:{PASSWORD}\n"
    (stage.folder / "pgpass").touch(mode=0o600)
    (stage.folder / "pgpass").write_text(line)


def _prepare_source(stage: Stage) -> None:
    with psycopg.connect(stage.primary.conninfo(), autocommit=True) as su:
        for user, rights in (("gdq_owner", "createrole replication"), ("app", "nocreaterole")):
            su.execute(f"create role {user} login nosuperuser {rights} password '{PASSWORD}'".encode())
        where = stage.disk.create_tablespace(su)
        su.execute(f"create database {stage.database} owner gdq_owner {where}".encode())
    install(stage.dsn("gdq_owner"))
    with stage.connect() as su:
        su.execute("select gdq.create_event_triggers()")
        su.execute("create schema app authorization app; grant usage on schema app to gdq_owner")
        su.execute("alter default privileges for role app grant trigger, select on tables to gdq_owner")
    with stage.connect("app") as app:
        app.execute(_APP.encode())
    with stage.connect("gdq_owner") as owner:
        owner.execute((_SEEN + "".join(_CHANGES.format(name) for name in ("same", "crew", "slot"))).encode())
        owner.execute(
            "create table seen.part (id bigint, region int, label bigint, prev bigint,"
            " primary key (id, region)); create schema views"
        )
        _register(owner)
        _create_views(stage, owner)
    with stage.connect() as su:
        create_slot(su, "q", "slot", ["app.item"])


def _register(owner: psycopg.Connection[Any]) -> None:
    owner.execute(
        "select gdq.create_queue('q', ticker_max_lag => '200 ms', rotation_period => '10 s',"
        " rotation_bytes => 16777216)"
    )
    owner.execute(
        "select gdq.create_queue('small', ticker_max_lag => '200 ms', rotation_period => '2 s',"
        " rotation_bytes => 1048576, max_bytes => 33554432)"
    )
    for table in ("acct", "item", "part"):
        owner.execute("select gdq.add_table('q', %s::regclass)", [f"app.{table}"])
    owner.execute("select gdq.add_table('small', 'app.part')")
    for consumer in ("same", "far", "crew"):
        owner.execute("select gdq.register_consumer('q', %s)", [consumer])
    for member in MEMBERS:
        owner.execute("select gdq.register_member('q', 'crew', %s)", [member])
    owner.execute("select gdq.register_consumer('small', 'mirror')")


def _create_views(stage: Stage, owner: psycopg.Connection[Any]) -> None:
    for name, (queue, query) in VIEWS.items():
        if name in LAKE_VIEWS:
            kind = name.partition("_")[2]
            place = stage.folder / "lake" / name
            create_view(owner, name, queue, query, f"{kind}:{place}" + ("/ns.t" if kind == "iceberg" else ""))
        elif name in FAR_VIEWS:
            dsn = make_conninfo(host="127.0.0.1", port=stage.target.port, user="far", dbname="far")
            create_view(owner, name, queue, query, f"views.{name}", target_dsn=dsn, engine="postgres")
        else:
            create_view(owner, name, queue, query, f"views.{name}", engine="postgres")


@contextmanager
def pooler(stage: Stage) -> Iterator[list[str] | None]:
    """The command that runs PgBouncer in transaction mode before the front proxy; None where there is none."""
    if PGBOUNCER is None:
        yield None
        return
    account = stage.primary.account
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stage.pooled_port = listener.getsockname()[1]
    path = stage.primary.folder / "pgbouncer.ini"
    account.write(
        path,
        f"""[databases]
{stage.database} = host=127.0.0.1 port={stage.front.port} user=gdq_owner password='{PASSWORD}'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {stage.pooled_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 8
server_lifetime = 20
server_login_retry = 1
log_connections = 0
log_disconnections = 0
""",
    )
    command = [PGBOUNCER, str(path)]
    if os.getuid() != account.uid:
        command = ["setpriv", f"--reuid={account.uid}", f"--regid={account.gid}", "--clear-groups", *command]
    yield command


def programs(stage: Stage, bouncer: list[str] | None) -> dict[str, list[str]]:
    """The commands of all programs that consume, by name."""
    gdq = [sys.executable, "-m", "gdq"]
    handler = "tests.campaign.handlers"
    own = [sys.executable, "-m", "tests.campaign.elsewhere"]
    found = {
        "ticker": [*gdq, "ticker"],
        "same": [*gdq, "consume", "q", "same", f"{handler}:same", "--max-events", "3000"],
        "far": [*own, "far", stage.owner_dsn, stage.target_dsn],
        "slot": [*gdq, "consume", "q", "slot", f"{handler}:slot", "--source", "slot", "--slot-wait", "5"],
        "mirror": [*own, "mirror", stage.owner_dsn],
    }
    for member in MEMBERS:
        options = ["--member", member, "--dead-after", "6", "--max-events", "5000"]
        where = ["--dsn", stage.pooled_dsn if bouncer else stage.owner_dsn]
        found[f"member-{member}"] = [*gdq, "consume", "q", "crew", f"{handler}:crew", *options, *where]
    views = [name for name in VIEWS if name not in LAKE_VIEWS]
    found["follow"] = [*gdq, "refresh", "--follow", "--interval", "1", *views]
    found["lake"] = [*gdq, "refresh", "--follow", "--interval", "2", *LAKE_VIEWS]
    if bouncer:
        found["pgbouncer"] = bouncer
    return found
