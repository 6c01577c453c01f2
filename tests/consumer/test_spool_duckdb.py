"""DuckDB reads a spool by the program that docs/spool.md shows: the table as of each tick, and where to go on."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gdq
from gdq.consumers.spool import writer
from tests.support.page import blocks
from tests.support.server import Database

pytestmark = pytest.mark.server

_STATEMENTS = (
    "insert into orders select g, 'a', g / 4.0 from generate_series(1, 300) g",
    "update orders set amount = amount + 1 where id % 3 = 0; delete from orders where id % 5 = 0",
    "update orders set id = id + 1000 where id < 20; insert into orders values (7, 'b', 7)",
    "select 1",
    "alter table orders add ready boolean; update orders set ready = true, amount = 0.5 where id % 7 = 0",
    "truncate orders; insert into orders values (1, 'c', 1.25)",
    "update orders set amount = 2.5",
)


@pytest.fixture
def as_of() -> Any:
    (text,) = (block.text for block in blocks("docs/spool.md") if block.file == "as_of.py")
    program = ModuleType("as_of")
    exec(compile(text, "as_of.py", "exec"), vars(program))
    return program.as_of


def test_the_table_as_of_each_tick(db: Database, tmp_path: Path, as_of: Any) -> None:
    folder = str(tmp_path / "spool")
    then: dict[int, Any] = {}
    with db.connect() as connection:
        connection.execute("create table orders (id int primary key, note text, amount numeric(10, 2))")
        connection.execute("select gdq.create_queue('shop'), gdq.add_table('shop', 'orders')")
        gdq.register_consumer(connection, "shop", "spool")
        for statement in _STATEMENTS:
            connection.execute(statement.encode())
            list(writer.spool_batches(connection, "shop", "spool", folder, once=True))
            tick = max(batch.tick_to for batch in gdq.open_spool(folder).batches(once=True))
            then[tick] = connection.execute("select id, amount from orders order by id").fetchall()
    assert len(then) > 4
    for tick, rows in then.items():
        found, position = as_of(folder, tick)
        assert found == rows
        later = [batch.tick_to for batch in gdq.open_spool(folder, after=position).batches(once=True)]
        assert later == [other for other in then if other > tick]
