"""delta(): the net change of a table as rows with weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gdq.errors import GdqError, ResyncRequired
from tests.support.arrow import capture, one_batch
from tests.support.server import Database


def test_delta_is_the_net_change(db: Database) -> None:
    with capture(db, "x int primary key, y text, f float8") as connection:
        connection.execute("insert into t select i, 'a', 'NaN' from generate_series(1, 6) i")
        before = Counter(connection.execute("select x, y, f::text from t").fetchall())
        for _ in one_batch(db):
            pass
        connection.execute("update t set y = 'b' where x = 1")
        connection.execute("update t set y = 'a' where x = 1")
        connection.execute("update t set y = null where x = 2")
        connection.execute("update t set x = 10 where x = 3; delete from t where x = 4")
        connection.execute("insert into t values (7, '', 0), (8, 'x', '-0'); delete from t where x = 8")
        after = Counter(connection.execute("select x, y, f::text from t").fetchall())
    for batch in one_batch(db):
        net = Counter[tuple[Any, ...]]()
        for row in batch.delta("t", as_text=["f"]).to_pylist():
            net[row["x"], row["y"], row["f"]] += row["_weight"]
        assert batch.delta("t").num_rows == 6
    assert {key: count for key, count in net.items() if count} == {
        key: after[key] - before[key] for key in before | after if after[key] != before[key]
    }


def test_equal_rows_are_counted(db: Database) -> None:
    with capture(db, "x int") as connection:
        connection.execute("insert into t values (1), (1), (null), (null), (null)")
    for batch in one_batch(db):
        rows = {row["x"]: row["_weight"] for row in batch.delta("t").to_pylist()}
        assert rows == {1: 2, None: 3}


def test_wide_rows_are_joined_again(db: Database) -> None:
    """Two images of many columns do not fit a page, so an update is two log rows."""
    names = [f"c{i}" for i in range(250)]
    with capture(db, ", ".join(f"{name} text" for name in names)) as connection:
        connection.execute("insert into t (c0, c249) values ('first', 'last')")
        connection.execute("update t set c249 = 'changed'")
    for batch in one_batch(db):
        assert sorted(batch.arrow("t").column("ev_op").to_pylist()) == ["I", "n", "o"]
        [row] = batch.delta("t").to_pylist()
        assert (row["c0"], row["c249"], row["_weight"]) == ("first", "changed", 1)
        assert [event.op for event in batch.events()] == ["insert", "update"]


def test_pk_mode_has_keys_and_included_columns(db: Database) -> None:
    with capture(db, "x int primary key, y text, z text", "pk", include=["y"]) as connection:
        connection.execute("insert into t values (1, 'a', 'z'); update t set y = 'b'; delete from t")
    for batch in one_batch(db):
        table = batch.arrow("t").sort_by("ev_id")
        assert table.column_names == ["ev_id", "ev_txid", "ev_time", "ev_op", "key_x", "old_y", "new_y"]
        rows = [tuple(row.values())[3:] for row in table.to_pylist()]
        assert rows == [("I", 1, None, "a"), ("U", 1, "a", "b"), ("D", 1, "b", None)]
        with pytest.raises(GdqError, match="pk mode"):
            batch.delta("t")


def test_delta_refuses_what_no_image_shows(db: Database) -> None:
    with capture(db, "x int") as connection:
        connection.execute("insert into t values (1); truncate t")
    for batch in one_batch(db):
        assert batch.arrow("t").num_rows == 1
        with pytest.raises(ResyncRequired, match="truncated"):
            batch.delta("t")
    with db.connect() as connection:
        connection.execute("alter table t add y int")
    for batch in one_batch(db):
        with pytest.raises(ResyncRequired, match="altered"):
            batch.delta("t")
