"""`gdq snapshot`: rows arrive unchanged at one snapshot, or nothing is changed, and a consumer goes on from there."""

from __future__ import annotations

import json
import random
import signal
import threading

import psycopg
import pytest

from gdq.consumers.copy import pieces
from gdq.consumers.copy.snapshot import copy_tables
from gdq.errors import GdqError
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = pytest.mark.server

SHOP = """
    create schema shop;
    create type shop.mood as enum ('glad', 'sad');
    create table shop.item (id int primary key, name text, price numeric(10, 2));
    insert into shop.item select n, 'item ' || n, n / 7.0 from generate_series(1, 5000) n;
    create table shop.sale (id bigint generated always as identity, day date not null, item int references shop.item,
                            note text, primary key (id, day)) partition by range (day);
    create table shop.sale_1 partition of shop.sale for values from ('2026-01-01') to ('2026-02-01');
    create table shop.sale_2 partition of shop.sale for values from ('2026-02-01') to ('2026-03-01');
    insert into shop.sale (day, item, note)
      select '2026-01-01'::date + n % 59, 1 + n % 5000, repeat('x', 200) from generate_series(1, 20000) n;
    create table shop.odd ("Odd ""name" serial, mood shop.mood, moods shop.mood[], twice int generated always as
                           ("Odd ""name" * 2) stored, cash money, moment timestamptz, doc jsonb, raw bytea);
    insert into shop.odd (mood, moods, cash, moment, doc, raw) values
      ('glad', '{sad,NULL}', 1234.56, 'infinity', '{"a": [1, null]}', '\\x00ff'), (null, null, null, null,
       'null', ''), ('sad', '{}', -1, '2026-01-01 00:00:00.000001+07', '"\\\\ \\n"', '\\x5c2e0a');
"""
IMAGE = "select t::text from {} t order by 1"
TABLES = ("shop.item", "shop.sale", "shop.odd")


@pytest.fixture
def target(empty_db: Database) -> Database:
    return empty_db


