"""Commands that wait for a lock of others say for whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.replica.conftest import Pair
from tests.support.programs import start_gdq

pytestmark = pytest.mark.server


@contextmanager
def waiting(pair: Pair, *arguments: str) -> Iterator[str]:
    """The first line of a command that waits, which ends well after the block, "" if it did not wait."""
    with start_gdq(*arguments, "--to", pair.target.su_dsn, dsn=pair.reader_dsn) as program:
        assert program.stderr is not None
        told = list[str]()
        try:
            for line in program.stderr:
                told.append(line)
                if line.startswith("waiting"):
                    break
            yield next((line for line in told if line.startswith("waiting")), "")
            told.append(program.communicate()[1])
            assert program.returncode == 0, told
        finally:
            program.kill()


@pytest.fixture
def item(fed: Pair) -> Pair:
    fed.make("create table item (id int primary key, n int)")
    fed.run("insert into item values (1, 1), (2, 2)")
    fed.capture("public.item")
    fed.apply()
    return fed


def test_a_row_of_the_target(item: Pair) -> None:
    item.run("update item set n = 5")
    with item.target.connect(autocommit=False, application_name="somebody") as other:
        other.execute("update item set n = 7 where id = 2")
        with waiting(item, "replicate", "shop", "mirror", "--source", item.fed_by) as line:
            assert line.startswith(f"waiting in database {item.target.name} for process {other.info.backend_pid} (")
            assert "(somebody, idle in transaction)" in line
            other.rollback()
    item.same("item")


def test_a_prepared_transaction_and_other_commands(pair: Pair) -> None:
    pair.make("create table item (id int primary key, n int)")
    pair.capture("item")
    pair.apply()
    for place, arguments in (
        (pair.target, ("snapshot", "item")),
        (pair.source, ("compare-tables", "shop", "mirror")),
    ):
        with place.connect() as connection:
            connection.execute("begin; truncate item; prepare transaction 'held'")
            with waiting(pair, *arguments) as line:
                assert line.startswith(f'waiting in database {place.name} for the prepared transaction "held"')
                assert "a lock of table public.item" in line
                connection.execute("rollback prepared 'held'")


@pytest.mark.parametrize("fed", ["slot"], indirect=True)
def test_a_slot_behind_a_prepared_truncate(item: Pair) -> None:
    """Newer servers wait for the table's lock where they send its changes; PostgreSQL 15 does not."""
    item.run("insert into item values (3, 3)", "begin; truncate item; prepare transaction 'held'")
    try:
        with waiting(item, "replicate", "shop", "mirror", "--source", "slot") as line:
            item.run("rollback prepared 'held'")
    finally:
        with item.source.connect("su") as su:
            version = su.info.server_version
            if su.execute("select from pg_prepared_xacts where database = current_database()").rowcount:
                su.execute("rollback prepared 'held'")
    assert 'for the prepared transaction "held"' in line or (not line and version < 160000)
    item.same("item")
