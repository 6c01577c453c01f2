"""A queue that was restored from a dump stops, and a rebase starts it anew with nothing lost silently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gdq.embedded.server import EmbeddedServer
from gdq.era import Rebased, check_position, position, rebase
from gdq.errors import DivergedPosition, EraEnded, TruncatedPosition
from gdq.monitor.doctor import doctor
from tests.support.chosen import always_alike, capture_of, chosen
from tests.support.events import Event, Tap, drain
from tests.support.programs import gdq
from tests.support.restore import Cluster, advance, dump, restore
from tests.support.server import Database, chosen_binaries


@pytest.fixture(scope="module")
def cluster(pytestconfig: pytest.Config, server: EmbeddedServer, template: str) -> Iterator[Cluster]:
    with EmbeddedServer(binaries=chosen_binaries(pytestconfig.getoption("--pg"))) as started:
        other = Cluster(started)
        other.copy_roles(Database(server, template))
        yield other


def events(db: Database, consumer: str = "c") -> list[Event]:
    return [Event(*row[3:]) for row in drain(db, "q", consumer)]


def inserted(seen: list[Event]) -> list[Any]:
    return [event.new["id"] for event in seen if event.op == "insert" and event.new]


def xid(db: Database) -> int:
    with db.connect("su") as su:
        return int(su.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()[0])  # type: ignore[index]


def pending(db: Database, consumer: str) -> list[Event]:
    """What a consumer has not read yet, without reading it."""
    with db.connect(autocommit=False) as owner:
        found = owner.execute("select batch_id, token from gdq.next_batch('q', %s, 1000000)", [consumer]).fetchone()
        assert found
        seen = owner.execute("select op, tbl, key, old, new from gdq.get_batch(%s, %s)", found).fetchall()
        owner.rollback()
    return [Event(*row) for row in seen]


def moved(tap: Tap, cluster: Cluster, *options: str, ahead: bool = False) -> Database:
    """The tap's database, dumped and restored in the other cluster, whose numbers are lower, or (`ahead`) higher."""
    db = cluster.create_database(tap.db.name)
    here, there = (xid(database) for database in (tap.db, db))
    advance(db if ahead else tap.db, max(0, 2000 + (here - there if ahead else there - here)))
    cluster.copy_roles(tap.db)
    restore(db, dump(tap.db, *options))
    with db.connect("su") as su:
        su.execute(f"alter role app in database {db.name} set search_path = shop, public".encode())
    return db


def filled(tap: Tap) -> None:
    """A table with a read and an unread change, and a column that is gone."""
    tap.write("create table t (gone int, id int primary key, note text)", "alter table t drop gone")
    tap.add("shop.t")
    tap.write("insert into t values (1, 'read')")
    tap.batch()
    tap.write("insert into t values (2, 'unread')")


def test_restored_queue_stops_until_rebased(tap: Tap, cluster: Cluster) -> None:
    tap.owner.execute("select gdq.insert_event('q', 'm', 'read')")
    filled(tap)
    tap.owner.execute("select gdq.insert_event('q', 'm', 'unread')")
    outside = position(tap.owner, "q", "c")
    db = moved(tap, cluster)
    with db.connect() as owner, db.connect("app") as app:
        app.execute("insert into t values (3, 'after the restore')")
        owner.execute("select gdq.insert_event('q', 'm', 'after the restore')")
        for call in (
            "gdq.force_tick('q')",
            "gdq.ticker()",
            "gdq.ticker('q')",
            "gdq.maintain()",
            "gdq.next_batch('q', 'c')",
            "gdq.register_consumer('q', 'd')",
            "gdq.begin_refresh('q', 'c')",
            "gdq.drop_queue('q', true)",
            "gdq.remove_table('q', 'shop.t')",
            "gdq.suspend_table('shop.t')",
        ):
            with pytest.raises(psycopg.Error, match='queue "q" was restored from a dump') as error:
                owner.execute(f"select {call}".encode())
            assert error.value.sqlstate == "GDQ07", call
        assert [(finding.code, finding.cure) for finding in doctor(owner, "q")] == [("restored", "gdq rebase")]
        done = gdq("ticker", dsn=db.dsn)
        assert done.returncode == 1
        assert done.stderr.startswith('Error: queue "q" was restored from a dump')
        done = gdq("rebase", dsn=db.dsn)
        assert done.stdout.splitlines()[1].split() == ["q", "c", "shop.t", "resync"], done.stderr
        with pytest.raises(EraEnded, match='an era of queue "q" that ended at'):
            check_position(owner, "q", outside)
        app.execute("insert into t values (4, 'after the rebase')")
        seen = events(db)
        assert [event.op for event in seen] == ["message", "message", "resync", "insert"]
        assert [(event.new or {})["data"] for event in seen[:2]] == ["unread", "after the restore"]
        assert (seen[2].new or {})["reason"] == "the database was restored from a dump"
        assert (seen[2].tbl, seen[3].tbl) == ("shop.t", "shop.t")
        assert seen[3].new == {"id": 4, "note": "after the rebase"}
        assert owner.execute("select state from gdq.table_info('q')").fetchone() == ("ok",)
        assert rebase(owner) == []
        app.execute("alter table t add more int; update t set more = 5 where id = 4; truncate t")
        assert [event.op for event in events(db)] == ["ddl", "update", "truncate"]


