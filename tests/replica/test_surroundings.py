"""A replica in databases that are set up in another way: settings, encodings, rights; and what happens between runs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from gdq.consumers.replica.batch_reading import BatchReading, LogRows
from gdq.consumers.replica.replica import Replica
from tests.replica.conftest import Pair
from tests.support.programs import gdq
from tests.support.server import Database, drop_ended

pytestmark = pytest.mark.server

KINDS = """
create table kinds (id int primary key, a text, f float8, t timestamptz, i interval, b bytea, m money,
                    d date, x text[])"""
VALUES = r"""
E'a\\b', 0.1::float8 * 3, '2026-03-29 01:30+00', '1 mon -2 days 03:04:05', decode('00ff', 'hex'), '1.5', '2026-12-31',
'{NULL}'"""

GRANT = 'grant select, insert, update, delete, truncate on public.item to "app"'

# Of a database, and as such of each session in it that does not say otherwise.
SETTINGS = {
    "array_nulls": "off",
    "bytea_output": "escape",
    "datestyle": "SQL, DMY",
    "default_transaction_deferrable": "on",
    "default_transaction_isolation": "serializable",
    "extra_float_digits": "-5",
    "idle_in_transaction_session_timeout": "3s",
    "intervalstyle": "sql_standard",
    "lock_timeout": "3s",
    "quote_all_identifiers": "on",
    "session_replication_role": "local",
    "standard_conforming_strings": "off",
    "statement_timeout": "3s",
    "timezone": "Asia/Kolkata",
    "transform_null_equals": "on",
    "plan_cache_mode": "force_generic_plan",
    "search_path": "evil, pg_catalog",
}
EVIL = """
create schema evil; grant usage on schema evil to public;
create function evil.eq(int, int) returns boolean language sql as 'select false';
create operator evil.= (function = evil.eq, leftarg = int, rightarg = int);
create function evil.count(anyelement) returns int language sql as 'select 1 / 0';
create table evil.kinds (id int); create table evil.pg_class (oid oid)"""


def test_settings_of_both_databases(pair: Pair) -> None:
    pair.make(KINDS)
    pair.capture("kinds")
    pair.run(f"insert into kinds values (1, {VALUES})")
    for place in (pair.source, pair.target):
        with place.connect("su") as su:
            su.execute(EVIL.encode())
            for name, value in SETTINGS.items():
                listed = value if name == "search_path" else f"'{value}'"
                su.execute(f"alter database {place.name} set {name} = {listed}".encode())
    pair.apply()
    pair.run(
        f"set standard_conforming_strings = on; insert into public.kinds values (2, {VALUES})",
        "update public.kinds set f = f * 3 where id = 1",
        "begin isolation level read committed; alter table public.kinds add n numeric; commit",
        "update public.kinds set n = 1.50 where id = 2",
    )
    pair.apply()
    pair.same("public.kinds")
    compared = gdq("compare-tables", "shop", "mirror", "--to", pair.target.su_dsn, dsn=pair.source.dsn)
    assert compared.returncode == 0, compared.stdout


@pytest.fixture
def latin(empty_db: Database) -> Iterator[Database]:
    """An empty database in LATIN1."""
    name = f"latin_{secrets.token_hex(4)}"
    with empty_db.connect("su") as su:
        su.execute(f"create database {name} owner gdq_owner template template0 encoding 'LATIN1' locale 'C'".encode())
    yield Database(empty_db.server, name)
    drop_ended(empty_db.server)
    with empty_db.connect("su") as su:
        su.execute(f"drop database {name} with (force)".encode())


def test_encodings(db: Database, latin: Database) -> None:
    """005_encoding: a text that the target cannot hold stops the replica, and nothing of the batch is applied."""
    pair = Pair(db, latin)
    pair.run("select gdq.create_queue('shop')")
    pair.make("create table word (id text primary key, note varchar(20))")
    pair.capture("word")
    pair.run("insert into word values ('naïve', 'é'), ('Ærø', '£')")
    pair.apply()
    pair.same("word")
    pair.run("update word set id = 'Ål', note = 'ÿ' where id = 'Ærø'", "insert into word values ('ok', 'x')")
    pair.apply()
    pair.same("word")
    pair.run("insert into word values ('k', '€')", "delete from word where id = 'ok'")
    failed = pair.replicate()
    assert failed.returncode == 1
    assert 'character with byte sequence 0xe2 0x82 0xac in encoding "UTF8" has no equivalent' in failed.stderr
    assert len(pair.rows(latin, "word")) == 3
    pair.run("update word set note = 'E' where id = 'k'")
    pair.apply()
    pair.same("word")


def test_roles_with_the_documented_rights(pair: Pair) -> None:
    """027_nosuperuser, 033_run_as_table_owner: neither role is a superuser, nor owns the tables."""
    pair.make("create table item (id int primary key, n int)")
    with pair.source.connect("su") as su:
        su.execute("alter table item owner to postgres; grant select, trigger on item to gdq_owner")
    with pair.target.connect("su") as su:
        su.execute(f"grant create on database {pair.target.name} to app".encode())
        su.execute("alter table item owner to postgres; alter table item enable row level security")
        su.execute("create policy p on item using (n < 100)")
    pair.capture("item")
    with pair.source.connect("su") as su:
        su.execute("insert into item values (1, 1), (2, 200)")
    arguments = ("replicate", "shop", "mirror", "--to", pair.target.app_dsn)
    for refusal, mended in (
        ('row-level security policy for table "item"', "alter table item disable row level security"),
        ("permission denied for table item", "grant select, insert, update, delete, truncate on item to app"),
    ):
        refused = gdq(*arguments, dsn=pair.source.dsn)
        assert refused.returncode == 1
        assert refusal in refused.stderr
        assert f"Hint: Say in the target: {GRANT}" in refused.stderr
        with pair.target.connect("su") as su:
            su.execute(mended.encode())
    assert gdq(*arguments, dsn=pair.source.dsn).returncode == 0
    with pair.source.connect("su") as su:
        su.execute("insert into item values (4, 4); delete from item where id = 1")
    database = f"temporary on database {pair.target.name}"
    for lacking, whose in (
        ("delete on public.item", "app"),
        (database, "app, public"),
        ("usage on schema gdq_target", "app"),
    ):
        with pair.target.connect("su") as su:
            su.execute("alter schema gdq_target owner to postgres; grant usage on schema gdq_target to app")
            su.execute("grant select, insert, update, delete on all tables in schema gdq_target to app")
            su.execute(f"revoke {lacking} from {whose}".encode())
        refused = gdq(*arguments, dsn=pair.source.dsn)
        assert refused.stderr.startswith("Error: permission denied ")
        assert refused.stderr.endswith(f'\nHint: Say in the target: grant {lacking} to "app"\n')
        with pair.target.connect("su") as su:
            su.execute(f"grant {lacking} to app".encode())
    with pair.source.connect("su") as su:
        su.execute("update item set n = n + 1; delete from item where id = 2; insert into item values (3, 3)")
        su.execute("alter table item owner to gdq_owner")
    with pair.target.connect("su") as su:
        su.execute("alter table item owner to gdq_owner")
    done = gdq(*arguments, dsn=pair.source.dsn)
    assert done.returncode == 0, done.stderr
    pair.same("item")


@pytest.mark.parametrize("ddl", ["select 1", "alter table item add n int", "alter table item rename to thing"])
def test_a_log_that_is_dropped_while_it_is_read(pair: Pair, ddl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a copy the consumer holds no older log: one that a batch has listed may be gone when it is read.

    What was noted of the batch's tables before is rolled back with it.
    """
    for name in ("item", "other"):
        pair.make(f"create table {name} (id int primary key)")
    pair.capture("item", "other")
    pair.apply()
    now = "thing" if "rename" in ddl else "item"
    pair.run(ddl, f"insert into {now} values (1)", "insert into other values (1)")
    read: list[str] = []

    def net_sql(reading: BatchReading, rows: LogRows, *found: Any, **how: Any) -> str:
        read.append(rows.table.name)
        gone = rows.table.name == "public.other" and read.count("public.other") == 1
        return "select * from gdq_log.t1_v1_s9" if gone else as_ever(reading, rows, *found, **how)

    as_ever = BatchReading.net_sql
    with monkeypatch.context() as patched:
        patched.setattr(BatchReading, "net_sql", net_sql)
        with Replica(pair.source.dsn, pair.target.su_dsn, "shop", "mirror") as replica:
            assert [batch.inserted for batch in replica.run()] == [2]
            assert read.count("public.other") > 1
    pair.same(now, "other")


