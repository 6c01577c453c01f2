"""`gdq compare` on a database of others: the tables of pgbench, written by an application that knows nothing of gdq."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fix_server import Database
from tests.programs import gdq

pytestmark = pytest.mark.server

TABLES = "pgbench_accounts,pgbench_tellers,pgbench_history"

SCHEMA = """
    create table pgbench_branches (bid int primary key, bbalance int, filler char(88)) with (fillfactor = 100);
    create table pgbench_tellers (tid int primary key, bid int, tbalance int, filler char(84)) with (fillfactor = 100);
    create table pgbench_accounts (aid int primary key, bid int, abalance int, filler char(84)) with (fillfactor = 100);
    create table pgbench_history (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22));
    insert into pgbench_tellers select i, 1, 0 from generate_series(1, 10) i;
    insert into pgbench_accounts select i, 1, 0, '' from generate_series(1, 1000) i"""


@pytest.fixture
def bank(db: Database) -> Iterator[psycopg.Connection[Any]]:
    """The database of an application; nothing of a run is left in it at the end."""
    with db.connect("su") as su:
        su.execute(SCHEMA)
        su.execute("alter table pgbench_history add id bigint generated always as identity primary key")
        su.execute("grant select, insert, update on all tables in schema public to app")
        su.execute("grant trigger on all tables in schema public to gdq_owner")
        before = state(su)
        yield su
        assert state(su) == before


def state(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """All that a run could leave."""
    query = """
        select 'slot', slot_name::text from pg_replication_slots where database = current_database()
        union all select 'publication', pubname::text from pg_publication
        union all select 'trigger', tgname::text from pg_trigger where not tgisinternal
        union all select 'queue', queue_name from gdq.queue
        union all select 'relation', c.oid::regclass::text from pg_class c
         where c.relnamespace::regnamespace::text not in ('pg_toast', 'pg_catalog') and c.relpersistence <> 't'
        union all select 'identity', c.oid::regclass::text || c.relreplident::text from pg_class c
         where c.relname ~ '^pgbench'
        union all select 'schema', nspname::text from pg_namespace where nspname !~ '^pg_(toast_)?temp'
        order by 1, 2"""
    return connection.execute(query).fetchall()


@contextmanager
def working(db: Database) -> Iterator[dict[str, int]]:
    """The application at work: transfers, as pgbench makes them."""
    over, done, failed = threading.Event(), {"transactions": 0}, []

    def work() -> None:
        draw = random.Random(5)
        try:
            with db.connect("app", autocommit=False) as app:
                while not over.is_set():
                    aid, tid, delta = draw.randint(1, 1000), draw.randint(1, 10), draw.randint(-5, 5)
                    app.execute("update pgbench_accounts set abalance = abalance + %s where aid = %s", [delta, aid])
                    app.execute("update pgbench_tellers set tbalance = tbalance + %s where tid = %s", [delta, tid])
                    app.execute("insert into pgbench_history values (%s, 1, %s, %s, now())", [tid, aid, delta])
                    app.commit()
                    done["transactions"] += 1
                    over.wait(0.002)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()
    assert not failed


def test_measures_both_paths(db: Database, bank: psycopg.Connection[Any], tmp_path: Path) -> None:
    with working(db) as done:
        found = gdq("compare", "--tables", TABLES, "--seconds", "2", "--json", dsn=db.su_dsn)
    print(found.stderr, found.stdout[:6000], done)
    assert found.returncode == 0
    figures = json.loads(found.stdout)
    assert figures["difference_counts"] == {}
    assert figures["queue"]["events"] == figures["slot"]["events"]