def test_writers_and_ddl_between_restore_and_rebase(tap: Tap, cluster: Cluster) -> None:
    """The restored functions would name a column that is gone: the guard finds them by their triggers."""
    filled(tap)
    db = moved(tap, cluster)
    with db.connect() as owner, db.connect("app") as app:
        app.execute("alter table t rename note to remark")
        app.execute("insert into t values (3, 'x')")
        app.execute("truncate t")
        assert rebase(owner) == [Rebased("q", "c", "shop.t", "resync")]
        app.execute("insert into t values (4, 'x')")
        assert {event.op for event in events(db)} >= {"resync", "insert"}


def test_marks_that_stay(tap: Tap) -> None:
    """What keeps transaction numbers keeps the era."""
    filled(tap)
    copy = f"{tap.db.name}_copy"
    with tap.db.connect("su") as su:
        before = su.execute("select era from gdq.era").fetchone()
        for command in ("vacuum (freeze) gdq.era", "vacuum (full, freeze) gdq.era", "cluster gdq.era using era_pkey"):
            su.execute(command.encode())
            assert su.execute("select (gdq.era_of(queue_id)).era from gdq.queue").fetchone() == before, command
    tap.owner.close()
    tap.app.close()
    with psycopg.connect(tap.db.server.conninfo(), autocommit=True) as su:
        su.execute(f"create database {copy} template {tap.db.name}".encode())
        try:
            assert inserted(events(Database(tap.db.server, copy))) == [2]
        finally:
            su.execute(f"drop database {copy} with (force)".encode())


@pytest.mark.long
@pytest.mark.parametrize("sooner", [False, True])
def test_positions_that_are_kept(tap: Tap, cluster: Cluster, sooner: bool) -> None:
    """Three consumers at different places go on exactly, whether the numbers of the new cluster are lower or higher."""
    for consumer in ("d", "e"):
        tap.owner.execute("select gdq.register_consumer('q', %s)", [consumer])
    tap.write("create table p (gone int, id int, at int, primary key (id)) partition by range (id)")
    tap.write("create table p_1 partition of p for values from (0) to (100)", "alter table p drop gone")
    tap.add("shop.p", exclude=["at"])
    tap.write("insert into p values (1)")
    late = tap.db.connect("app", autocommit=False)
    late.execute("insert into p values (2)")
    tap.batch()
    drain(tap.db, "q", "d")
    tap.write("insert into p values (3)")
    late.commit()
    late.close()
    drain(tap.db, "q", "d")
    tap.write("alter table p add extra int", "update p set extra = 1 where id = 1", "truncate p")
    tap.owner.execute("select gdq.force_tick('q')")
    tap.owner.execute("select gdq.next_batch('q', 'c')")
    wanted = {consumer: pending(tap.db, consumer) for consumer in "cde"}
    assert [len(wanted[consumer]) for consumer in "cde"] == [5, 3, 6]
    db = moved(tap, cluster, ahead=sooner)
    with db.connect() as owner, db.connect("app") as app:
        assert {row.outcome for row in rebase(owner, keep=True)} == {"kept"}
        app.execute("insert into p values (7)")
        for consumer in "cde":
            seen = events(db, consumer)
            assert seen[:-1] == wanted[consumer]
            assert seen[-1].new == {"id": 7, "extra": None}
        assert owner.execute("select state, columns from gdq.table_info('q')").fetchone() == ("ok", ["id", "extra"])


