"""A refresh runs nobody's code but the view's, and sends nobody's password to a target."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from gdq.conninfo import conninfo_without_password
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.consumers.views.own_objects import check_own_tables
from gdq.errors import GdqError
from gdq.view.view import create_view
from tests.support.server import PASSWORD, Database
from tests.support.spark import QUEUE, Shop
from tests.support.traps import set_better_traps, set_traps, sprung
from tests.support.views import MANY_CHANGES, MANY_VIEWS, make_kinds


def trap_everything(shop: Shop) -> None:
    """Traps in public and in a schema before pg_catalog in everybody's path; the shop itself stays out of them."""
    shop.execute("set search_path = pg_catalog")
    set_traps(shop.db)
    set_better_traps(shop.db)
    with shop.db.connect("su") as su:
        path = "alter database {} set search_path = evil, public, pg_catalog"
        su.execute(sql.SQL(path).format(sql.Identifier(shop.db.name)))


@pytest.mark.long
@pytest.mark.server
def test_no_operator_or_function_of_others_is_run(viewed: Shop) -> None:
    """Generated SQL names `net > 0`, and public has a better operator for the types."""
    make_kinds(viewed)
    for name, query in MANY_VIEWS.items():
        viewed.view(name, query, engine="postgres")
    trap_everything(viewed)
    with Refresher(viewed.db.dsn) as refresher:
        for change in ["select 1", *MANY_CHANGES]:
            viewed.execute(change)
            for name in MANY_VIEWS:
                refresher.refresh(name)
        assert all(verify_with(refresher, name).equal for name in MANY_VIEWS)
    assert sprung(viewed.db) == []


@pytest.mark.server
def test_the_traps_do_spring(viewed: Shop) -> None:
    """The test above can fail."""
    trap_everything(viewed)
    with viewed.db.connect() as owner:
        owner.execute("select 1::numeric > 0, oid = 'pg_class'::regclass from pg_class")
    assert {what.split("(")[0] for _, what in sprung(viewed.db)} >= {">", "="}


@pytest.mark.long
@pytest.mark.server
def test_elsewhere_no_operator_of_others_is_run(viewed: Shop, empty_db: Database) -> None:
    make_kinds(viewed)
    with empty_db.connect("su") as su:
        su.execute("grant create on schema public to gdq_owner")
    with conninfo_without_password(empty_db.dsn) as far, Refresher(viewed.db.dsn) as refresher:
        for name, query in MANY_VIEWS.items():
            viewed.view(name, query, engine="postgres", target_dsn=far)
        trap_everything(viewed)
        trap_everything(Shop(empty_db, viewed.connection))
        for change in ["select 1", *MANY_CHANGES]:
            viewed.execute(change)
            for name in MANY_VIEWS:
                refresher.refresh(name)
    assert sprung(viewed.db) == sprung(empty_db) == []


def test_a_callers_session_keeps_its_settings(viewed: Shop) -> None:
    shown = "select current_setting('search_path'), current_setting('row_security')"
    viewed.execute("set search_path = public; set row_security = on")
    before = viewed.execute(shown)
    with Refresher(viewed.connection) as refresher:
        refresher.refresh("v")
        assert viewed.execute(shown) != before
    assert viewed.execute(shown) == before


EVIL = """
    create function evil() returns trigger security invoker language plpgsql as
      $$ begin insert into trace values (current_user); return new; end $$;
    create function evil_text() returns text language plpgsql as
      $$ begin insert into trace values (current_user); return 'x'; end $$;
    create function evil_ok() returns boolean language plpgsql as
      $$ begin insert into trace values (current_user); return true; end $$;
    create table trace (who name); grant insert on trace to public"""
POSITION = """create table gdq_target.position (view text primary key, source text not null, target text not null,
    plan text not null, position text not null, updated_at timestamptz not null default now())"""
FAULTS = {
    "owner": "select 1",
    "trigger": "create trigger t before insert or update on gdq_target.position for each row execute function evil()",
    "rule": "create rule r as on insert to gdq_target.position do also insert into trace values (evil_text())",
    "policy": "create policy p on gdq_target.position using (evil_ok());"
    " alter table gdq_target.position enable row level security, force row level security",
    "default": "alter table gdq_target.position alter updated_at set default (evil_text() || 'now')::timestamptz",
    "check": "alter table gdq_target.position add check (evil_ok())",
    "column": "alter table gdq_target.position add more text default evil_text()",
    "view": "alter table gdq_target.position rename to hidden;"
    " create view gdq_target.position as select *, evil_text() as more from gdq_target.hidden",
    "child": "create table gdq_target.child () inherits (gdq_target.position)",
    "index": "create index on gdq_target.position ((evil_immutable(view)))",
}


