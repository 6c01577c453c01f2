"""images="net": one row for each key and transaction, whose ev_id has the order of the key's commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gdq.conninfo import conninfo_without_password
from gdq.consumers.spark.reader import GdqReader, table_columns
from gdq.errors import GdqError
from tests.support.spark import QUEUE, Shop, change

pytestmark = pytest.mark.server

Row = dict[str, Any]
Read = Callable[..., list[Row]]


@pytest.fixture
def net(shop: Shop) -> Iterator[Read]:
    """Reads what Spark would read of the changes of a table since the test began."""
    snapshot = "select pg_current_snapshot()::text"
    ((start,),) = shop.execute(snapshot)
    with conninfo_without_password(shop.db.dsn) as dsn:

        def read(table: str = "orders", **more: str) -> list[Row]:
            options = {"dsn": dsn, "queue": QUEUE, "table": table, "images": "net", **more}
            options |= {"from": start, "to": shop.execute(snapshot)[0][0]}
            reader = GdqReader(options, [column.label for column in table_columns(shop.connection, options)])
            batches = [batch for part in reader.partitions() for batch in reader.read(part)]
            return [row for batch in batches for row in batch.to_pylist()]

        yield read


def shown(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Kind, key and note of each row, in the order of the numbers."""
    return [(r["_change_type"], r["id"], r["note"]) for r in sorted(rows, key=lambda r: (r["ev_id"], r["id"]))]


def upserted(rows: list[Row], table: dict[Any, Row]) -> dict[Any, Row]:
    """What a program has that keeps for each key the row with the greatest ev_id."""
    for row in sorted(rows, key=lambda row: row["ev_id"]):
        table.pop(row["id"], None)
        if row["_change_type"] != "delete":
            table[row["id"]] = {name: value for name, value in row.items() if name[0] != "_" and name != "ev_id"}
    return table


def test_what_a_transaction_leaves(shop: Shop, net: Read) -> None:
    shop.capture("orders")
    with shop.connection.transaction():
        shop.execute("insert into orders (id, note) values (1001, 'a')")
        shop.execute("update orders set note = 'b' where id = 1001; update orders set id = 1002 where id = 1001")
        shop.execute("insert into orders (id, note) values (1003, 'gone'); delete from orders where id = 1003")
        shop.execute("delete from orders where id = 1; insert into orders (id, note) values (1, 'again')")
    shop.execute("update orders set id = id + 1000 where id = 1002")
    shop.execute("delete from orders where id = 2; insert into orders (id, note) values (2, 'new')")
    assert shown(net()) == [
        ("insert", 1002, "b"),
        ("update_postimage", 1, "again"),
        ("delete", 1002, "b"),
        ("insert", 2002, "b"),
        ("update_postimage", 2, "new"),
    ]


# A row's own trigger changes it again in the same statement; the log has the second change first.
_AGAIN = """create function again() returns trigger language plpgsql as $$
    begin update orders set note = {} where id = new.id; return null; end $$;
    create trigger a_again after update on orders for each row when (new.note = 'b') execute function again()"""


def test_a_trigger_that_changes_its_own_row_again(shop: Shop, net: Read) -> None:
    shop.execute(_AGAIN.format("'c'"))
    shop.capture("orders")
    shop.execute("update orders set note = 'b' where id <= 2")
    numbers = [row["ev_id"] for row in net()]
    shop.execute("update orders set note = 'd' where id = 1")
    found = net()
    assert sorted((r["id"], r["note"]) for r in found) == [(1, "c"), (1, "d"), (2, "c")]
    assert max(row["ev_id"] for row in found) > max(numbers)
    assert len(set(numbers)) == 2


def test_a_trigger_that_takes_the_change_back(shop: Shop, net: Read) -> None:
    shop.execute(_AGAIN.format("old.note"))
    shop.capture("orders")
    shop.execute("update orders set note = 'b' where id <= 2")
    assert net() == []


def test_equal_to_the_table_whatever_happens(shop: Shop, net: Read) -> None:
    """Also read in parts, each with its own transactions."""
    shop.execute(_AGAIN.format("'c' || new.n"))
    shop.capture("orders")
    columns = "id, status, amount::float8, n, note"
    before = {row[0]: row for row in shop.execute(f"select {columns} from orders")}
    for seed in range(1, 4):
        with shop.connection.transaction():
            change(shop, seed)
            shop.execute("update orders set note = 'b' where mod(id, 3) = 0")
            shop.execute("update orders set id = -id where mod(id, 11) = 0; update orders set note = 'z' where id < 0")
    seen = {}
    for parts in ("8192", "67108864"):
        rows = net(partition_bytes=parts, as_text="amount")
        assert len({(row["_commit_version"], row["id"]) for row in rows}) == len(rows)
        keys = {row["id"] for row in rows}
        kept = {id_: row for id_, row in before.items() if id_ not in keys}
        now = {
            id_: (id_, row["status"], None if row["amount"] is None else float(row["amount"]), row["n"], row["note"])
            for id_, row in upserted(rows, {}).items()
        }
        seen[parts] = kept | now
        assert str(sorted(seen[parts].values())) == str(sorted(shop.execute(f"select {columns} from orders")))


@pytest.mark.parametrize(
    ("table", "options", "told"),
    [
        ("id int primary key deferrable", {}, r"not deferrable: public.t has none for its key \(id\)"),
        ("id int", {}, "public.t has no key"),
        ("id int primary key, big text", {"unchanged": "omit"}, "leave some out"),
    ],
)
def test_tables_that_have_no_such_order(shop: Shop, net: Read, table: str, options: dict[str, str], told: str) -> None:
    shop.execute(f"create table t ({table}); alter table t replica identity full")
    shop.capture("t", **options)
    shop.execute("insert into t values (1)")
    with pytest.raises(GdqError, match=told):
        net("public.t")
