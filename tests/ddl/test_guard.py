"""What the DDL guard makes of single commands: the right columns go on being logged, or the table is in resync."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.support.events import Tap, drain
from tests.support.guarded import T, emptied, exact, maintain, reasons, state, watched
from tests.support.history import History
from tests.support.server import Database

pytestmark = pytest.mark.server


@pytest.fixture
def tap(module_db: Database) -> Iterator[Tap]:
    yield from emptied(module_db)


@pytest.fixture
def history(tap: Tap) -> History:
    return watched(tap)


INSERT = "insert into t (id) values (2)"

FOLLOWED = {
    "add column": ("alter table t add c int", "insert into t (id, c) values (2, 5)"),
    "add generated": ("alter table t add c int generated always as (id + 1) stored", INSERT),
    "drop column": ("alter table t drop b", INSERT),
    "drop all columns but one": ("alter table t drop b, drop a", INSERT),
    "rename column": ("alter table t rename a to c", "insert into t (id, c) values (2, 5)"),
    "rename to a name of the log": ("alter table t rename a to ev_id", "insert into t (id, ev_id) values (2, 5)"),
    "swap names": (
        "alter table t rename a to x; alter table t rename id to a; alter table t rename x to id",
        "insert into t (id, a) values (3, 2)",
    ),
    "change type": ("alter table t alter a type text", "insert into t (id, a) values (2, 'x')"),
    "rename table": ("alter table t rename to t2", "insert into t2 (id) values (2)"),
    "set schema": ("alter table t set schema public", "insert into public.t (id) values (2)"),
    "drop the key": ("alter table t drop constraint t_pkey", INSERT),
    "change the key": (
        "alter table t drop constraint t_pkey, add primary key (id, b)",
        "insert into t (id, b) values (2, '')",
    ),
    "owner": ("alter table t owner to app", INSERT),
    "as a view": ("alter view t rename column a to c", "insert into t (id, c) values (2, 5)"),
    "as a materialized view": ("alter materialized view t rename column a to c", "insert into t (id, c) values (2, 5)"),
    "as an index": ("alter index t rename to t2", "insert into t2 (id) values (2)"),
    "in a block": ("do $$ begin alter table t rename a to c; insert into t values (9); end $$", INSERT),
    "in a function": (
        (
            "create function f() returns void language plpgsql as "
            "$$ begin execute 'alter table t drop a'; insert into t values (9); end $$; select f()"
        ),
        INSERT,
    ),
    "in a security definer function": (
        "create function f() returns void language sql security definer as 'alter table t drop a'; select f()",
        INSERT,
    ),
    "several commands at once": (
        "alter table t drop a; insert into t values (8); alter table t add a int; insert into t values (9)",
        INSERT,
    ),
    "drop and add of one name": ("alter table t drop a, add a text", "insert into t (id, a) values (2, 'x')"),
    "a constraint": ("alter table t add check (id > 0)", INSERT),
    "a trigger": (
        "create trigger x before update on t for each row execute function suppress_redundant_updates_trigger()",
        INSERT,
    ),
    "a foreign key": ("create table u (id int references t)", INSERT),
    "a rule": ("create rule r as on delete to t do also nothing", INSERT),
    "copy": ("create table u (like t including all)", INSERT),
    "cluster": ("cluster t using t_pkey", INSERT),
    "an access method": ("alter table t set access method heap", INSERT),
    "set storage": (
        "alter table t alter b set storage external, alter b set statistics 5, replica identity full",
        INSERT,
    ),
    "row security": ("alter table t enable row level security", INSERT),
}


@pytest.mark.parametrize("kind", FOLLOWED)
def test_ddl_is_followed(tap: Tap, history: History, kind: str) -> None:
    """No event is missing, also without maintenance; a type change besides says that old rows have changed."""
    ddl, write = FOLLOWED[kind]
    tap.write(T)
    tap.add("shop.t")
    history.watch("t")
    tap.write("insert into t values (1, 1, 'x')", ddl, write, write.replace("2)", "7)").replace("(2", "(7"))
    rows = drain(tap.db)
    tables = [row[4] for row in rows if row[3] == "insert"]
    assert tables[0] == "shop.t"
    renamed = [(*row[:4], "shop.t", *row[5:]) for row in rows]
    exact(tap, history, renamed, "t")
    columns = {"change type", "add generated"}
    assert bool(reasons(rows)) == (kind in columns)
    assert state(tap, tables[-1])[0] == "ok"


FILLED = {
    "constant default": "alter table t add c int default 5",
    "constant default in another rewrite": "alter table t add c int default 5, alter b type varchar(3)",
    "constant default and persistence": "alter table t add c int default 5, set unlogged; alter table t set logged",
    "constant default of a domain": "create domain five int default 5; alter table t add c five",
    "constrained domain": "create domain five int default 5 not null; alter table t add c five",
    "volatile default": "alter table t add c float default random()",
    "identity": "alter table t add c int generated always as identity",
    "stored generated": "alter table t add c int generated always as (id * 2) stored",
    "serial": "alter table t add c serial",
    "conversion": "alter table t alter a type text using 'x'",
    "same type": "alter table t alter a type int using a + 1",
    "same bytes": "alter table t add o oid; alter table t alter o type int",
}


@pytest.mark.parametrize("kind", FILLED)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_ddl_that_changes_rows_without_events_asks_for_a_resync(tap: Tap, kind: str, isolation: str) -> None:
    tap.write(T, "insert into t values (1, 1, 'x')")
    tap.add("shop.t")
    tap.owner.execute("select gdq.force_tick('q')")
    tap.write(f"set default_transaction_isolation = '{isolation}'", FILLED[kind])
    assert state(tap)[0] == "resync"
    maintain(tap)
    assert reasons(drain(tap.db))
    assert state(tap) == ("ok", None)


def test_default_added_to_a_partitioned_table_asks_for_a_resync(tap: Tap) -> None:
    tap.write("create table t (id int) partition by list (id)", "create table t1 partition of t for values in (1)")
    tap.add("shop.t")
    tap.write("insert into t values (1)", "alter table t add c int default 5")
    assert reasons(drain(tap.db)) == ["column c was added with a default: existing rows changed without events"]


TYPES = {
    "rename value": ("create type k as enum ('x', 'y')", "alter type k rename value 'x' to 'z'", True),
    "rename value in a function": (
        "create type k as enum ('x', 'y')",
        "do $$ begin alter type k rename value 'x' to 'z'; end $$",
        True,
    ),
    "rename value that reads like an added one": (
        "create type k as enum ('x', 'y')",
        "/* alter type k add value 'q' */ alter type k rename value 'x' to 'alter type k add value'",
        True,
    ),
    "add value": ("create type k as enum ('x', 'y')", "alter type k add value 'z' after 'y'", False),
    "rename type": ("create type k as enum ('x', 'y')", "alter type k rename to l", False),
    "add attribute": ("create type k as (x int)", "alter type k add attribute z int", True),
    "add a column to the table of a row type": ("create table k (x int)", "alter table k add z int", True),
    "the same through a parent": (
        "create table p (x int); create table k () inherits (p)",
        "alter table p add z int",
        True,
    ),
    "the same in a block": ("create table k (x int)", "do $$ begin alter table k add z int; end $$", True),
    "drop a column of the table of a row type": ("create table k (x int, z int)", "alter table k drop z", True),
    "drop the type of an attribute": (
        "create type e as enum ('x'); create type k as (x int, z e)",
        "drop type e cascade",
        True,
    ),
    "drop the type of an attribute of an attribute": (
        "create type e as enum ('x'); create type m as (x int, z e); create type k as (m m[])",
        "drop type e cascade",
        True,
    ),
    "alter the table of a row type": ("create table k (x int)", "alter table k alter x set default 5", False),
    "rename a column of a row type": ("create table k (x int)", "alter table k rename x to z", False),
    "of an array of domains": (
        "create type e as enum ('x', 'y'); create domain m as e; create domain k as m[]",
        "alter type e rename value 'x' to 'z'",
        True,
    ),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_alter_type_that_changes_how_rows_read_asks_for_a_resync(tap: Tap, kind: str, isolation: str) -> None:
    create, alter, changes = TYPES[kind]
    tap.write(*create.split("; "), "create table t (id int, v k)", "create table u (id int)")
    tap.add("shop.t")
    tap.add("shop.u")
    tap.write(f"set default_transaction_isolation = '{isolation}'", alter, "insert into t values (1)")
    rows = drain(tap.db)
    assert {(row[4], row[7]["kind"]) for row in rows if row[3] == "resync"} == (
        {("shop.t", "gap")} if changes else set()
    )
    assert [row[3] for row in rows if row[3] == "insert"] == ["insert"]


def test_rollback_of_ddl_brings_everything_back(tap: Tap, history: History) -> None:
    tap.write(T)
    tap.add("shop.t")
    history.watch("t")
    for isolation in ("read committed", "repeatable read", "serializable"):
        tap.write(f"set default_transaction_isolation = '{isolation}'", "truncate t")
        for ddl in (
            "alter table t rename a to c",
            "drop table t",
            "alter table t disable trigger user",
            "alter table t set unlogged",
        ):
            with tap.app.transaction(force_rollback=True):
                tap.write(ddl)
            with tap.app.transaction():
                tap.write("insert into t values (1, 1)")
                with tap.app.transaction(force_rollback=True):
                    tap.write(ddl)
                tap.write("update t set a = 2", "delete from t")
    rows = drain(tap.db)
    exact(tap, history, rows, "t")
    assert reasons(rows) == []
    assert state(tap) == ("ok", None)


def test_two_queues_follow(tap: Tap) -> None:
    with Tap(tap.db, "second", "other") as second:
        tap.write(T)
        tap.add("shop.t")
        second.add("shop.t", mode="pk")
        tap.write("alter table t rename id to nr", "alter table t add c int", "insert into t values (1)")
        assert [e.key for e in tap.events() if e.op == "insert"] == [{"nr": 1}]
        assert [e.key for e in second.events() if e.op == "insert"] == [{"nr": 1}]


def test_removing_a_table_is_no_gap(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t")
    tap.write("insert into t values (1)")
    assert [row[3] for row in drain(tap.db)] == ["insert"]
    tap.owner.execute("select gdq.remove_table('q', 'shop.t')")
    assert [row[3:5] for row in drain(tap.db)] == [("ddl", "shop.t")]
    tap.add("shop.t")
    tap.write("insert into t values (2)")
    assert [row[3] for row in drain(tap.db)] == ["insert"]
    assert state(tap) == ("ok", None)


def test_consumer_registered_after_a_gap_hears_nothing_of_it(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t")
    tap.write("set default_transaction_isolation = 'repeatable read'", "alter table t add c int")
    maintain(tap)
    drain(tap.db)
    tap.owner.execute("select gdq.register_consumer('q', 'late')")
    tap.write("insert into t values (1)")
    assert [row[3] for row in drain(tap.db, consumer="late")] == ["insert"]
    assert state(tap) == ("ok", None)


def test_discard_by_the_application(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t")
    for number, what in enumerate(("all", "sequences", "plans", "temp")):
        tap.write(
            f"insert into shop.t values ({number})", f"discard {what}", f"update shop.t set a = 1 where id = {number}"
        )
    rows = drain(tap.db)
    assert [row[3] for row in rows] == ["insert", "update"] * 4
    assert sorted(row[0] for row in rows) == [row[0] for row in rows]


def test_prepared_transaction_with_ddl(tap: Tap, history: History) -> None:
    with tap.db.connect("su") as su:
        if su.execute("show max_prepared_transactions").fetchone() == ("0",):
            pytest.skip("the server keeps no prepared transactions")
    tap.write(T)
    tap.add("shop.t")
    history.watch("t")
    tap.app.execute("begin")
    tap.write(
        "insert into t values (1)", "alter table t drop a", "insert into t values (2)", "prepare transaction 'ddl'"
    )
    maintain(tap)
    tap.write("commit prepared 'ddl'", "insert into t values (3)")
    exact(tap, history, drain(tap.db), "t")


def test_statement_that_took_the_old_columns_with_it(tap: Tap) -> None:
    """Prepared statements and cached plans of a writer go on after DDL of another session."""
    tap.write(T)
    tap.add("shop.t")
    with tap.db.connect("app") as writer:
        for number in range(8):
            writer.execute("insert into t (id) values (%s)", [number], prepare=True)
        tap.write("alter table t drop a, add c int")
        writer.execute("insert into t (id) values (8)", prepare=True)
        writer.execute("update t set c = 1 where id = %s", [8], prepare=True)
    rows = drain(tap.db)
    assert [row[3] for row in rows] == ["insert"] * 8 + ["ddl", "insert", "update"]
    assert rows[-1][7] == {"id": 8, "b": None, "c": 1}
    ddl: dict[str, Any] = rows[8][7]
    before, after = ([column["name"] for column in ddl[which]] for which in ("old_columns", "new_columns"))
    assert (ddl["tag"], before, after) == ("ALTER TABLE", ["id", "a", "b"], ["id", "b", "c"])
    assert ddl["statement"] == "alter table t drop a, add c int"


def test_writers_error_free_without_the_right_to_look(tap: Tap) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        tap.app.execute("select gdq.maintain()")