def squat(db: Database, fault: str) -> None:
    """What the owner of a database can do before the first refresh."""
    with db.connect("su") as su:
        su.execute(sql.SQL("grant create on database {} to app").format(sql.Identifier(db.name)))
        su.execute("grant create on schema public to app; set role app")
        su.execute(EVIL.encode())
        su.execute(
            "create function evil_immutable(text) returns text immutable language plpgsql as"
            " $$ begin perform public.evil_text(); return $1; end $$"
        )
        su.execute("create schema gdq_target")
        su.execute(POSITION.encode())
        su.execute(FAULTS[fault].encode())
        su.execute("grant all on schema gdq_target to public; grant all on all tables in schema gdq_target to public")


def trace(db: Database) -> list[tuple[str]]:
    with db.connect("su") as su:
        return su.execute("select distinct who::text from public.trace where who <> 'app'").fetchall()


@pytest.mark.server
@pytest.mark.parametrize("fault", FAULTS)
def test_position_table_of_somebody_else_is_not_used(viewed: Shop, fault: str) -> None:
    squat(viewed.db, fault)
    for role in ("owner", "su"):
        with (
            Refresher(viewed.db.dsn_of(role)) as refresher,
            pytest.raises(GdqError, match=r"gdq_target.* is not as gdq makes it: it belongs to app"),
        ):
            refresher.refresh("v")
    assert trace(viewed.db) == []


@pytest.mark.server
@pytest.mark.parametrize("fault", set(FAULTS) - {"owner"})
def test_position_table_that_was_altered_is_not_used(viewed: Shop, fault: str) -> None:
    """An altered table is refused, although its owner is trusted."""
    squat(viewed.db, fault)
    with viewed.db.connect("su") as su:
        su.execute("alter schema gdq_target owner to gdq_owner; alter table gdq_target.position owner to gdq_owner")
        if fault == "view":
            su.execute("alter view gdq_target.position owner to gdq_owner")
    with Refresher(viewed.db.dsn) as refresher, pytest.raises(GdqError, match="is not as gdq makes it"):
        refresher.refresh("v")
    assert trace(viewed.db) == []


@pytest.mark.server
def test_slot_tables_of_somebody_else_are_not_used(viewed: Shop) -> None:
    squat(viewed.db, "owner")
    with viewed.db.connect("su") as su:
        su.execute("set role app; create table gdq_target.slot_position (slot_name text primary key, lsn pg_lsn)")
        su.execute("reset role")
        for name in ("slot_view", "slot_position", "compare_run"):
            with pytest.raises(GdqError, match="belongs to app"):
                check_own_tables(su, name, in_source=True)
        assert su.execute("select current_setting('search_path')").fetchone() == ('"$user", public',)
    with viewed.db.connect() as owner:
        assert owner.execute("select count(*) from gdq.doctor() where code = 'slot_unread'").fetchone() == (0,)


@pytest.mark.server
def test_target_that_the_owner_of_its_schema_put_there(viewed: Shop) -> None:
    """Whoever owns a schema may drop its tables, and make others with the same names and comments."""
    with viewed.db.connect("su") as su:
        su.execute("alter schema public owner to app; grant create on schema public to gdq_owner")
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh("v")
    with viewed.db.connect("su") as su:
        su.execute("set role app")
        su.execute(EVIL.encode())
        (comment,) = su.execute("select obj_description('v'::regclass)").fetchone() or ("",)
        su.execute("drop table v; create table v (id int, n int)")
        su.execute("create trigger t before insert or delete on v for each row execute function evil()")
        su.execute(sql.SQL("comment on table v is {}").format(sql.Literal(comment)))
        su.execute("grant all on v to public")
    viewed.execute("insert into orders values (1000, 's', 9)")
    with Refresher(viewed.db.dsn) as refresher, pytest.raises(GdqError, match="belongs to app"):
        refresher.refresh("v")
    assert trace(viewed.db) == []