def test_prepared_transactions(pair: Pair) -> None:
    """021_twophase: a prepared transaction comes when it is committed, whatever was applied before."""
    pair.make("create table item (id int primary key)")
    pair.capture("item")
    with pair.source.connect() as one:
        for name in ("kept", "dropped"):
            one.execute(
                f"begin; insert into item values ({len(name)}); prepare transaction '{pair.source.name} {name}'"
            )
    pair.run("insert into item values (1)")
    pair.apply()
    assert pair.rows(pair.target, "item") == [("(1)",)]
    pair.run(
        f"commit prepared '{pair.source.name} kept'",
        f"rollback prepared '{pair.source.name} dropped'",
        "insert into item values (2)",
    )
    pair.apply()
    pair.same("item")
    assert len(pair.rows(pair.target, "item")) == 3


@pytest.mark.parametrize(
    "between",
    [
        ("update item set n = 5 where id = 1", "delete from item where id = 2"),
        ("drop table item", "create table item (id int primary key, n int)", "insert into item values (7, 1)"),
    ],
)
def test_a_table_that_leaves_the_queue_and_comes_back(pair: Pair, between: tuple[str, ...]) -> None:
    """Londiste: what happened to it meanwhile was not captured, so it is copied again."""
    pair.make("create table item (id int primary key, n int)")
    pair.capture("item")
    pair.run("insert into item values (1, 1), (2, 2)")
    pair.apply()
    pair.run(
        "update item set n = 3 where id = 1",
        "select gdq.remove_table('shop', 'item', true)",
        *between,
        "select gdq.add_table('shop', 'item')",
        "insert into item values (9)",
    )
    pair.apply()
    pair.same("item")


@pytest.mark.parametrize("whole", [True, False])
def test_unlogged_tables_of_the_target(fed: Pair, whole: bool) -> None:
    """A crash would empty them behind the replica's back."""
    fed.run("create table item (id int primary key)")
    if whole:
        fed.there("create unlogged table item (id int primary key)")
    else:
        fed.there(
            "create table item (id int primary key) partition by range (id)",
            "create unlogged table item_1 partition of item default",
        )
    fed.capture("item")
    fed.run("insert into item values (1)")
    refused = fed.replicate()
    assert refused.returncode == 1
    assert "is unlogged" in refused.stderr.splitlines()[0]
    assert fed.rows(fed.target, "item") == []
    fed.there(f"alter table {'item' if whole else 'item_1'} set logged")
    fed.apply()
    fed.same("item")
    fed.there(f"alter table {'item' if whole else 'item_1'} set unlogged")
    fed.run("insert into item values (2)")
    refused = fed.replicate()
    assert refused.returncode == 1
    assert "is unlogged" in refused.stderr.splitlines()[0]