def choose_everything(tap: Tap) -> None:
    """Queues, tables and consumers that differ in everything that can be chosen."""
    for name in ("k", "c", "f", "s", "j"):
        tap.write(f"create table {name} (gone int, id int primary key, a int not null unique, b text)")
        tap.write(f"alter table {name} drop gone")
    tap.write("create sequence n", "alter table s enable row level security")
    tap.add("shop.k", mode="pk", key=["a"], include=["b"])
    tap.add("shop.c", columns=["id", "b"], always=True, unchanged="omit")
    tap.add("shop.f", exclude=["b"], where="a > 1 and b = 'x'", operations=["insert", "update"], origin=True)
    tap.add("shop.s", granularity="statement", pin_search_path=True, allow_rls=True)
    tap.add("shop.j", format="json")
    tap.owner.execute(
        """select gdq.create_queue('r', ticker_max_count => 7, ticker_max_lag => '7 s', ticker_idle_period => '7 min',
             rotation_period => '7 h', rotation_bytes => 777777, retention => '7 days', unlogged => true)"""
    )
    tap.owner.execute("select gdq.set_queue('r', max_bytes => 77777777), gdq.add_sequence('q', 'shop.n')")
    tap.owner.execute("select gdq.add_table('r', 'shop.k')")
    tap.owner.execute("select gdq.create_view('v', 'q', 'select id from shop.k', 'shop.v', '{shop.k}')")
    with tap.db.connect("su") as su:
        su.execute("select gdq.register_consumer('q', 'd', tables => '{shop.c}', skip_origin => '{here}')")
        su.execute("select gdq.register_consumer('r', 'e')")
    tap.owner.execute("select gdq.take_messages('q', 'd'), gdq.register_member('q', 'd', 'm')")
    tap.owner.execute("select gdq.set_retry_limit('q', 'd', 3), gdq.pause('q', 'd'), gdq.pause('r')")


@pytest.mark.long
def test_a_rebase_keeps_all_that_was_chosen(tap: Tap, cluster: Cluster) -> None:
    """Whatever column a revision adds: `always_alike` tells when nothing here differs in it."""
    clusters = [Database(server, "postgres") for server in (tap.db.server, cluster.server)]
    for database in clusters:
        with database.connect("su") as su:
            su.execute("grant app to gdq_owner")
    try:
        choose_everything(tap)
        with tap.db.connect("su") as su:
            before, captured = chosen(su), capture_of(su)
        assert always_alike(before) == []
        db = moved(tap, cluster)
        with db.connect() as owner, db.connect("su") as su:
            rebase(owner)
            after = chosen(su)
            for table, rows in before.items():
                assert after[table] == rows, table
            assert capture_of(su) == captured
            assert "row_security" not in [finding.code for finding in doctor(owner)]
    finally:
        for database in clusters:
            with database.connect("su") as su:
                su.execute("revoke app from gdq_owner")


def test_rules_for_new_tables_are_restored(tap: Tap, cluster: Cluster) -> None:
    """Tables that were passed over stay so by their names, though their oids are others; what came between is told."""
    tap.write("create table elder (id int)", "create table old (id int)")
    tap.owner.execute("select gdq.add_new_tables('q', '{shop.*}', '{shop.tmp_*}')")
    tap.write("create table t (id int)", "create unlogged table u (id int)", "create table removed (id int)")
    tap.write("drop table old")
    tap.owner.execute("select gdq.remove_table('q', 'shop.removed')")
    db = moved(tap, cluster)
    with db.connect("app") as app, db.connect() as owner:
        passed = {name for (name,) in owner.execute("select relid::text from gdq.passed_table")}
        assert passed == {"shop.elder", "shop.removed", "shop.u"}
        app.execute("create table between (id int); insert into between values (1)")
        rebase(owner)
        app.execute("create table later (id int); insert into later values (1); create table tmp_1 (id int)")
        owner.execute("do $$ begin while gdq.maintain() loop commit; end loop; end $$")
        names = {name for (name,) in owner.execute("select table_name from gdq.table_info()")}
        assert names == {"shop.t", 'shop."between"', "shop.later"}
        assert [(event.op, event.tbl) for event in events(db)] == [
            ("resync", "shop.t"),
            ("insert", "shop.later"),
            ("resync", 'shop."between"'),
        ]
        assert {found.object for found in doctor(owner) if found.code == "new_table_not_captured"} == {"shop.u"}


