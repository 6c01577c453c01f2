"""Tables that get other names while others of the replica are still being copied."""

from __future__ import annotations

import re

import pytest

from tests.replica.conftest import Pair
from tests.replica.copies_in_parts import brought
from tests.support.programs import gdq, start_gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server

ROWS = 20_000
COPY = ("replicate", "shop", "mirror", "--create", "--chunk-rows", "1000")


def make(pair: Pair, tables: dict[str, int]) -> None:
    for place, (table, rows) in enumerate(tables.items(), 1):
        pair.run(
            f"create table {table} (id int primary key, n int)",
            f"insert into {table} select i, i * {place} from generate_series(1, {rows}) i",
            f"analyze {table}",
        )
    pair.capture(*tables)


def killed_in_parts(pair: Pair, rows: int) -> None:
    """A copy that is killed when its large tables have so many rows in the target."""
    copying = start_gdq(*COPY, "--to", pair.target.su_dsn, dsn=pair.source.dsn)
    until(lambda: copying.poll() is not None or brought(pair) > rows, "a part of the copy")
    copying.kill()
    assert "Error" not in copying.communicate()[1]


def swap(pair: Pair, one: str, two: str, *statements: str) -> None:
    """Have two tables of the source swap their names, and run statements, in one transaction."""
    with pair.source.connect(autocommit=False) as connection:
        for statement in (
            f"alter table {one} rename to other",
            f"alter table {two} rename to {one}",
            f"alter table other rename to {two}",
            *statements,
        ):
            connection.execute(statement.encode())
        connection.commit()


def finish(pair: Pair, *tables: str) -> str:
    """Have the copies end, then apply changes of all tables; what the copies have told."""
    done = gdq(*COPY, "--to", pair.target.su_dsn, dsn=pair.source.dsn)
    assert done.returncode == 0, done.stderr
    pair.run(*(f"update {table} set n = -n where id < 10" for table in tables))
    pair.apply()
    pair.same(*tables)
    return done.stderr


def test_names_that_change_hands_amid_both_copies(pair: Pair) -> None:
    make(pair, {"one": ROWS, "two": ROWS})
    killed_in_parts(pair, ROWS // 2)
    swap(pair, "one", "two", "insert into two values (-1, 1)")
    finish(pair, "one", "two")


def test_a_copied_table_swaps_names_with_one_that_is_copied_in_parts(pair: Pair) -> None:
    make(pair, {"small": 10, "large": ROWS})
    killed_in_parts(pair, ROWS // 4)
    pair.run("update small set n = 0 where id = 1")
    swap(pair, "small", "large", "insert into small values (-1, 1)")
    done = finish(pair, "small", "large")
    assert re.findall("copied .*", done) == [f"copied public.small: {ROWS + 1} rows"], "the other one has its rows"


def test_names_that_change_hands_while_parts_are_copied(pair: Pair) -> None:
    """No part goes to the other table."""
    make(pair, {"one": ROWS, "two": ROWS, "small": 10})
    copying = start_gdq(*COPY, "--to", pair.target.su_dsn, dsn=pair.source.dsn)
    until(lambda: copying.poll() is not None or brought(pair) > ROWS // 4, "a part of the copies")
    swap(pair, "one", "two", "insert into two values (-1, 1)")
    swap(pair, "one", "small", "insert into small values (-1, 1)")
    assert copying.poll() is None
    told = copying.communicate()[1]
    assert copying.returncode == 0, told
    finish(pair, "one", "two", "small")


def test_a_table_takes_the_name_of_one_that_is_dropped_amid_its_copy(pair: Pair) -> None:
    """As a migration does that fills a new table, and drops the old one."""
    make(pair, {"small": 10, "large": ROWS})
    killed_in_parts(pair, ROWS // 4)
    pair.run("drop table small", "alter table large rename to small")
    finish(pair, "small")


def test_names_that_come_and_go_between_two_batches(pair: Pair) -> None:
    """The names between are nobody's: a table gets the one that it has by now."""
    make(pair, {"one": 5, "two": 6})
    pair.apply("--create")
    pair.run("alter table one rename to passing", "alter table two rename to one", "insert into one values (-1, 1)")
    pair.run("select gdq.force_tick('shop')")
    pair.run("alter table one rename to three", "alter table passing rename to one", "delete from one where id = 1")
    pair.apply()
    pair.same("one", "three")


def test_a_copied_table_that_is_renamed_and_altered_amid_the_copy_of_another(pair: Pair) -> None:
    make(pair, {"small": 10, "large": ROWS})
    killed_in_parts(pair, ROWS // 4)
    pair.run("alter table small rename to little", "alter table little add column more int default 5")
    finish(pair, "little", "large")


@pytest.mark.parametrize("others", [("small",), ("small", "middle")])
def test_tables_that_were_made_beforehand_swap_names_before_one_is_copied(pair: Pair, others: tuple[str, ...]) -> None:
    """The target's table goes by the name that the one without a copy had when they were made."""
    names = (*others, "new")
    for name in names:
        pair.make(f"create table {name} (id int primary key, of_{name} int)")
        pair.run(f"insert into {name} values (1, 2)")
    pair.capture(*others)
    pair.apply()
    pair.capture("new")
    aside = [f"alter table {name} rename to passing_{name}" for name in names]
    handed_on = zip(names, (*others[1:], "new", others[0]), strict=True)
    renames = [f"alter table passing_{name} rename to {later}" for name, later in handed_on]
    pair.run("; ".join(["begin", *aside, *renames, "commit"]))
    pair.apply()
    pair.run(*(f"insert into {name} values (2, 3)" for name in names))
    pair.apply()
    pair.same(*names)
