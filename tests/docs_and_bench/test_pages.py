"""What the pages of the documentation show works as it stands there, block after block."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

import gdq
from gdq.installer.install import install
from tests.support.managed import ManagedDatabase
from tests.support.page import ROOT, blocks, run_page
from tests.support.programs import gdq as gdq_program
from tests.support.server import Database
from tests.support.waiting import until

# The second goes on from the first. Each of the others has a test of its own.
FIRST_STEPS = ["README.md", "docs/consumers.md"]
OTHERS = (
    "operations",
    "managed",
    "monitoring",
    "views",
    "slot-or-queue",
    "compare",
    "replicas",
    "lake",
    "switchover",
    "copies",
    "relay",
    "spool",
)
# Run by test_from_replication.py.
MOVES = ("from-londiste", "from-slony")
RUN = [*FIRST_STEPS, *(f"docs/{name}.md" for name in (*OTHERS, *MOVES))]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
PROGRAMS = Path(sys.executable).parent

# What the pages take as given.
_SHOP = """create table orders (id int primary key, customer text, amount numeric(10, 2));
    create table customer (id int primary key, name text);
    select gdq.create_queue('shop'), gdq.add_table('shop', 'orders'), gdq.add_table('shop', 'customer');
    alter table orders replica identity full;
    alter table customer replica identity full;
    insert into orders values (1, 'Ann', 9.90)"""


def _open_shop(database: Database) -> None:
    """Install gdq as the superuser, as README does, with the tables of the pages."""
    install(database.su_dsn)
    with database.connect("su") as su:
        su.execute(_SHOP)


pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="an sdist has no documentation"),
]


def test_pages_run_as_they_stand(empty_db: Database, tmp_path: Path) -> None:
    for page in FIRST_STEPS:
        run_page(page, empty_db, tmp_path, PROGRAMS)
    with empty_db.connect("su") as su:
        assert su.execute("select customer, orders, amount::text from by_customer order by 1").fetchall() == [
            ("Ann", 2, "13.50"),
            ("Bob", 1, "3.00"),
        ]
        assert su.execute("select id, customer from mirror").fetchall() == [(4, "Cid")]
        assert su.execute("select id from live").fetchall() == [(8,)]
        assert su.execute("select customer from sent").fetchall() == [("Eve",)]


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_run_or_says_why_not(page: str) -> None:
    for block in blocks(page):
        if block.test:
            test = (ROOT / block.test).read_text(encoding="utf-8")
            assert Path(page).name in test, f"{block.test} does not read {page}"
        elif not block.language:  # what a program prints
            assert not re.findall(r"(?m)^(?:\$ )?(?:gdq|pip|psql|make|python|spark-submit) .*", block.text)
        else:
            assert block.not_run or page in RUN, f"nothing runs this block of {page}:\n{block.text}"
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not re.findall(r"(?m)^    (?:gdq|pip|psql|select) .*", text), "a block of code is fenced"


@pytest.mark.long
def test_operations(empty_db: Database, tmp_path: Path) -> None:
    """Where the page goes on in a new cluster, the database is dropped from this one."""
    shop = Database(empty_db.server, "shop")
    with empty_db.connect("su") as su:
        su.execute("create database shop")
        try:
            _open_shop(shop)
            with shop.connect("su") as connection:
                connection.execute("select gdq.register_consumer('shop', 'mirror')")
            printed = run_page(
                "docs/operations.md", shop, tmp_path, PROGRAMS,
                edit=lambda text: re.sub(r"(?m)^(pg_dump .*)$", r"\1\ndropdb --force shop", text),
            )  # fmt: skip
            with shop.connect("su") as connection:
                assert connection.execute("table orders").fetchall() == [(1, "Ann", Decimal("9.90"))]
                assert connection.execute("select from pg_namespace where nspname ~ '^gdq'").fetchall() == []
        finally:
            su.execute("drop database if exists shop with (force)")
    outcomes = [re.findall(r"public\.\w+ +(\w+)", text) for text in printed]
    assert outcomes == [["resync"] * 2, ["kept"] * 2, ["resync"] * 2, [], []]


@pytest.mark.long
def test_managed(managed_db: ManagedDatabase, tmp_path: Path) -> None:
    """Run by a role that is no superuser, as its reader is."""
    managed_db.run("create table orders (id int primary key)")
    run_page("docs/managed.md", managed_db, tmp_path, PROGRAMS)
    assert managed_db.run("select format, columns from gdq.table_info('shop')") == [("json", ["id", "note"])]


def test_monitoring(empty_db: Database, tmp_path: Path) -> None:
    _open_shop(empty_db)
    doctor, metrics = run_page("docs/monitoring.md", empty_db, tmp_path, PROGRAMS)
    assert "error" not in doctor
    assert 'gdq_queue_tables{queue="shop"} 2.0' in metrics.splitlines()


def test_views(empty_db: Database, tmp_path: Path) -> None:
    """The examples of rules are left to test_views_doc.py."""
    _open_shop(empty_db)
    query = "select c.name, count(*) from public.orders o join public.customer c on c.name = o.customer group by c.name"
    view = ("create-view", "by_customer", "--queue", "shop", "--sql", "-", "--target", "public.by_customer")
    assert gdq_program(*view, dsn=empty_db.su_dsn, stdin=query).returncode == 0
    try:
        (printed,) = run_page("docs/views.md", empty_db, tmp_path, PROGRAMS)
        assert "by_customer" in printed
    finally:
        gdq_program("drop-slot", "shop", "by_customer", dsn=empty_db.su_dsn)


def test_slot_or_queue(empty_db: Database, tmp_path: Path) -> None:
    _open_shop(empty_db)
    (printed,) = run_page("docs/slot-or-queue.md", empty_db, tmp_path, PROGRAMS)
    assert "gdq_shop_audit" in printed
    with empty_db.connect("su") as su:
        assert su.execute("select from pg_replication_slots where database = current_database()").fetchall() == []


def test_replicas(empty_db: Database, tmp_path: Path) -> None:
    _open_shop(empty_db)
    targets = ("copy", "copy2")
    with empty_db.connect("su") as su:
        for target in targets:
            su.execute(f"drop database if exists {target} with (force)".encode())
        try:
            printed = run_page("docs/replicas.md", empty_db, tmp_path, PROGRAMS)
        finally:
            for target in targets:
                su.execute(f"drop database if exists {target} with (force)".encode())
        assert su.execute("select from pg_replication_slots where database = current_database()").fetchall() == []
    replicated, compared, by_slot = printed[1], printed[-2], printed[-1]
    assert "20 | Zoe" in replicated
    assert "public.orders" in replicated
    assert "public.orders" in compared
    assert "mirror2" in by_slot


def test_lake(empty_db: Database, tmp_path: Path) -> None:
    _open_shop(empty_db)
    printed = run_page("docs/lake.md", empty_db, tmp_path, PROGRAMS)
    assert ("'customer': 'Zoe'" in printed[1], "'customer': 'Ann'" in printed[1]) == (True, False)
    assert "public.customer" in printed[2]
    assert [line.split()[:2] for line in printed[-1].splitlines()] == [["20", "6.00"], ["20", "8.00"]]
    assert [line.split()[1:3] for line in printed[-3].splitlines()][-2:] == [
        ["update_preimage", "20"],
        ["update_postimage", "20"],
    ]


def test_switchover(empty_db: Database, tmp_path: Path) -> None:
    _open_shop(empty_db)
    new = Database(empty_db.server, "new")
    with empty_db.connect("su") as su:
        su.execute("drop database if exists new with (force)")
        try:
            printed = run_page("docs/switchover.md", empty_db, tmp_path, PROGRAMS)
            with new.connect("su") as connection:
                assert connection.execute("select customer from orders").fetchall() == [("Ann",), ("Bob",)]
        finally:
            su.execute("drop database if exists new with (force)")
    assert "/new " in printed[2]


def test_copies(empty_db: Database, tmp_path: Path) -> None:
    _open_shop(empty_db)
    copy = Database(empty_db.server, "copy")
    with empty_db.connect("su") as su:
        try:
            printed = run_page("docs/copies.md", empty_db, tmp_path, PROGRAMS)
            assert "public.customer" in printed[-2]
            with copy.connect("su") as connection:
                assert connection.execute("table orders").fetchall() == [(1, "Ann", Decimal("9.90"))]
        finally:
            su.execute("drop database if exists copy with (force)")


def test_relay(empty_db: Database, tmp_path: Path) -> None:
    """The page's own receiver takes the events, at a port that is free."""
    _open_shop(empty_db)
    (text,) = (block.text for block in blocks("docs/relay.md") if block.file == "hook.py")
    (tmp_path / "own.py").write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = os.environ | {"DATABASE_URL": empty_db.su_dsn}
    with subprocess.Popen([sys.executable, tmp_path / "own.py", port], env=env, stderr=subprocess.DEVNULL) as hook:
        try:
            until(lambda: _listens(int(port)), "the hook")
            printed = run_page("docs/relay.md", empty_db, tmp_path, PROGRAMS, edit=lambda t: t.replace("8080", port))
        finally:
            hook.kill()
    _, changes, copied, messages = printed
    assert re.findall(r"/orders +\| (\w+) +\| ([\d.]+)", changes) == [("insert", "1.00"), ("update", "2.00")]
    rows = re.findall(r"(?m)^ (truncate|read) +\| *(\d*)$", copied)
    assert sorted(rows) == [("read", "1"), ("read", "21"), ("truncate", ""), ("truncate", "")]
    assert re.findall(r"order.paid +\| order-21 +\| (.*)", messages) == ['{"order": 21}']


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_spool(empty_db: Database, tmp_path: Path) -> None:
    _open_shop(empty_db)
    printed = run_page("docs/spool.md", empty_db, tmp_path, PROGRAMS)
    assert "public.orders 2" in printed[1]
    rows, position = printed[2].splitlines()
    assert (rows, position.split("/")[0]) == ("[(20, Decimal('6.00'))]", "queue")
    assert "new_amount" in printed[3]


