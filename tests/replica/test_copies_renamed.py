"""Tables that get other names while others of the replica are still being copied."""

from __future__ import annotations

import pytest

from tests.replica.conftest import Pair
from tests.replica.copies_in_parts import brought
from tests.support.programs import gdq, start_gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server

ROWS = 20_000
COPY = ("replicate", "shop", "mirror", "--create", "--chunk-rows", "1000")


def make(pair: Pair, tables: dict[str, int]) -> None:
    for table, rows in tables.items():
        pair.run(
            f"create table {table} (id int primary key, n int)",
            f"insert into {table} select i, i from generate_series(1, {rows}) i",
            f"analyze {table}",
        )
    pair.capture(*tables)


def killed_in_parts(pair: Pair, rows: int) -> None:
    """A copy that is killed when its large tables have so many rows in the target."""
    copying = start_gdq(*COPY, "--to", pair.target.su_dsn, dsn=pair.source.dsn)
    until(lambda: copying.poll() is not None or brought(pair) > rows, "a part of the copy")
    copying.kill()
    assert "Error" not in copying.communicate()[1]


def finish(pair: Pair, *tables: str) -> None:
    done = gdq(*COPY, "--to", pair.target.su_dsn, dsn=pair.source.dsn)
    assert done.returncode == 0, done.stderr
    pair.run(*(f"update {table} set n = -n where id < 10" for table in tables))
    pair.apply()
    pair.same(*tables)


def test_names_that_change_hands_amid_both_copies(pair: Pair) -> None:
    make(pair, {"one": ROWS, "two": ROWS})
    killed_in_parts(pair, ROWS // 2)
    with pair.source.connect(autocommit=False) as connection:
        connection.execute("alter table one rename to other; alter table two rename to one")
        connection.execute("alter table other rename to two; insert into two values (-1, 1)")
        connection.commit()
    finish(pair, "one", "two")


def test_a_copied_table_that_is_renamed_and_altered_amid_the_copy_of_another(pair: Pair) -> None:
    make(pair, {"small": 10, "large": ROWS})
    killed_in_parts(pair, ROWS // 4)
    pair.run("alter table small rename to little", "alter table little add column more int default 5")
    finish(pair, "little", "large")
