"""The roles gdq_admin, gdq_consumer and gdq_reader, and whose consumer is whose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from gdq.consumer import Consumer, consumer_info
from gdq.embedded.server import EmbeddedServer
from gdq.installer import install
from tests.support.events import Tap
from tests.support.server import PASSWORD, Database, drop_ended
from tests.support.waiting import SECONDS

ROLES = {"boss": "gdq_admin", "mirror": "gdq_consumer", "rival": "gdq_consumer", "watcher": "gdq_reader"}

# What the owner of gdq alone may call would let an administrator write capture functions, or skip checks.
PRIVATE = {"replace_capture", "arm", "own_capture", "note_resync", "disarm", "grant_roles"}


@pytest.fixture(scope="module", autouse=True)
def people(server: EmbeddedServer, template: str) -> Iterator[None]:
    """Somebody with a login for each role."""
    with psycopg.connect(server.conninfo(), autocommit=True) as su:
        for name, role in ROLES.items():
            su.execute(
                sql.SQL("create role {} login password {} in role {}").format(
                    sql.Identifier(name), sql.Literal(PASSWORD), sql.Identifier(role)
                )
            )
        yield
        drop_ended(server)
        for name in ROLES:
            su.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@contextmanager
def session(db: Database, name: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(db.server.conninfo(name, db.name, PASSWORD), autocommit=True) as connection:
        yield connection


def refused(connection: psycopg.Connection[Any], query: str, *values: Any, match: str) -> None:
    with pytest.raises(errors.InsufficientPrivilege, match=match):
        connection.execute(query.encode(), values)


@pytest.fixture
def shop(tap: Tap) -> Tap:
    """A captured table `t` that the role `mirror` may read, and its consumer `m`."""
    tap.write("create table t (id int primary key, v text)", "grant usage on schema shop to mirror")
    tap.write("grant select on t to mirror")
    tap.add("shop.t")
    with session(tap.db, "mirror") as mirror:
        mirror.execute("select gdq.register_consumer('q', 'm')")
    return tap


def test_rights_are_the_listed_ones(db: Database) -> None:
    with db.connect() as owner:
        for role in ("gdq_admin", "gdq_consumer", "gdq_reader"):
            allowed = owner.execute(
                "select p.oid::regprocedure::text from pg_proc p where p.pronamespace in ('gdq'::regnamespace,"
                " 'gdq_log'::regnamespace) and p.prorettype <> 'trigger'::regtype"
                " and has_function_privilege(%s, p.oid, 'execute')",
                [role],
            ).fetchall()
            listed = owner.execute("select gdq.granted(%s)::text", [role]).fetchall()
            assert sorted(allowed) == sorted(listed)
            assert listed
            assert not {row[0].partition("(")[0].removeprefix("gdq.") for row in listed} & PRIVATE
            tables = owner.execute(
                "select c.oid::regclass::text from pg_class c where c.relnamespace in ('gdq'::regnamespace,"
                " 'gdq_log'::regnamespace) and c.relkind in ('r', 'v', 'S') and"
                " has_table_privilege(%s, c.oid, 'select, insert, update, delete, truncate, trigger')",
                [role],
            ).fetchall()
            # a refresh locks gdq.pin, which needs SELECT; the table is empty
            assert tables == ([("gdq.pin",)] if role == "gdq_admin" else [])


def test_every_listed_function_exists(db: Database) -> None:
    """A function that was renamed must not fall out of the list unseen."""
    body = Path("sql/base/grant_roles.sql").read_text()
    listed = body[body.index("function gdq.granted") : body.index("g(roles, names)")]
    names = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"'\{?([a-z_,\s]+)\}?'", listed)))) - set(ROLES.values())
    assert len(names) > 30
    with db.connect() as owner:
        known = owner.execute("select proname from pg_proc where pronamespace = 'gdq'::regnamespace").fetchall()
    assert names - {row[0] for row in known} == set()


def test_an_administrator_may_call_what_the_library_calls(db: Database) -> None:
    texts = [path.read_text() for folder in ("gdq", "consumers") for path in Path(folder).rglob("*.py")]
    called = set(re.findall(r"gdq\.(\w+)\(%s|select (?:\* from )?gdq\.(\w+)\(", "\n".join(texts)))
    names = {name for pair in called for name in pair if name} - {"create_event_triggers", "grant_roles"}
    with db.connect() as owner:
        granted = owner.execute("select split_part(gdq.granted('gdq_admin')::text, '(', 1)").fetchall()
    assert len(names) > 10
    assert names - {row[0].removeprefix("gdq.").strip('"') for row in granted} == set()


def test_a_consumer_reads_under_its_own_role(shop: Tap) -> None:
    shop.write("insert into t values (1, 'a')")
    dsn = shop.db.server.conninfo("mirror", shop.db.name, PASSWORD)
    with Consumer(dsn, "q", "m") as consumer:
        assert [e.new for batch in consumer.batches(once=True) for e in batch.events()] == [{"id": 1, "v": "a"}]
        # its loop takes ticks and maintains the logs too
        shop.write("update t set v = 'b'")
        for batch in consumer.batches(timeout=SECONDS):
            batch.commit()
            break
        (info,) = (info for info in consumer_info(consumer.connection, "q") if info.consumer_name == "m")
        assert (info.unread_events, info.owner_role) == (0, "mirror")


def test_a_consumer_reads_batches_with_their_events(shop: Tap) -> None:
    """Again by cursors: the same. What is left out of one batch's events is not left out of the next one's."""
    shop.owner.execute("select gdq.create_readers()")
    for key in range(1, 5):
        shop.write(f"insert into t values ({key}, 'a')", f"update t set v = 'b' where id = {key}")
        shop.owner.execute("select gdq.force_tick('q')")
    read: list[Any] = []
    with Consumer(shop.db.server.conninfo("mirror", shop.db.name, PASSWORD), "q", "m", max_events=1) as consumer:
        for batch in consumer.batches(once=True):
            events = list(batch.events())
            assert events == list(batch.events())
            read += [(event.op, event.new) for event in events]
            if len(read) == 4:
                assert [event.old for event in batch.events(images="new", columns=["id"])] == [None, None]
    assert read == [(op, {"id": key, "v": v}) for key in (1, 2, 3, 4) for op, v in (("insert", "a"), ("update", "b"))]


def test_another_role_gets_nothing(shop: Tap) -> None:
    shop.write("insert into t values (1, 'a')", "grant usage on schema shop to rival", "grant select on t to rival")
    foreign = 'consumer "m" of queue "q" belongs to role mirror'
    with session(shop.db, "mirror") as mirror, session(shop.db, "rival") as rival:
        mirror.execute("select gdq.force_tick('q')")
        refused(rival, "select * from gdq.next_batch('q', 'm')", match=foreign)
        refused(rival, "select * from gdq.next_events('q', 'm')", match=foreign)
        refused(rival, "select gdq.unregister_consumer('q', 'm')", match=foreign)
        batch = mirror.execute("select batch_id, token from gdq.next_batch('q', 'm')").fetchone()
        assert batch
        # not even with the token, from a log or a screen
        refused(rival, "select * from gdq.get_batch(%s, %s)", *batch, match=foreign)
        refused(rival, "select * from gdq.batch_tables(%s, %s)", *batch, match=foreign)
        refused(rival, "select gdq.finish_batch(%s, %s)", *batch, match=foreign)
        refused(rival, "select gdq.set_consumer_role('q', 'm', 'rival')", match="permission denied for function")
        refused(rival, "select * from gdq.dead_letters('q', 'm')", match=foreign)
        refused(rival, "select gdq.register_member('q', 'm', 'x')", match=foreign)
        refused(rival, "select gdq.set_retry_limit('q', 'm', 1)", match=foreign)
        refused(rival, "select gdq.retry_event(%s, %s, 1)", *batch, match=foreign)
        assert rival.execute("select * from gdq.retry_info('q')").fetchall() == []
        assert rival.execute("select * from gdq.dead_letters('q')").fetchall() == []
        # registering it again changes nothing
        assert rival.execute("select gdq.register_consumer('q', 'm')").fetchone() == (False,)
        refused(rival, "select * from gdq.next_batch('q', 'm')", match=foreign)
        assert mirror.execute("select gdq.finish_batch(%s, %s)", batch).fetchone() == (True,)


@pytest.mark.parametrize("who", ["boss", "gdq_owner", "postgres"])
def test_administrators_may_use_every_consumer(shop: Tap, who: str) -> None:
    shop.write("insert into t values (1, 'a')", "grant usage on schema shop to boss")
    with shop.db.connect("su") as su:
        if who != "postgres":
            su.execute(f"set session authorization {who}".encode())
        su.execute("select gdq.force_tick('q')")
        found = su.execute("select batch_id, token from gdq.next_batch('q', 'm')").fetchone()
        assert found
        assert su.execute("select count(*) from gdq.get_batch(%s, %s)", found).fetchone() == (1,)
        # typed rows are read from the logs, which administrators may
        rows = su.execute("select gdq.batch_sql(%s, %s, 'shop.t')", found).fetchone()
        assert rows
        assert su.execute(rows[0].encode()).rowcount == 1
        su.execute("select gdq.finish_batch(%s, %s)", found)
        assert su.execute("select gdq.unregister_consumer('q', 'm')").fetchone() == (True,)


def test_members_of_the_owning_role_share_a_consumer(shop: Tap) -> None:
    shop.write("insert into t values (1, 'a')")
    with shop.db.connect("su") as su, session(shop.db, "rival") as rival:
        su.execute("grant mirror to rival")
        try:
            rival.execute("select gdq.force_tick('q')")
            assert rival.execute("select * from gdq.next_batch('q', 'm')").rowcount == 1
            # SET ROLE takes rights away: this is no member of mirror any more
            rival.execute("set role gdq_consumer")
            refused(rival, "select * from gdq.next_batch('q', 'm')", match="belongs to role mirror")
        finally:
            su.execute("revoke mirror from rival")


def test_set_role_registers_for_that_role(shop: Tap) -> None:
    with shop.db.connect("su") as su, session(shop.db, "mirror") as mirror:
        su.execute("set role mirror")
        su.execute("select gdq.register_consumer('q', 'm2')")
        assert mirror.execute("select gdq.unregister_consumer('q', 'm2')").fetchone() == (True,)


@pytest.mark.parametrize(
    ("rights", "allowed"),
    [
        ([], False),
        (["grant select on t to rival"], False),
        (["grant usage on schema shop to rival"], False),
        (["grant usage on schema shop to rival", "grant select on t to rival"], True),
        (["grant usage on schema shop to rival", "grant select (id, v) on t to rival"], True),
        (["grant usage on schema shop to rival", "grant select (id) on t to rival"], False),
        (
            [
                "grant usage on schema shop to rival",
                "grant select on t to rival",
                "alter table t enable row level security",
            ],
            False,
        ),
    ],
)
def test_registering_takes_the_right_to_read(shop: Tap, rights: list[str], allowed: bool) -> None:
    shop.write(*rights)
    for query in (
        "select gdq.register_consumer('q', 'r')",
        "select gdq.register_consumer('q', 'r2', tables => '{shop.t}')",
    ):
        with session(shop.db, "rival") as rival:
            if allowed:
                assert rival.execute(query.encode()).fetchone() == (True,)
            elif "tables" in query and "usage" not in "".join(rights):
                refused(rival, query, match="permission denied for schema shop")
            else:
                refused(rival, query, match=r"role rival may not read table shop\.t, which its consumer takes")


def test_a_right_that_is_revoked_stops_the_consumer_and_loses_nothing(shop: Tap) -> None:
    shop.write("create table hidden (id int primary key)", "insert into t values (1, 'a')")
    with session(shop.db, "mirror") as mirror:
        mirror.execute("select gdq.force_tick('q')")
        shop.write("revoke select on t from mirror")
        refused(mirror, "select * from gdq.next_batch('q', 'm')", match=r"may not read table shop\.t")
        shop.write("grant select on t to mirror")
        # a table that comes to the queue later is one more to be read
        shop.add("shop.hidden")
        refused(mirror, "select * from gdq.next_batch('q', 'm')", match=r"may not read table shop\.hidden")
        shop.write("insert into hidden values (2)", "grant select on hidden to mirror")
        mirror.execute("select gdq.force_tick('q')")
        found = mirror.execute("select batch_id, token from gdq.next_batch('q', 'm')").fetchone()
        seen = mirror.execute("select tbl from gdq.get_batch(%s, %s)", found).fetchall()
        assert seen == [("shop.t",), ("shop.hidden",)]


def test_a_consumer_is_given_to_another_role(shop: Tap) -> None:
    with session(shop.db, "boss") as boss, session(shop.db, "rival") as rival:
        give = "select gdq.set_consumer_role('q', 'm', 'rival')"
        refused(boss, give, match=r"role rival may not read table shop\.t")
        shop.write("grant usage on schema shop to rival", "grant select on t to rival")
        boss.execute(give.encode())
        rival.execute("select * from gdq.next_batch('q', 'm')")
        with session(shop.db, "mirror") as mirror:
            refused(mirror, "select * from gdq.next_batch('q', 'm')", match="belongs to role rival")
        with pytest.raises(errors.UndefinedObject, match='role "nobody" does not exist'):
            boss.execute("select gdq.set_consumer_role('q', 'm', 'nobody')")


def test_the_consumer_of_a_dropped_role_is_for_administrators(shop: Tap) -> None:
    with shop.db.connect("su") as su, session(shop.db, "rival") as rival, session(shop.db, "boss") as boss:
        su.execute("create role passing in role gdq_consumer")
        su.execute("grant usage on schema shop to passing; grant select on shop.t to passing; set role passing")
        su.execute("select gdq.register_consumer('q', 'p'); reset role; drop owned by passing; drop role passing")
        refused(rival, "select * from gdq.next_batch('q', 'p')", match="belongs to role passing")
        refused(boss, "select * from gdq.next_batch('q', 'p')", match="role passing does not exist any more")
        boss.execute("select gdq.set_consumer_role('q', 'p', 'mirror')")
        with session(shop.db, "mirror") as mirror:
            mirror.execute("select * from gdq.next_batch('q', 'p')")


def test_readers_see_no_data(shop: Tap) -> None:
    with session(shop.db, "watcher") as watcher:
        assert watcher.execute("select queue_name from gdq.queue_info()").fetchall() == [("q",)]
        assert watcher.execute("select table_name from gdq.table_info('q')").fetchall() == [("shop.t",)]
        assert watcher.execute("select consumer_name from gdq.consumer_info('q') order by 1").fetchall() == [
            ("c",),
            ("m",),
        ]
        for query in ("select * from gdq.next_batch('q', 'm')", "select gdq.force_tick('q')", "select gdq.maintain()"):
            refused(watcher, query, match="permission denied for function")
        refused(watcher, "select * from gdq.subscription", match="permission denied for table")


def test_an_administrator_cannot_become_the_owner(shop: Tap) -> None:
    with session(shop.db, "boss") as boss:
        boss.execute("select gdq.create_queue('mine')")
        for query in (
            "select gdq.replace_capture(1, 1, 'i', 'begin end')",
            "create function gdq.mine() returns int language sql as 'select 1'",
            "create table gdq_log.mine (a int)",
            "update gdq.subscription set owner_role = 'boss'",
            "alter function gdq.maintain() owner to boss",
        ):
            refused(boss, query, match=r"permission denied|must be owner")


def test_install_without_the_right_to_make_roles_says_so(server: EmbeddedServer, empty_db: Database) -> None:
    names = ("gdq_admin", "gdq_consumer", "gdq_reader")
    with empty_db.connect("su") as su:
        su.execute(sql.SQL("grant create on database {} to app").format(sql.Identifier(empty_db.name)))
        for name in names:
            su.execute(f"alter role {name} rename to {name}_away".encode())
        try:
            notices = "\n".join(install.install(empty_db.app_dsn).notices)
            for name in names:
                assert f"NOTICE: role {name} was not made: app may not create roles" in notices
        finally:
            for name in names:
                su.execute(f"alter role {name}_away rename to {name}".encode())
    with empty_db.connect("app") as app:
        app.execute("select gdq.grant_roles()")
        row = app.execute("select has_function_privilege('gdq_reader', 'gdq.queue_info(text)', 'execute')").fetchone()
        assert row == (True,)


def test_uninstall_keeps_a_role_that_somebody_has(shop: Tap) -> None:
    with shop.db.connect() as owner, owner.transaction():
        install.uninstall(owner)
    with shop.db.connect("su") as su:
        rows = su.execute("select rolname from pg_roles where rolname = any (%s)", [list(ROLES.values())]).fetchall()
    assert {row[0] for row in rows} == set(ROLES.values())