def test_columns_that_changed_before_the_rebase(tap: Tap, cluster: Cluster) -> None:
    """By its number the key would be another column; what cannot be found again is said."""
    tap.write("create table t (gone int, id int not null, other int not null, extra int, unique (id), unique (other))")
    tap.write("alter table t drop gone", "create table u (gone int, id int primary key, a int, b int, c int)")
    tap.write("alter table u drop gone", "create table j (gone int, id int primary key)", "alter table j drop gone")
    tap.add("shop.j", format="json")
    tap.add("shop.t", mode="pk", key=["id"], include=["extra"])
    tap.add("shop.u", columns=["id", "c"])
    db = moved(tap, cluster)
    with db.connect() as owner, db.connect("app") as app:
        app.execute("alter table t rename id to number; alter table u add d int")
        rebase(owner)
        state = "select state, reason from gdq.table_info('q') where table_name = 'shop.t'"
        assert str(owner.execute(state).fetchone()).count("captured columns are gone or renamed: id") == 1
        app.execute("insert into t values (1, 2, 3); insert into u values (4, 5, 6, 7); insert into j values (8)")
        seen = events(db)
        assert [event.new for event in seen if event.op == "insert"] == [{"id": 4, "c": 7}, {"id": 8}]
        owner.execute("select gdq.maintain()")
        assert "capture stays off" in str(owner.execute(state).fetchone())


def test_rebase_that_cannot_be_done_changes_nothing(tap: Tap, cluster: Cluster) -> None:
    filled(tap)
    db = moved(tap, cluster)
    with db.connect() as owner, db.connect("app", autocommit=False) as app:
        with pytest.raises(psycopg.Error, match="cannot be kept: changes were captured after its last tick"):
            rebase(owner, keep=True)
        app.execute("insert into t values (3, 'x')")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            rebase(owner)
        with pytest.raises(psycopg.Error, match="was restored from a dump"):
            owner.execute("select gdq.force_tick('q')")
        app.commit()
        assert rebase(owner) == [Rebased("q", "c", "shop.t", "resync")]


def test_queues_from_before_there_were_eras(tap: Tap) -> None:
    """The revision marks what is there, in a savepoint too."""
    revision = Path("migrations/versions/0006_era.sql").read_text()
    with tap.db.connect() as owner:
        owner.execute("drop table gdq.era cascade")
        with owner.transaction(), owner.transaction():
            owner.execute(revision.encode())
        owner.execute(Path("sql/base/lookup.sql").read_bytes())
        owner.execute("select gdq.force_tick('q')")


@pytest.mark.long
def test_restored_over_an_installed_database(tap: Tap, cluster: Cluster) -> None:
    """pg_dump --clean, into a database that the same dump has filled before, and that has been in use."""
    filled(tap)
    db = moved(tap, cluster)
    with db.connect() as owner:
        rebase(owner)
        events(db)
    with db.connect("app") as app:
        app.execute("alter table t add later int; insert into t values (10, 'lost by the restore', 1)")
    # the primary keys of partitions and the logs that are there cannot be dropped as the dump would have it
    assert "cannot drop schema gdq_log" in restore(db, dump(tap.db, "--clean", "--if-exists"), stop=False)
    with db.connect() as owner, db.connect("app") as app:
        assert rebase(owner, "q") == [Rebased("q", "c", "shop.t", "resync")]
        app.execute("insert into t values (11, 'kept')")
        assert [event.op for event in events(db)] == ["resync", "insert"]


