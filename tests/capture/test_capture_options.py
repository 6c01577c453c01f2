"""Options of capture: operations, triggers that fire always, a pinned search_path; none costs a table without it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from psycopg import errors

from gdq.cli import main
from gdq.view.view import create_view
from tests.support.events import Tap


def functions(tap: Tap, table: str) -> dict[str, tuple[str, Any]]:
    """Body and settings of the capture functions of a table, by their last letter."""
    query = """select right(proname, 1), prosrc, proconfig
                 from pg_proc where starts_with(proname, 't' || %s::regclass::oid || '_q')"""
    rows = tap.owner.execute(query, [table]).fetchall()
    return {op: (source, config) for op, source, config in rows}


def test_without_options_a_capture_function_is_one_insert(tap: Tap) -> None:
    """What every write pays: it must not grow when options do."""
    tap.write("create table t (id int primary key, s text)")
    tap.add("shop.t")
    found = functions(tap, "shop.t")
    number = "pg_catalog.nextval('gdq_log.q1_ev'::pg_catalog.regclass)"
    for op, letter, log, columns, values in (
        ("i", "I", "s0", '"row_id", "row_s"', 'NEW."id", NEW."s"'),
        ("d", "D", "s0", '"row_id", "row_s"', 'OLD."id", OLD."s"'),
        ("u", "U", "u0", '"old_id", "old_s", "new_id", "new_s"', 'OLD."id", OLD."s", NEW."id", NEW."s"'),
    ):
        body = (
            f"begin\n  insert into gdq_log.t1_v1_{log} (ev_id, ev_txid, ev_time, ev_op, {columns})\n"
            f"  values ({number}, pg_catalog.txid_current(), pg_catalog.clock_timestamp(), '{letter}', {values});\n"
            "  return null;\nend"
        )
        assert found[op] == (body, None)
    assert "origin" not in found["t"][0]


@pytest.mark.parametrize("mode", ["full", "pk"])
def test_operations(tap: Tap, mode: str) -> None:
    tap.write("create table t (id int primary key, s text)")
    tap.add("shop.t", mode=mode, operations=["update", "insert", "insert"])
    tap.write(
        "insert into t values (1, 'a')",
        "update t set s = 'b'",
        "delete from t",
        "truncate t",
        "alter table t add x int",
    )
    tap.write("insert into t values (2)", "delete from t")
    tap.owner.execute("select gdq.maintain()")
    assert [e.op for e in tap.events() if e.op != "ddl"] == ["insert", "update", "insert"]
    row = tap.owner.execute("select operations, state from gdq.table_info('q')").fetchone()
    assert row == (["insert", "update"], "ok")


def test_operations_of_a_partitioned_table(tap: Tap) -> None:
    tap.write("create table r (id int, p int) partition by list (p)", "create table a partition of r for values in (1)")
    tap.add("shop.r", operations=["delete"])
    tap.write(
        "create table b partition of r for values in (2)",
        "insert into r values (1, 1), (2, 2)",
        "update r set p = 3 - p",
        "delete from b",
        "truncate r",
    )
    # a row that moves to another partition is a delete there
    assert [(e.op, e.old) for e in tap.events() if e.op != "ddl"] == [
        ("delete", {"id": 1, "p": 1}),
        ("delete", {"id": 2, "p": 2}),
        ("delete", {"id": 1, "p": 2}),
    ]


def test_trigger_that_is_missing_is_noticed_also_when_few_are_wanted(tap: Tap) -> None:
    tap.write("create table t (id int primary key)")
    tap.add("shop.t", operations=["insert"])
    assert tap.owner.execute("select count(*) from pg_trigger where tgname like '!gdq%'").fetchone() == (1,)
    tap.write("alter table t disable trigger user")
    assert [(e.new or {})["reason"] for e in tap.events()] == ["a capture trigger of shop.t was dropped or disabled"]


@pytest.mark.parametrize("bad", [[], ["truncate"], ["insert", "select"], ["insert", None]])
def test_operations_that_are_none(tap: Tap, bad: list[str | None]) -> None:
    tap.write("create table t (id int primary key)")
    with pytest.raises(errors.InvalidParameterValue, match="is no list of operations to capture"):
        tap.add("shop.t", operations=bad)


def own_tables(tap: Tap) -> None:
    with tap.db.connect("su") as su:
        su.execute("grant app to gdq_owner")


def test_always_captures_what_a_replication_role_writes(tap: Tap) -> None:
    tap.write("create table t (id int primary key)", "create table u (id int primary key)")
    with pytest.raises(errors.InsufficientPrivilege, match=r"only the owner of shop\.t can have triggers fire always"):
        tap.add("shop.t", always=True)
    own_tables(tap)
    try:
        tap.add("shop.t", always=True)
        tap.add("shop.u")
        with tap.db.connect("su") as su:
            su.execute("set session_replication_role = replica")
            for table in ("t", "u"):
                su.execute(f"insert into shop.{table} values (1)".encode())
                su.execute(f"update shop.{table} set id = 2".encode())
                su.execute(f"truncate shop.{table}".encode())
        assert [(e.op, e.tbl) for e in tap.events()] == [
            ("insert", "shop.t"),
            ("update", "shop.t"),
            ("truncate", "shop.t"),
        ]
        # an ordinary trigger would miss such writes again
        tap.write("alter table t enable trigger user")
        assert [(e.op, (e.new or {})["kind"]) for e in tap.events()] == [("resync", "disarmed")]
        assert tap.owner.execute("select gdq.maintain()").fetchone() == (True,)
        with tap.db.connect("su") as su:
            su.execute("set session_replication_role = replica")
            su.execute("insert into shop.t values (5)")
        assert [(e.op, (e.new or {}).get("kind")) for e in tap.events()] == [("resync", "armed"), ("insert", None)]
    finally:
        with tap.db.connect("su") as su:
            su.execute("revoke app from gdq_owner")


def test_always_on_partitions_made_later(tap: Tap) -> None:
    own_tables(tap)
    try:
        tap.write(
            "create table r (id int, p int) partition by list (p)", "create table a partition of r for values in (1)"
        )
        tap.add("shop.r", always=True)
        tap.write("create table b partition of r for values in (2)")
        with tap.db.connect("su") as su:
            su.execute("set session_replication_role = replica")
            su.execute("insert into shop.r values (1, 1), (2, 2)")
            su.execute("insert into shop.b values (3, 2)")
            su.execute("truncate shop.b")
        assert [(e.op, (e.new or {}).get("id")) for e in tap.events() if e.op != "ddl"] == [
            ("insert", 1),
            ("insert", 2),
            ("insert", 3),
            ("truncate", None),
        ]
        assert tap.owner.execute("select state from gdq.table_info('q')").fetchone() == ("ok",)
    finally:
        with tap.db.connect("su") as su:
            su.execute("revoke app from gdq_owner")


def test_pinned_search_path(tap: Tap) -> None:
    tap.write("create table t (id int primary key)", "create table u (id int primary key)")
    tap.add("shop.t", pin_search_path=True)
    tap.add("shop.u")
    pinned = {op: config for op, (_, config) in functions(tap, "shop.t").items()}
    # The function of TRUNCATE describes its table, whatever the session asks of names: no setting of rows
    truncate = {"t": ["quote_all_identifiers=off"]}
    assert pinned == truncate | {op: ["search_path=pg_catalog, pg_temp"] for op in "iud"}
    assert {op: config for op, (_, config) in functions(tap, "shop.u").items()} == truncate | dict.fromkeys("iud")
    for n, path in enumerate(("shop", "public, shop", "shop, pg_catalog")):
        tap.write(f"set search_path = {path}", f"insert into shop.t values ({n})")
    assert [(e.new or {})["id"] for e in tap.events()] == [0, 1, 2]


def test_command_line_gives_and_shows_the_options(tap: Tap) -> None:
    tap.write("create table t (id int primary key, region text)", "create table u (id int primary key)")
    dsn = ["--dsn", tap.db.dsn]
    run = CliRunner().invoke
    options = ["--where", "region = 'EU'", "--operations", "insert,delete", "--origin", "--pin-search-path"]
    assert run(main, ["add-table", "q", "shop.t", *options, *dsn]).exit_code == 0
    assert run(main, ["add-table", "q", "shop.u", "--granularity", "statement", *dsn]).exit_code == 0
    failed = run(main, ["add-table", "q", "shop.u", "--where", "now() > id", *dsn])
    assert failed.exit_code == 1
    shown = json.loads(run(main, ["tables", "q", "--json", *dsn]).stdout)
    names = ("where", "operations", "granularity", "always", "origin", "pin_search_path")
    every = ["insert", "update", "delete", "truncate"]
    assert [[row[name] for name in names] for row in shown] == [
        ["region = 'EU'", ["insert", "delete"], "row", False, True, True],
        [None, every, "statement", False, False, False],
    ]
    assert run(main, ["register-consumer", "q", "d", "--skip-origin", "a,b", *dsn]).exit_code == 0
    shown = json.loads(run(main, ["consumers", "q", "--json", *dsn]).stdout)
    assert [(row["consumer_name"], row["skip_origin"]) for row in shown] == [("c", None), ("d", ["a", "b"])]


def test_views_need_the_whole_table(tap: Tap) -> None:
    tap.write("create table t (id int primary key)", "create table u (id int primary key)")
    tap.add("shop.t", where="id > 1")
    tap.add("shop.u", operations=["insert"])
    tap.write("grant select on t, u to public")
    for table in ("t", "u"):
        with pytest.raises(errors.FeatureNotSupported, match=f"table shop.{table} is captured in part"):
            create_view(tap.owner, "v", "q", f"select id from shop.{table}", "shop.v")
