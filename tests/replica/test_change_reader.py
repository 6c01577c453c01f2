"""The next table's changes are begun in the source while the target applies the last one's, in another session."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

from gdq.consumers.replica.change_reader import ChangeReader
from gdq.consumers.replica.replica import Replica
from tests.replica.conftest import Pair
from tests.support.waiting import until

pytestmark = pytest.mark.server

_WAITING = "select from pg_locks where not granted and relation = 'number'::regclass"


@pytest.fixture
def reader(pair: Pair) -> Iterator[ChangeReader]:
    pair.make("create table number (n int)")
    with pair.source.connect("su") as source:
        reader = ChangeReader(source)
        yield reader
        reader.close()


def test_rows_that_were_begun(pair: Pair, reader: ChangeReader) -> None:
    first, second = "select generate_series(1, 3)", "select generate_series(1, 200000)"
    with pair.target.connect("su") as target:
        reader.then = [second]
        assert reader.copy_into(first, target, "number") == 3
        assert reader.source.execute("select from pg_stat_activity where application_name like '%/ahead'").rowcount == 1
        reader.then = ["select 7"]
        assert reader.copy_into(second, target, "number") == 200_000
        # something else is wanted first
        assert reader.copy_into(first, target, "number") == 3
        reader.then = []
        assert reader.copy_into("select 7", target, "number") == 1
        assert target.execute("select count(*), sum(n) from number").fetchone() == (200_007, 20_000_100_019)


def test_an_error_is_that_of_the_rows(pair: Pair, reader: ChangeReader) -> None:
    with pair.target.connect("su") as target:
        reader.then = ["select 1 / (n - 99999) from generate_series(1, 100000) n"]
        reader.copy_into("select 1", target, "number")
        with pytest.raises(psycopg.errors.DivisionByZero):
            reader.copy_into(reader.then[0], target, "number")
        reader.then = []
        assert reader.copy_into("select 2", target, "number") == 1
        assert target.execute("select sum(n) from number").fetchone() == (3,)


def test_nobody_waits_behind_a_lock_that_waits_for_the_batch(pair: Pair, reader: ChangeReader) -> None:
    """Somebody waits for a table that the batch's session has locked: who reads ahead would wait for both."""
    pair.run("insert into number values (5)")
    with pair.target.connect("su") as target, pair.source.connect("su") as other:
        wanted = "select n from public.number"
        with reader.source.transaction():
            reader.source.execute("lock table number in access share mode")
            waiter = threading.Thread(target=other.execute, args=("truncate number",))
            waiter.start()
            until(lambda: reader.source.execute(_WAITING).rowcount, "the lock")
            reader.then = [wanted]
            reader.copy_into("select 1", target, "number")
            assert reader.copy_into(wanted, target, "number") == 1
        waiter.join()
        assert target.execute("select sum(n) from number").fetchone() == (6,)


def test_staging_tables_are_kept(pair: Pair) -> None:
    """Batch after batch goes through the same ones: making them anew would bloat the catalogs of the target."""
    for name in ("a", "b"):
        pair.make(f"create table {name} (id int primary key, n numeric)")
    pair.make("create table c (id int primary key)")
    pair.capture("a", "b", "c")
    with Replica(pair.source.dsn, pair.target.su_dsn, "shop", "mirror") as replica:
        seen = set()
        for number in range(3):
            list(replica.run())
            pair.run(*(f"insert into {name} values ({number})" for name in ("a", "b", "c")))
            list(replica.run())
            query = "select array_agg(oid order by oid) from pg_class where relname like 'gdq_replica_stage%'"
            seen.add(str(replica.state.connection.execute(query).fetchone()))
        assert len(seen) == 1
        assert seen.pop().count(",") == 2  # two in the list, and the row's own
    pair.same("a", "b", "c")
