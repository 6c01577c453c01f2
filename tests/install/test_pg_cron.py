"""pg_cron in place of a ticker: the jobs of docs/managed.md keep a queue going."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from gdq.consumers.refresh.refresher import Refresher
from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install
from gdq.view.view import create_view
from tests.support.page import blocks
from tests.support.server import PASSWORD, Database, chosen_binaries, drop_ended
from tests.support.waiting import until

pytestmark = pytest.mark.server

(JOBS, VIEW_JOB) = (block.text for block in blocks("docs/managed.md") if "cron.schedule" in block.text)
(TICKS, MAINTENANCE, _log) = re.findall(r"\$job\$(.*?)\$job\$", JOBS)
(VIEW,) = re.findall(r"\$job\$(.*?)\$job\$", VIEW_JOB)


@pytest.fixture
def timekeeper(server: EmbeddedServer, template: str) -> Iterator[str]:
    """A role that may do no more than the page says."""
    with psycopg.connect(server.conninfo(), autocommit=True) as su:
        su.execute(sql.SQL("create role timekeeper login in role gdq_consumer password {}").format(PASSWORD))
        yield "timekeeper"
        drop_ended(server)
        su.execute("drop role timekeeper")


def open_shop(owner: psycopg.Connection[Any]) -> None:
    owner.execute("create table t (id int primary key)")
    for queue in ("shop", "other"):
        # a rotation of whatever the log holds; a tick for each look
        owner.execute(
            "select gdq.create_queue(%s), gdq.set_queue(%s, ticker_max_lag => '1 ms', rotation_period => '1 ms')",
            [queue, queue],
        )
    owner.execute("select gdq.add_table('shop', 't')")
    owner.execute("select gdq.register_consumer('shop', 'c')")


def read(owner: psycopg.Connection[Any]) -> list[int]:
    """The ids of what the ticks have made readable; they are finished."""
    ids = []
    while found := owner.execute("select batch_id, token from gdq.next_batch('shop', 'c')").fetchone():
        rows = owner.execute("select new->>'id' from gdq.get_batch(%s, %s) where op = 'insert'", found).fetchall()
        ids += [int(row[0]) for row in rows]
        owner.execute("select gdq.finish_batch(%s, %s)", found)
    return ids


def rows_in_logs(su: psycopg.Connection[Any]) -> int:
    logs = su.execute(
        "select format('%I.%I', relnamespace::regnamespace, relname) from pg_class"
        " where relnamespace = 'gdq_log'::regnamespace and relkind = 'r'"
    ).fetchall()
    return sum(su.execute(f"select count(*) from {log}").fetchone()[0] for (log,) in logs)  # type: ignore[index]


def test_the_jobs_tick_rotate_and_empty(db: Database, timekeeper: str) -> None:
    with (
        db.connect() as owner,
        db.connect("su") as su,
        psycopg.connect(db.server.conninfo(timekeeper, db.name, PASSWORD), autocommit=True) as clock,
    ):
        open_shop(owner)

        def ticked() -> list[int]:
            clock.execute(TICKS.encode())
            return read(owner)

        def maintained() -> int:
            clock.execute(MAINTENANCE.encode())
            return rows_in_logs(su)

        for number in range(6):
            owner.execute("insert into t values (%s)", [number])
            assert until(ticked) == [number]
            maintained()
        until(lambda: maintained() == 0)


def open_view(owner: psycopg.Connection[Any], dsn: str) -> None:
    owner.execute("create table sale (id int primary key, country text)")
    owner.execute("select gdq.add_table('shop', 'sale')")
    query = "select country, count(*) as sales from sale group by country"
    create_view(owner, "sales_by_country", "shop", query, "public.sales_by_country", engine="postgres")
    with Refresher(dsn) as refresher:
        refresher.refresh("sales_by_country")


def test_a_view_is_kept_fresh_by_its_job(db: Database) -> None:
    with db.connect() as owner:
        open_shop(owner)
        open_view(owner, db.dsn)
        for number in range(3):
            owner.execute("insert into sale values (%s, 'FR')", [number])
            owner.execute(VIEW.encode())
            assert owner.execute("select * from sales_by_country").fetchall() == [("FR", number + 1)]


@pytest.fixture
def cron(pytestconfig: pytest.Config) -> Iterator[EmbeddedServer]:
    """A server with pg_cron, whose jobs belong to its database shop."""
    binaries = chosen_binaries(pytestconfig.getoption("--pg"))
    if not list(binaries.folder.parent.glob("lib/**/pg_cron.so")):
        pytest.skip("this PostgreSQL has no pg_cron")
    settings: dict[str, str | float | bool] = {
        "shared_preload_libraries": "pg_cron",
        "cron.database_name": "shop",
        "cron.use_background_workers": True,
    }
    with EmbeddedServer(binaries=binaries, settings=settings, in_memory=True) as server:
        yield server


@pytest.mark.long
def test_pg_cron_itself(cron: EmbeddedServer) -> None:
    """Versions before 1.5 know no seconds: there the jobs run once a minute."""
    with psycopg.connect(cron.conninfo(), autocommit=True) as su:
        su.execute(sql.SQL("create role boss login createrole password {}").format(PASSWORD))
        su.execute("create database shop owner boss")
    dsn = cron.conninfo("boss", "shop", PASSWORD)
    install(dsn)
    with psycopg.connect(cron.conninfo(dbname="shop"), autocommit=True) as su:
        su.execute("create extension pg_cron")
        su.execute("grant usage on schema cron to boss")
        version = su.execute("select extversion from pg_extension where extname = 'pg_cron'").fetchone()
        jobs = JOBS + VIEW_JOB
        if not version or version[0] < "1.5":
            jobs = re.sub(r"'\d+ seconds'", "'* * * * *'", jobs)
        with psycopg.connect(dsn, autocommit=True) as owner:
            open_shop(owner)
            open_view(owner, dsn)
            owner.execute("insert into sale values (1, 'FR')")
            for job in filter(str.strip, jobs.split(";\n")):
                owner.execute(job.encode())
            owner.execute("insert into t values (1)")
            assert until(lambda: read(owner)) == [1]
            until(lambda: owner.execute("select * from sales_by_country").fetchall() == [("FR", 1)])
        until(lambda: rows_in_logs(su) == 0)
        states = su.execute("select distinct status from cron.job_run_details where end_time is not null").fetchall()
        assert states == [("succeeded",)]