def test_restored_by_an_owner_who_is_no_superuser(tap: Tap, cluster: Cluster) -> None:
    """Event triggers, and what belongs to other roles, stay behind: the rebase says what is missing."""
    tap.owner.execute("create table own (id int primary key)")
    tap.add("public.own")
    tap.owner.execute("insert into own values (1)")
    db = cluster.create_database(tap.db.name)
    with db.connect("su") as su:
        su.execute("create schema shop; grant all on schema shop to gdq_owner")
    said = restore(db, dump(tap.db, "--no-owner", "--no-acl"), dsn=db.dsn, stop=False)
    assert "permission denied to create event trigger" in said
    with db.connect() as owner:
        owner.execute("insert into own values (2)")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="event triggers of gdq are missing"):
            rebase(owner)
        assert gdq("create-event-triggers", dsn=db.su_dsn).returncode == 0
        assert rebase(owner) == [Rebased("q", "c", "public.own", "resync")]
        owner.execute("insert into own values (3); alter table own add more int; insert into own values (4)")
        assert [event.op for event in events(db)] == ["resync", "insert", "ddl", "insert"]
        with db.connect("su") as su:
            functions = "select count(*) from pg_proc where pronamespace = 'gdq'::regnamespace"
            assert su.execute(f"{functions} and has_function_privilege('app', oid, 'execute')".encode()).fetchone() == (
                0,
            )
            owners = "select distinct pg_get_userbyid(proowner) from pg_proc where proname ~ '^t[0-9]+_q'"
            made = su.execute("select 'gdq_capture_' || 'gdq_owner'::regrole::oid::int").fetchall()
            assert su.execute(f"{owners} order by 1".encode()).fetchall() == [("gdq_capture",), *made]


def test_dump_without_the_schemas_of_gdq(tap: Tap, cluster: Cluster) -> None:
    """The tables come without capture, and gdq is installed anew."""
    filled(tap)
    db = cluster.create_database(tap.db.name)
    said = restore(db, dump(tap.db, "-N", "gdq", "-N", "gdq_log"), stop=False)
    assert 'schema "gdq_log" does not exist' in said
    with db.connect("app") as app, db.connect("su") as su:
        assert su.execute("select count(*) from shop.t").fetchone() == (2,)
        assert su.execute("select from pg_trigger where not tgisinternal").rowcount == 0
        assert su.execute("select from pg_event_trigger").rowcount == 0
        app.execute("insert into shop.t values (5, 'x')")
    assert gdq("install", dsn=db.dsn).returncode == 0


def test_restored_in_part(tap: Tap, cluster: Cluster) -> None:
    filled(tap)
    db = cluster.create_database(tap.db.name)
    assert 'relation "shop.t" does not exist' in restore(db, dump(tap.db, "-T", "shop.t"), stop=False)
    with db.connect() as owner, pytest.raises(psycopg.Error, match="the dump was restored in part"):
        rebase(owner)


@pytest.mark.long
def test_positions_kept_outside(tap: Tap) -> None:
    """What the server knows, never knew, has lost, and has forgotten."""
    tap.owner.execute("select gdq.force_tick('q')")
    tap.batch()
    known = position(tap.owner, "q", "c")
    check_position(tap.owner, "q", known)
    assert gdq("position", "q", "c", dsn=tap.db.dsn).stdout == f"{known}\n"
    kind, era, tick, nonce, snapshot = known.split("/")
    other = "5f0c0000-0000-4000-8000-000000000000"
    for wrong, error in (
        (f"{kind}/{other}/{tick}/{nonce}/{snapshot}", DivergedPosition),
        (f"{kind}/{era}/{tick}/{other}/{snapshot}", DivergedPosition),
        (f"{kind}/{era}/{int(tick) + 1}/{nonce}/{snapshot}", DivergedPosition),
        (f"{kind}/{era}/0/{nonce}/{snapshot}", TruncatedPosition),
        ("700:700:", psycopg.errors.InvalidParameterValue),
    ):
        with pytest.raises(error):
            check_position(tap.owner, "q", wrong)
    tap.owner.execute("select gdq.create_queue('r')")
    with pytest.raises(DivergedPosition, match="it comes from another queue or server"):
        check_position(tap.owner, "r", known)
    assert gdq("check-position", "q", known, dsn=tap.db.dsn).returncode == 0
    assert gdq("check-position", "r", known, dsn=tap.db.dsn).returncode == 3