@pytest.mark.long
def test_compare(empty_db: Database, tmp_path: Path) -> None:
    """The page's commands, for seconds in place of minutes."""

    def edit(text: str) -> str:
        shorter = text.replace("-s 10", "-s 1").replace("-T 120", "-T 20").replace("--seconds 60 ", "--seconds 8 ")
        return shorter.replace("--seconds 120", "--seconds 4")

    _open_shop(empty_db)
    bank = Database(empty_db.server, "bank")
    with empty_db.connect("su") as su:
        su.execute("create database bank")
        try:
            install(bank.su_dsn)
            printed = run_page("docs/compare.md", empty_db, tmp_path, PROGRAMS, edit=edit)
            assert "public.pgbench_accounts update" in printed[-1]
            assert (tmp_path / "bank.html").exists()
        finally:
            su.execute("drop database bank with (force)")


class _Killed(BaseException):
    """Ends a program between two statements."""


def test_a_position_kept_elsewhere_is_exact(db: Database, empty_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe writes each change once, also if it is killed after the target's COMMIT or before it."""
    (text,) = (block.text for block in blocks("docs/consumers.md") if block.file == "elsewhere.py")
    recipe = ModuleType("elsewhere")
    exec(compile(text, "elsewhere.py", "exec"), vars(recipe))
    with db.connect() as source, empty_db.connect() as target:
        source.execute("create table orders (id int primary key); select gdq.create_queue('shop')")
        source.execute("select gdq.add_table('shop', 'orders')")
        source.execute("select gdq.register_consumer('shop', 'elsewhere')")
        target.execute("create table orders (id int primary key); create table position (position text)")
        target.execute("insert into position values (null)")
        commit = gdq.Batch.commit
        for number, killed in enumerate(("never", "before", "never", "after", "never")):
            source.execute("insert into orders values (%s)", [number])

            def end(batch: gdq.Batch, when: str = killed) -> None:
                if when == "after":
                    raise _Killed
                commit(batch)

            monkeypatch.setattr(gdq.Batch, "commit", end)
            if killed == "before":
                _fail_once(target)
            try:
                recipe.copy(db.dsn, target)
            except (_Killed, psycopg.errors.RaiseException):
                target.execute("drop trigger if exists t on position")
        assert target.execute("select array_agg(id order by id) from orders").fetchone() == ([0, 1, 2, 3, 4],)


def _fail_once(target: psycopg.Connection[tuple[object, ...]]) -> None:
    """Let the next change of the position fail, so that the target's transaction is rolled back."""
    target.execute(
        """create or replace function stop() returns trigger language plpgsql as $$ begin raise 'stop'; end $$;
           create trigger t before update on position for each row execute function stop()"""
    )
