"""Whatever the catalogs hold that gdq has not witnessed is a resync; what cannot concern capture is none."""

from __future__ import annotations

import random

import psycopg
import pytest
from psycopg import sql

from tests.support.events import Tap, drain
from tests.support.guarded import maintain, state, triggers
from tests.support.unguarded import GUARDS


def unseen(tap: Tap, *statements: str) -> None:
    """DDL while the event triggers are off for a moment."""

    def switch(how: str) -> None:
        for name in GUARDS:
            su.execute(sql.SQL("alter event trigger {} " + how).format(sql.Identifier(name)))

    with tap.db.connect("su") as su:
        switch("disable")
        su.execute("set search_path = shop")
        for statement in statements:
            su.execute(statement.encode())
        switch("enable always")


UNSEEN = {
    "rewrite": ("t", "alter table t alter v type int using v + 1000"),
    "rewrite of a partition": ("p", "alter table p alter w type text using w || v"),
    "column with a default": ("t", "alter table t add x int default 3"),
    "column": ("t", "alter table t add x int"),
    "column gone": ("t", "alter table t drop w"),
    "column again": ("t", "alter table t drop v, add v int"),
    "column renamed": ("t", "alter table t rename v to x"),
    "triggers off for a while": ("t", "alter table t disable trigger all", "alter table t enable trigger all"),
    "triggers of a partition": ("p", "alter table p21 disable trigger all", "alter table p21 enable trigger all"),
    "trigger gone": ("t", "drop trigger {i} on t"),
    "trigger renamed": ("t", "alter trigger {i} on t rename to zz"),
    "attach": ("p", "alter table p attach partition other for values in (3)"),
    "attach below": ("p", "alter table p2 attach partition below for values in (7)"),
    "detach": ("p", "alter table p detach partition p1"),
    "detach and attach": (
        "p",
        "alter table p detach partition p1",
        "update p1 set v = 2",
        "alter table p attach partition p1 for values in (1)",
    ),
    "partition dropped": ("p", "drop table p1"),
    "inherit": ("i", "alter table ch inherit i"),
    "inherit and back": ("i", "create table e () inherits (i)"),
    "unlogged": ("t", "alter table t set unlogged"),
    "unlogged and back": ("t", "alter table t disable trigger user, set unlogged", "alter table t enable trigger user"),
    "label": ("t", "alter type mood rename value 'good' to 'bad'"),
    "attribute": ("t", "alter type pair add attribute z int"),
    "row type": ("t", "alter table rowed add column z int"),
    "dropped": ("t", "drop table t"),
    "key": ("t", "alter table t drop constraint t_pkey"),
    "function": (
        "t",
        "create or replace function gdq_log.{function}() returns trigger language plpgsql as 'begin return null; end'",
    ),
    "function and back": (
        "t",
        "alter function gdq_log.{function}() stable",
        "alter function gdq_log.{function}() volatile",
    ),
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_what_no_event_trigger_saw_is_a_resync(witnessed: Tap, kind: str) -> None:
    table, *statements = UNSEEN[kind]
    found = witnessed.owner.execute("select gdq.capture_name(1, 'shop.t'::regclass, 'i')").fetchone()
    assert found
    unseen(witnessed, *(statement.format(function=found[0], **triggers(witnessed)) for statement in statements))
    witnessed.owner.execute("select gdq.check_tables()")
    assert (table, "ddl" if kind == "dropped" else "resync") in [
        (str(row[4]).removeprefix("shop."), row[3]) for row in drain(witnessed.db)
    ]


def test_doctor_and_maintain_find_it_too(witnessed: Tap) -> None:
    unseen(witnessed, "alter table t alter v type int using v + 1000")
    codes = witnessed.owner.execute("select code from gdq.doctor('q', '0')").fetchall()
    assert ("altered_unseen",) in codes
    maintain(witnessed)
    assert state(witnessed)[0] == "resync"
    assert ("altered_unseen",) not in witnessed.owner.execute("select code from gdq.doctor('q', '0')").fetchall()


def test_later_ddl_does_not_hide_it(witnessed: Tap) -> None:
    """The guard follows a command and witnesses the table only as far as it knows who wrote what differs."""
    unseen(witnessed, "alter table t disable trigger all", "update t set v = 7", "alter table t enable trigger all")
    witnessed.write("alter table t alter v set default 5")
    assert "resync" in [row[3] for row in drain(witnessed.db)]
    drained(witnessed)
    unseen(witnessed, "alter table t alter v type int using v + 1000")
    witnessed.write("alter table t add y int")
    assert "resync" in [row[3] for row in drain(witnessed.db)]


def test_later_ddl_does_not_hide_a_changed_type(witnessed: Tap) -> None:
    unseen(witnessed, "alter type mood rename value 'good' to 'bad'")
    witnessed.write("alter table t add y int, add p2 pair")
    assert "resync" in [row[3] for row in drain(witnessed.db)]
    drained(witnessed)
    unseen(witnessed, "alter type pair add attribute z int")
    witnessed.write("alter table t add z int")
    assert "resync" in [row[3] for row in drain(witnessed.db)]
    drained(witnessed)
    witnessed.write("alter table t add p3 pair", "alter type mood add value 'ugly'", "alter table t drop p3")
    assert "resync" not in [row[3] for row in drain(witnessed.db)]


def drained(tap: Tap) -> None:
    maintain(tap)
    drain(tap.db)


HARMLESS = (
    "vacuum full t",
    "vacuum full",
    "vacuum (freeze)",
    "cluster t using t_pkey",
    "analyze",
    "grant select on t to stranger",
    "grant select (v) on t to stranger",
    "revoke select (v) on t from stranger",
    "comment on table t is 'x'",
    "comment on column t.v is 'x'",
    "create index on t (v)",
    "reindex table t",
    "create statistics s on v, w from t",
    "alter table t alter v set statistics 100",
    "alter table t alter v set default 9",
    "alter table t alter w set storage external",
    "alter table t set (fillfactor = 50)",
    "alter table p1 set (fillfactor = 50)",
    "alter table t add check (v < 1000)",
    "alter table t add constraint f foreign key (v) references t (id) not valid",
    "create trigger zz after insert on t for each statement execute function nothing()",
    "alter table t disable trigger zz",
    "alter table t enable trigger zz",
    "alter table t replica identity full",
    "alter table t enable row level security",
    "alter type mood add value 'bad'",
    "truncate other",
    "create table p4 partition of p for values in (4)",
    "alter table t set access method heap",
)


@pytest.mark.long
@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
def test_harmless_commands_ask_for_no_copy(witnessed: Tap, seen: bool) -> None:
    with witnessed.db.connect("su") as su:
        su.execute("set search_path = shop")
        su.execute("drop role if exists stranger")
        su.execute("create role stranger")
        su.execute("create function nothing() returns trigger language plpgsql as 'begin return null; end'")
        for statement in HARMLESS:
            if seen:
                su.execute(f"set role {'app' if 'table' in statement else 'postgres'}".encode())
                su.execute(statement.encode())
            elif not statement.startswith(("create table p4", "alter table t set access")):
                unseen(witnessed, statement)
            maintain(witnessed)
            witnessed.owner.execute("select gdq.check_tables()")
            found = [(row[3], row[4]) for row in drain(witnessed.db)]
            assert "resync" not in [op for op, _ in found], (statement, found)
        # all at once, without a look in between
        for statement in (
            "truncate t",
            "alter table t alter v set statistics 50",
            "vacuum full",
            "alter table t add z int",
        ):
            su.execute(statement.encode())
        assert "resync" not in [row[3] for row in drain(witnessed.db)]
        su.execute("reset role")
        su.execute("drop owned by stranger")
        su.execute("drop role stranger")


def test_rotation_and_options_witness_what_they_make(witnessed: Tap) -> None:
    witnessed.owner.execute("update gdq.queue set rotation_period = '1 microsecond'")
    witnessed.write("insert into t (id) values (2)")
    maintain(witnessed)
    witnessed.owner.execute("select gdq.alter_table_options('q', 'shop.t', '{\"exclude\": [\"w\"]}')")
    witnessed.owner.execute("select gdq.alter_table_options('q', 'shop.i', '{\"operations\": [\"insert\"]}')")
    witnessed.owner.execute("select gdq.set_activity(table_id, 'cooling') from gdq.captured_table")
    assert witnessed.owner.execute("select gdq.check_tables()").fetchone() == (0,)


def test_catalogs_of_another_server(witnessed: Tap) -> None:
    """After pg_upgrade every row has another writer and place, and only the meaning is compared."""
    with witnessed.db.connect("su") as su:
        su.execute("""update gdq.witness set basis = '1 2 3 4 5',
                             seen = array(select regexp_replace(e, '[|].*[|]', '|7|(7,7)|') from unnest(seen) e)""")
        su.execute("""update gdq.log_ring set functions = array(
                        select regexp_replace(e, '[|].*[|]', '|7|(7,7)|') from unnest(functions) e)""")
        su.execute("update gdq.log_ring set functions[1] = '1 2 3 4 5'")
    assert witnessed.owner.execute("select gdq.check_tables()").fetchone() == (0,)
    unseen(witnessed, "alter table t disable trigger user", "alter table t enable trigger user")
    assert witnessed.owner.execute("select gdq.check_tables()").fetchone() == (1,)


@pytest.mark.parametrize("ddl", ["select", "alter table p1 add check (v < 1000)", "alter table t add z int"])
def test_tables_that_an_older_gdq_has_captured(witnessed: Tap, ddl: str) -> None:
    witnessed.owner.execute("delete from gdq.witness")
    witnessed.owner.execute("update gdq.log_ring set functions = null")
    witnessed.write(ddl)
    assert witnessed.owner.execute("select gdq.check_tables()").fetchone() == (0,)
    assert witnessed.owner.execute("select count(distinct table_id) from gdq.witness").fetchone() == (4,)
    unseen(witnessed, "alter table t disable trigger user", "alter table t enable trigger user")
    assert witnessed.owner.execute("select gdq.check_tables()").fetchone() == (1,)


CHANGES = (
    "alter table t alter v type int using v + 1",
    "alter table t disable trigger all",
    "alter table t enable trigger all",
    "alter table t add x{n} int default {n}",
    "alter table p detach partition p1",
    "alter table p attach partition p1 for values in (1)",
    "alter table p alter w type text using w || v",
    "alter table p21 disable trigger all",
    "alter table p21 enable trigger all",
    "alter table ch inherit i",
    "alter table ch no inherit i",
    "alter table i add y{n} int",
    "vacuum full pg_trigger",
    "vacuum full pg_attribute",
    "analyze t",
)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_random_changes_are_found(witnessed: Tap, seed: int) -> None:
    """Every table of which the catalogs hold something else than before is in resync; no other is."""
    draw = random.Random(seed)
    for n in range(8):
        drained(witnessed)
        resync(witnessed)
        before = {name: state(witnessed, f"shop.{name}") for name in ("t", "p", "i", "ch")}
        assert set(before.values()) == {("ok", None)}
        done = []
        for m in range(draw.randrange(1, 5)):
            statement = draw.choice(CHANGES).format(n=n * 10 + m)
            try:
                unseen(witnessed, statement)
            except psycopg.Error:
                with witnessed.db.connect("su") as su:
                    for name in GUARDS:
                        su.execute(sql.SQL("alter event trigger {} enable always").format(sql.Identifier(name)))
                continue
            done.append(statement)
        witnessed.owner.execute("select gdq.check_tables()")
        for name in ("t", "p", "i"):
            changed = any(touches(statement, name) for statement in done)
            assert (state(witnessed, f"shop.{name}")[0] == "resync") == changed, (name, done)


def resync(tap: Tap) -> None:
    for name in ("t", "p", "i", "ch"):
        tap.owner.execute("select gdq.resynced('q', 'c', %s::regclass, pg_current_snapshot())", [f"shop.{name}"])


def touches(statement: str, name: str) -> bool:
    """Whether the statement changes what capture of the table rests on."""
    words = statement.split()
    if words[0] != "alter" or "enable" in words:  # triggers are enabled after a disable, which counts, or for nothing
        return False
    if "inherit" in words:
        return name == "i"
    return words[2] in {"t": ("t",), "p": ("p", "p21"), "i": ("i",)}[name]
