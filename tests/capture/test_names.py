"""Odd names of schemas, tables, columns, queues and consumers."""

from __future__ import annotations

import pytest
from psycopg import errors, sql

from tests.support.events import Tap, drain

ODD = [
    "MiXed",
    "with space",
    'quote"quote',
    "apostrophe'",
    "percent%s%I%%",
    "new\nline",
    "back\\slash",
    "dollar$$body$$",
    "dot.dot",
    "semi;colon--comment/*",
    "naïve→名前😀",
    "é" * 31 + "x",
    "x" * 63,
    "select",
    "7",
    "{brace,}",
]
COLUMNS = [
    *ODD,
    *(
        "new",
        "old",
        "NEW",
        "ev_id",
        "ev_op",
        "op",
        "key",
        "id",
        "tg_op",
        "ev_number",
        "r",
        "o",
        "n",
        "log_old",
        "found",
    ),
    *("8", "007", "y" * 59, "y" * 60, "y" * 59 + "zz", "old_7", "ctid_"),
    # reserved by PL/pgSQL, not by SQL
    *("begin", "by", "declare", "execute", "foreach", "if", "loop", "strict", "while", "return", "exception"),
]


def ident(name: str) -> sql.Identifier:
    return sql.Identifier(name)


@pytest.mark.parametrize("mode", ["full", "pk", "split"])
def test_columns_of_odd_names(tap: Tap, mode: str) -> None:
    kind = "pk" if mode == "pk" else "full"
    types = ["int", *["text"] * (len(COLUMNS) - 1)]
    # so wide that an update is logged as two rows
    wide = [sql.SQL("w{} name").format(sql.SQL(str(n))) for n in range(70)] if mode == "split" else []
    columns = sql.SQL(", ").join(
        [sql.SQL("{} {}").format(ident(c), sql.SQL(t)) for c, t in zip(COLUMNS, types, strict=True)] + wide
    )
    key = sql.SQL(", ").join(map(ident, COLUMNS))
    few = sql.SQL(", ").join(map(ident, COLUMNS[:32]))
    tap.app.execute(sql.SQL("create table t ({}, primary key ({}))").format(columns, few))
    tap.add("shop.t", mode=kind, **({"include": COLUMNS[32:]} if mode == "pk" else {}))
    values = {c: (n if n == 0 else f"v{n}") for n, c in enumerate(COLUMNS)}
    tap.app.execute(
        sql.SQL("insert into t ({}) values ({})").format(key, sql.SQL(", ").join(map(sql.Literal, values.values())))
    )
    for column in (COLUMNS[1], COLUMNS[-1]):
        tap.app.execute(sql.SQL("update t set {} = 'changed'").format(ident(column)))
    tap.write("delete from t")
    seen = tap.batch("shop.t")
    keys, rest = set(COLUMNS[:32]), set(COLUMNS[32:])
    if mode == "pk":
        assert [e.op for e in seen.events] == ["insert", "delete", "insert", "update", "delete"]
    else:
        assert [e.op for e in seen.events] == ["insert", "update", "update", "delete"]
    for event in seen.events:
        assert event.key
        assert event.key.keys() == keys
        image = event.new or event.old
        assert image
        assert image.keys() >= (rest if mode == "pk" else keys | rest)
    first = (seen.events[0].key or {}) | (seen.events[0].new or {})
    assert {c: first[c] for c in COLUMNS} == values

    described = tap.owner.execute(
        "select name, log_key, log_old, log_new from gdq.table_columns('q', 'shop.t')"
    ).fetchall()
    logged = {c for row in described for c in row[1:] if c}
    assert logged == seen.rows["shop.t"][0].keys() - {"ev_id", "ev_txid", "ev_time", "ev_op"}
    assert all(len(name.encode()) <= 63 for name in logged)


@pytest.mark.parametrize("mode", ["full", "pk"])
def test_tables_and_schemas_of_odd_names(tap: Tap, mode: str) -> None:
    qualified: dict[str, str] = {}
    with tap.db.connect("su") as su:
        for name in ODD:
            su.execute(sql.SQL("create schema {} authorization app").format(ident(name)))
            su.execute(sql.SQL("grant usage on schema {} to gdq_owner").format(ident(name)))
            table = sql.SQL("{}.{}").format(ident(name), ident(name))
            tap.app.execute(
                sql.SQL("create table {} (id int primary key, {} text) partition by list (id)").format(
                    table, ident(name)
                )
            )
            tap.app.execute(
                sql.SQL("create table {}.{} partition of {} default").format(
                    ident(name), ident(f"leaf {name}"[:20]), table
                )
            )
            (printed,) = su.execute("select format('%%I.%%I', %s::text, %s::text)", [name, name]).fetchone() or ("",)
            qualified[name] = printed
            tap.add(printed, mode=mode)
            tap.app.execute(sql.SQL("insert into {} values (1, 'x')").format(table))
            tap.app.execute(sql.SQL("truncate {}").format(table))
            tap.app.execute(sql.SQL("alter table {} add extra int").format(table))
    seen = tap.events()
    assert [(e.op, e.tbl) for e in seen] == [
        (op, table)
        for table in qualified.values()
        for op in ("insert", "truncate", "ddl")
        # a column that is not logged is no news in pk mode
        if (mode, op) != ("pk", "ddl")
    ]
    listed = tap.owner.execute("select table_name, state from gdq.table_info('q')").fetchall()
    assert sorted(listed) == sorted((table, "ok") for table in qualified.values())
    tap.owner.execute("select gdq.drop_queue('q', true)")


@pytest.mark.long
def test_queues_and_consumers_of_odd_names(tap: Tap) -> None:
    tap.write("create table t (id int primary key)")
    odd = [*ODD[2:6], *ODD[10:13], "null", " "]
    for name in odd:
        tap.owner.execute("select gdq.create_queue(%s)", [name])
        tap.owner.execute("select gdq.add_table(%s, 'shop.t')", [name])
        tap.owner.execute("select gdq.register_consumer(%s, %s)", [name, name])
    tap.write("insert into t values (1)")
    for name in odd:
        assert [row[3:] for row in drain(tap.db, name, name)] == [("insert", "shop.t", {"id": 1}, None, {"id": 1})]
        names = tap.owner.execute("select queue_name, consumer_name from gdq.consumer_info(%s)", [name]).fetchall()
        assert names == [(name, name)]
        assert tap.owner.execute("select gdq.unregister_consumer(%s, %s)", [name, name]).fetchone() == (True,)
        assert tap.owner.execute("select gdq.drop_queue(%s, true)", [name]).fetchone() == (True,)


@pytest.mark.parametrize("name", ["", "x" * 64, None])
def test_names_that_no_queue_and_no_consumer_can_have(tap: Tap, name: str | None) -> None:
    with pytest.raises(errors.InvalidParameterValue, match="a queue name has 1 to 63 bytes"):
        tap.owner.execute("select gdq.create_queue(%s)", [name])
    with pytest.raises(errors.InvalidParameterValue, match="a consumer name has 1 to 63 bytes"):
        tap.owner.execute("select gdq.register_consumer('q', %s)", [name])