@pytest.fixture
def shop(db: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    """The source; its larger tables are copied in several pieces."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64 * 1024)
    with db.connect() as owner:
        owner.execute(SHOP)
    return db


def rows(database: Database, table: str) -> list[tuple[str]]:
    with database.connect() as owner:
        return owner.execute(IMAGE.format(table)).fetchall()


def sessions(database: Database) -> int:
    with database.connect("su") as su:
        query = "select count(*) from pg_stat_activity where application_name like 'gdq:copy%%' and datname = %s"
        return int((su.execute(query, [database.name]).fetchone() or (0,))[0])


def make_odd(target: Database) -> None:
    with target.connect() as owner:
        owner.execute("create schema shop; create type shop.mood as enum ('glad', 'sad')")


def test_rows_arrive_unchanged(shop: Database, target: Database) -> None:
    """Partitions, identities, generated columns, types of one's own, odd names and values."""
    make_odd(target)
    done = gdq("snapshot", "shop.*", "--to", target.dsn, "--create", "--json", dsn=shop.dsn)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {table["table_name"]: table["rows"] for table in told["tables"]} == {
        "shop.item": 5000, "shop.odd": 3, "shop.sale": 20000,
    }  # fmt: skip
    for table in TABLES:
        assert rows(target, table) == rows(shop, table)
    with target.connect() as owner:
        owner.execute("insert into shop.sale (day, item) values ('2026-01-01', 1)")  # the sequence goes on
        assert owner.execute("select max(id) from shop.sale").fetchone() == (20001,)
        with pytest.raises(psycopg.errors.UniqueViolation):
            owner.execute("insert into shop.item values (1)")


def test_pieces_are_read_at_one_snapshot(shop: Database, target: Database) -> None:
    """Writers go on while the copy runs: each of their transactions is there as a whole or not at all."""
    stop = threading.Event()

    def write() -> None:
        with shop.connect(autocommit=False) as writer:
            while not stop.is_set():
                for change in (1, -1):
                    key = random.randint(1, 5000)
                    writer.execute("update shop.item set price = price + %s where id = %s", [change, key])
                writer.commit()

    def total(database: Database) -> object:
        with database.connect() as owner:
            return owner.execute("select count(*), sum(price) from shop.item").fetchone()

    before = total(shop)
    threads = [threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            copy_tables(shop.dsn, ["shop.item"], target.dsn, create=True, truncate=True)
            assert total(target) == before
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    until(lambda: sessions(shop) == 0)


def test_where_and_columns(shop: Database, target: Database) -> None:
    with target.connect() as owner:
        owner.execute("create schema shop; create table shop.sale (note text, id numeric, extra int default 7)")
    options = ("--where", "day < '2026-01-03' -- early", "--columns", "id,note")
    done = gdq("snapshot", "shop.sale", "--to", target.dsn, *options, dsn=shop.dsn)
    assert done.returncode == 0, done.stderr
    with shop.connect() as owner:
        wanted = owner.execute("select id, note, 7 from shop.sale where day < '2026-01-03' order by id").fetchall()
    with target.connect() as owner:
        assert owner.execute("select id, note, extra from shop.sale order by id").fetchall() == wanted


def test_children_of_the_target_keep_their_rows(shop: Database, target: Database) -> None:
    """Rows of inheritance children are not the table's own: they are neither in the way nor deleted."""
    with target.connect() as owner:
        owner.execute("create schema shop; create table shop.item (id int primary key, name text, price numeric)")
        owner.execute("create table shop.child () inherits (shop.item); insert into shop.child values (1, 'child', 1)")
        owner.execute("insert into shop.item values (9, 'old', 1)")
    done = gdq("snapshot", "shop.item", "--to", target.dsn, "--truncate", dsn=shop.dsn)
    assert done.returncode == 0, done.stderr
    assert rows(target, "only shop.item") == rows(shop, "shop.item")
    assert rows(target, "shop.child") == [("(1,child,1)",)]


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        ("", (), "the target has no table shop.item"),
        ("create table shop.item (id int, name text)", (), 'has no column "price"'),
        ("create table shop.item (id int, name text, price numeric(10, 1))", (), "numeric(10,2), and numeric(10,1)"),
        ("create table shop.item (id int, name text, price real)", (), "numeric(10,2), and real in the target"),
        ("create view shop.item as select 1 as id", (), "shop.item of the target is no table"),
        ("create table shop.item (id int); insert into shop.item values (1)", ("--columns", "id"), "has rows"),
        ("create table shop.item (id int)", ("--columns", "ident"), 'has no column "ident"'),
        ("", ("--create", "--where", "nonsense"), "the condition of table shop.item is refused"),
        ("create table shop.item (id int check (id < 4000))", ("--columns", "id"), "violates check constraint"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    shop: Database, target: Database, made: str, options: tuple[str, ...], message: str
) -> None:
    with target.connect() as owner:
        owner.execute("create schema shop; " + made)
        before = owner.execute("select count(*) from pg_class where relkind in ('r', 'v')").fetchone()
    done = gdq("snapshot", "shop.item", "--to", target.dsn, *options, dsn=shop.dsn)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    with target.connect() as owner:
        assert owner.execute("select count(*) from pg_class where relkind in ('r', 'v')").fetchone() == before
        if "insert" in made or "check" in made:
            assert owner.execute("select count(*) from shop.item").fetchone() == ("insert" in made,)
    until(lambda: sessions(shop) == 0)


def test_the_source_is_no_target(shop: Database) -> None:
    done = gdq("snapshot", "shop.item", "--to", shop.dsn, "--truncate", dsn=shop.dsn)
    assert done.returncode == 1
    assert "the target is the database of the tables itself" in done.stderr
    assert len(rows(shop, "shop.item")) == 5000


def test_hidden_rows_are_an_error(shop: Database, target: Database) -> None:
    with shop.connect() as owner:
        owner.execute("grant usage on schema shop to app; grant select on shop.item to app")
        owner.execute("alter table shop.item enable row level security")
        owner.execute("create policy few on shop.item using (id < 10)")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
        copy_tables(shop.app_dsn, ["shop.item"], target.dsn, create=True)
    with target.connect() as owner:
        assert owner.execute("select to_regclass('shop.item')").fetchone() == (None,)


def test_a_consumer_goes_on_from_the_snapshot(shop: Database, target: Database) -> None:
    """No change comes twice, and none is lost, though writers go on before, during and after the copy."""
    assert gdq("create-queue", "q", dsn=shop.dsn).returncode == 0
    assert gdq("add-table", "q", "shop.item", dsn=shop.dsn).returncode == 0
    with shop.connect() as owner:
        owner.execute("update shop.item set name = 'before' where id = 1")
        done = gdq(
            "snapshot",
            "shop.item",
            "--to",
            target.dsn,
            "--create",
            "-q",
            "q",
            "--register",
            "c",
            "--json",
            dsn=shop.dsn,
        )
        assert done.returncode == 0, done.stderr
        owner.execute("update shop.item set name = 'after' where id = 2")
    told = json.loads(done.stdout)
    assert told["snapshot"].replace(":", "") in told["position"].replace(":", "")
    read = gdq("consume", "q", "c", "--once", "--json", dsn=shop.dsn)
    events = [json.loads(line) for line in read.stdout.splitlines()]
    assert [(event["op"], event["new"]["id"], event["new"]["name"]) for event in events] == [("update", 2, "after")]


def test_ctrl_c_takes_the_copy_back(shop: Database, target: Database) -> None:
    with target.connect() as holder, target.connect() as watcher:
        holder.execute(
            "create schema shop; create table shop.item (id int primary key, name text, price numeric(10, 2))"
        )
        # a worker waits for the end of this transaction
        holder.execute("begin")
        holder.execute("insert into shop.item values (4999, 'held')")
        process = start_gdq("snapshot", "shop.item", "--to", target.dsn, dsn=shop.dsn)
        waiting = """select count(*) from pg_stat_activity where wait_event_type = 'Lock'
                        and application_name like 'gdq:copy%' and datname = current_database()"""
        until(lambda: process.poll() is not None or watcher.execute(waiting).fetchone() == (1,))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert (process.returncode, "interrupted: the copy was taken back" in errors) == (130, True), errors
        holder.execute("rollback")
    assert rows(target, "shop.item") == []
    until(lambda: sessions(shop) == 0)


def test_a_worker_that_is_killed(shop: Database, target: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other workers stop, and nothing is left at the target, nor of a consumer that was registered for the copy."""
    gdq("create-queue", "q", dsn=shop.dsn)
    gdq("add-table", "q", "shop.sale", dsn=shop.dsn)
    killed: list[object] = []

    def progress(*_: object) -> None:
        if not killed:
            with shop.connect("su") as su:
                query = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'gdq:copy/1'"
                killed.append(su.execute(query + " and datname = current_database()").fetchall())

    monkeypatch.setattr("gdq.consumers.copy.workers._LOOK_SECONDS", 0.001)
    with pytest.raises((psycopg.OperationalError, GdqError)):
        copy_tables(
            shop.dsn, ["shop.sale"], target.dsn, create=True, workers=1, queue="q", consumer="c", progress=progress
        )
    assert killed
    with target.connect() as owner:
        assert owner.execute("select to_regclass('shop.sale')").fetchone() == (None,)
    assert "c" not in gdq("consumers", "--json", dsn=shop.dsn).stdout.split('"')


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_schema_that_the_role_may_not_use(shop: Database, target: Database, side: str) -> None:
    with target.connect() as owner:
        owner.execute("create schema shop; create table shop.item (id int primary key, name text, price numeric)")
    source, to = (shop.app_dsn, target.dsn) if side == "source" else (shop.dsn, target.app_dsn)
    done = gdq("snapshot", "shop.item", "--to", to, dsn=source)
    assert done.returncode == 1
    where = " of the target" if side == "target" else ""
    assert done.stderr == (
        f'Error: role app may not use schema shop{where}\nHint: Say there: grant usage on schema shop to "app"\n'
    )
