"""Large values that updates leave as they were are logged once: readers see them in both images all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from psycopg import errors

from gdq import queue as queues
from gdq.batch import Batch
from gdq.cli import main
from gdq.monitor.doctor import doctor
from tests.support.events import Batch as Seen
from tests.support.events import Event, Tap
from tests.support.server import Database

pytestmark = pytest.mark.server

# two texts of 12,800 characters, which compression leaves larger than 2 kB
ONE, TWO = (f"(select string_agg(md5('{c}' || i::text), '') from generate_series(1, 400) i)" for c in "ab")

TYPES = {
    "text": "%s",
    "never_null": "%s",
    "bytea": "%s::bytea",
    "json": "json_build_object('a', 1.0, 'b', %s)",
    "jsonb": "jsonb_build_object('a', 1.00, 'b', %s)",
    "text[]": "array[%s, null]",
    "pair": "row(1, %s)::pair",
    "mood[]": "(select array_agg(case when c = 'a' then 'sad' else 'so so' end::mood)"
    " from regexp_split_to_table(%s, '') c)",
    "varchar(20000)": "%s",
}


@pytest.fixture
def twins(db: Database) -> Iterator[tuple[Tap, Tap]]:
    """Two queues for the same tables: the first one logs both images whole."""
    with Tap(db) as both, Tap(db, "p", "d") as once:
        yield both, once


def add(twins: tuple[Tap, Tap], **options: Any) -> None:
    twins[0].add("shop.t", **options)
    twins[1].add("shop.t", unchanged="once", **options)


def same(twins: tuple[Tap, Tap], *tables: str) -> list[str]:
    """The operations of the events, which both queues have alike, as they have the typed rows of these tables."""
    assert [finding for finding in doctor(twins[0].owner) if finding.severity == "error"] == []
    both, once = (tap.batch(*tables) for tap in twins)
    assert changes(once) == changes(both)
    for table in tables:
        assert typed(once.rows[table]) == typed(both.rows[table])
    return [event.op for event in once.events]


def changes(seen: Seen) -> list[Event]:
    """The events but those of DDL, which name versions."""
    return [event for event in seen.events if event.op != "ddl"]


def typed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in {"ev_id", "ev_time"}} for row in rows]


def log_bytes(tap: Tap) -> int:
    return sum(info.log_bytes for info in queues.table_info(tap.owner, tap.queue))


@pytest.mark.parametrize("mode", ["full", "pk"])
def test_types_and_keys(twins: tuple[Tap, Tap], mode: str) -> None:
    app = twins[0]
    names = [f"c{n}" for n in range(len(TYPES))]
    columns = [f"{name} {kind}" for name, kind in zip(names, TYPES, strict=True)]
    app.write(
        "create domain never_null as text not null",
        "create type pair as (a int, b text)",
        "create type mood as enum ('sad', 'so so')",
        f"create table t (id int primary key, n int, {', '.join(columns)},"
        ' "odd ""name" text generated always as (c0 || n) stored)',
    )
    add(twins, mode=mode, **({"include": ["n", *names, 'odd "name']} if mode == "pk" else {}))
    first, second = ([value % large for value in TYPES.values()] for large in (ONE, TWO))
    app.write(
        f"insert into t values (1, 0, {', '.join(first)})",
        "update t set n = 1",
        "update t set id = 2",
        "update t set id = 3, n = null, c0 = c0 || ''",
        f"update t set ({', '.join(names)}) = (select {', '.join(second)})",
        "update t set c0 = null, c2 = null, c4 = '{\"a\": 1.0}'",
        f"update t set c0 = {ONE}, c2 = 'x', c4 = null, n = 5",
        "update t set n = n",
        "delete from t",
    )
    moved = ["update"] * 2 if mode == "full" else ["delete", "insert"] * 2
    assert same(twins, "shop.t") == ["insert", "update", *moved, *["update"] * 4, "delete"]


def test_half_the_log_is_saved(twins: tuple[Tap, Tap]) -> None:
    both, once = twins
    both.write(
        "create table t (id int primary key, n int, doc text, note text)",
        f"insert into t values (1, 0, {ONE}, repeat('a', 100))",
    )
    add(twins)
    both.write(*(f"update t set n = {n}" for n in range(40)))
    assert log_bytes(once) < 0.7 * log_bytes(both)
    once.owner.execute("select gdq.force_tick('p')")
    with once.owner.transaction(force_rollback=True):
        batch = Batch.open(once.owner, "p", "d", 1000)
        assert batch
        row = batch.arrow("shop.t").to_pylist()[0]
        assert row["old_doc"] == row["new_doc"]
        assert len(row["old_doc"]) == 12800
    assert same(twins, "shop.t") == ["update"] * 40


def test_other_writes(twins: tuple[Tap, Tap]) -> None:
    """Partitions, upserts, triggers that change rows again, a row filter, TRUNCATE, DDL amid a batch."""
    app = twins[0]
    app.write(
        "create table t (id int primary key, n int, doc text, other text) partition by range (id)",
        "create table t1 partition of t for values from (0) to (10)",
        "create table t2 (n int, other text, doc text, id int not null)",
        "alter table t attach partition t2 for values from (10) to (20)",
        "create function again() returns trigger language plpgsql as $$ begin"
        " if new.n = 7 then update t set n = 8 where id = new.id; end if; return null; end $$",
        "create function before() returns trigger language plpgsql as $$ begin"
        " if new.n = 90 then new.doc := new.doc || 'x'; end if; return new; end $$",
        "create trigger again after update on t for each row execute function again()",
        "create trigger before before update on t for each row execute function before()",
    )
    add(twins, where="n < 100", origin=True)
    app.write(
        f"insert into t values (1, 1, {ONE}, {TWO}), (2, 1, {TWO}, null)",
        "update t set n = 7",
        "update t set n = 90 where id = 1",
        "update t set id = 11 where id = 1",
        "update t set n = 3, other = 'small' where id = 11",
        "update t set n = 100 where id = 2",
        "update t set n = 4 where id = 2",
        "insert into t values (2, 0, '', '') on conflict (id) do update set n = t.n + 1",
        "alter table t rename doc to body",
        "update t set n = n + 1",
        "alter table t alter body type jsonb using to_jsonb(body)",
        "update t set n = n + 1",
        "alter table t alter body set storage plain, drop column other",
        "update t set n = n + 1, body = to_jsonb('small'::text)",
        "truncate t",
    )
    seen = same(twins)
    assert seen.count("update") == 4 + 1 + 1 + 1 + 6 + 1  # the trigger changes rows again when they have 7
    assert seen.count("ddl") == 3


def test_options(twins: tuple[Tap, Tap]) -> None:
    """The option comes and goes between unread changes, has no effect in format json and in wide rows."""
    both, once = twins
    dsn = once.db.dsn
    wide = ", ".join(f"c{n} text" for n in range(170))
    both.write(
        "create table t (id int primary key, n int, doc text)",
        f"create table w (id int primary key, {wide})",
        f"insert into w values (1, {ONE})",
        f"insert into t values (1, 0, {ONE})",
    )
    for tap in twins:
        tap.add("shop.t")
    both.add("shop.w")
    once.add("shop.w", unchanged="once")
    for n, value in enumerate(("once", "both", "once")):
        both.write(f"update t set n = {n}", "update w set c1 = c1 || 'x'")
        assert (
            CliRunner().invoke(main, ["alter-table", "p", "shop.t", "--unchanged", value, "--dsn", dsn]).exit_code == 0
        )
        assert not queues.alter_table_options(once.owner, "p", "shop.t", unchanged=value)
    both.write("update t set n = 9")
    assert queues.alter_table_options(once.owner, "p", "shop.t", format="json")
    both.write("update t set n = 10")
    found = once.batch()
    assert [e.op for e in found.events if e.tbl == "shop.t"] == ["update", "ddl"] * 3 + ["update", "ddl", "update"]
    assert changes(found) == both.events()
    assert queues.table_info(once.owner, "p")[0].unchanged == "once"
    with pytest.raises(errors.InvalidParameterValue, match="goes with granularity row"):
        queues.alter_table_options(once.owner, "p", "shop.t", granularity="statement")
    with pytest.raises(errors.InvalidParameterValue, match='unknown value of unchanged: "never"'):
        queues.alter_table_options(once.owner, "p", "shop.t", unchanged="never")