@pytest.mark.server
@pytest.mark.parametrize("full", [False, True])
def test_policy_that_would_hide_rows_is_an_error(viewed: Shop, full: bool) -> None:
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh("v")
    with viewed.db.connect("su") as su:
        su.execute(
            "alter table orders owner to app; grant all on orders to gdq_owner; grant create on schema public to app"
        )
        su.execute("set role app")
        su.execute(EVIL.encode())
        su.execute("create policy p on orders using (evil_ok()); alter table orders enable row level security")
        su.execute("insert into orders values (1000, 's', 9)")
    with Refresher(viewed.db.dsn) as refresher, pytest.raises(GdqError, match=r"row level security of .*orders"):
        refresher.refresh("v", full=full)
    assert trace(viewed.db) == []
    with viewed.db.connect("su") as su:
        su.execute("alter table orders disable row level security")
    with Refresher(viewed.db.dsn) as refresher:
        assert refresher.refresh("v").rows_changed == 1
        assert verify_with(refresher, "v").equal


@pytest.mark.server
@pytest.mark.parametrize("name", ["tops", "bag", "sums"])
def test_target_truncated_by_another_is_loaded_in_full(viewed: Shop, name: str) -> None:
    viewed.view(name, MANY_VIEWS[name], engine="postgres")
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(name)
        viewed.execute(f"truncate {name}")
        viewed.execute("insert into orders values (1000, 's1', 9)")
        result = refresher.refresh(name)
        assert (result.action, result.reason) == (
            "full",
            "the target was changed by another: TRUNCATE, VACUUM FULL or CLUSTER",
        )
        assert verify_with(refresher, name).equal
        viewed.execute("insert into orders values (1001, 's1', 9)")
        assert refresher.refresh(name).action == "delta"


@contextmanager
def asking_for_passwords() -> Iterator[tuple[int, list[bytes]]]:
    """A server that asks each client for its password in clear text: its port, and what it got."""
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                try:
                    client, _ = listening.accept()
                except TimeoutError:
                    continue
                with client:
                    client.settimeout(5)
                    while (start := client.recv(1024)) and start[4:8] in (
                        struct.pack("!i", 80877103),
                        struct.pack("!i", 80877104),
                    ):
                        client.sendall(b"N")
                    client.sendall(b"R" + struct.pack("!ii", 8, 3))
                    got.append(client.recv(1024))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1], got
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("how", ["dsn", "service"])
def test_the_refreshers_password_goes_to_no_target(
    viewed: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, how: str
) -> None:
    """Whoever makes a view names the target's host."""
    with asking_for_passwords() as (port, got):
        place = f"host=127.0.0.1 port={port} user=x dbname=x"
        services = tmp_path_factory.mktemp("services") / "pg_service.conf"
        services.write_text(f"[far]\nhost=127.0.0.1\nport={port}\nuser=x\ndbname=x\n[own]\npassword={PASSWORD}\n")
        monkeypatch.setenv("PGSERVICEFILE", str(services))
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        create_view(
            viewed.connection,
            "far",
            QUEUE,
            "select id from orders",
            "public.far",
            engine="postgres",
            target_dsn=place if how == "dsn" else "service=far",
        )
        if how == "dsn":
            monkeypatch.setenv("PGSERVICE", "own")
        with Refresher(viewed.db.dsn) as refresher, pytest.raises(psycopg.OperationalError):
            refresher.refresh("far")
    assert not any(PASSWORD.encode() in part for part in got)


@pytest.mark.server
def test_an_administrator_refreshes(viewed: Shop) -> None:
    """A member of gdq_admin who owns nothing of gdq."""
    role = f"{viewed.db.name}_admin"
    with viewed.db.connect("su") as su:
        name = sql.Identifier(role)
        su.execute(sql.SQL("create role {} login password {} in role gdq_admin").format(name, sql.Literal(PASSWORD)))
        su.execute(sql.SQL("grant create on schema public to {0}; grant select on orders to {0}").format(name))
    dsn = make_conninfo(viewed.db.dsn, user=role)
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh("v")
    try:
        with psycopg.connect(dsn, autocommit=True) as admin:
            create_view(admin, "mine", QUEUE, MANY_VIEWS["sums"], "public.mine", engine="postgres")
        with Refresher(dsn) as refresher:
            refresher.refresh("mine")
            viewed.execute("insert into orders values (1000, 's1', 9)")
            assert refresher.refresh("mine").action == "delta"
            assert verify_with(refresher, "mine").equal
    finally:
        with viewed.db.connect("su") as su:
            su.execute(sql.SQL("drop owned by {0}").format(sql.Identifier(role)))
            su.execute(sql.SQL("drop role {0}").format(sql.Identifier(role)))
