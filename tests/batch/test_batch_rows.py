"""Typed rows for a login that may not read the logs: as for the owner of gdq, and of its own consumers only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import errors, sql

from gdq import Consumer
from gdq.batch import Batch
from gdq.errors import ResyncRequired, StaleBatch, UnsupportedValue, mapped_errors
from tests.batch.test_arrow import EXACT, HOMELESS
from tests.support.events import Tap
from tests.support.server import PASSWORD, Database, drop_ended

LOGINS = ("typed_mirror", "typed_rival")


@pytest.fixture(scope="module", autouse=True)
def logins(server: Any, template: str) -> Iterator[None]:
    """Two logins with gdq_consumer and nothing else."""
    with psycopg.connect(server.conninfo(), autocommit=True) as su:
        for name in LOGINS:
            su.execute(
                sql.SQL("create role {} login nosuperuser password {} in role gdq_consumer").format(
                    sql.Identifier(name), sql.Literal(PASSWORD)
                )
            )
        yield
        drop_ended(server)
        for name in LOGINS:
            su.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


def login(db: Database, name: str = "typed_mirror") -> psycopg.Connection[Any]:
    return psycopg.connect(db.server.conninfo(name, db.name, PASSWORD), autocommit=True)


@pytest.fixture
def shop(tap: Tap) -> Tap:
    """What the application makes in its schema, both logins may read."""
    for name in LOGINS:
        tap.write(f"grant usage on schema shop to {name}", f"alter default privileges grant select on tables to {name}")
    return tap


def register(tap: Tap, tables: list[str] | None = None) -> None:
    with login(tap.db) as mirror:
        names = "%s::text[]::regclass[]"
        mirror.execute(f"select gdq.register_consumer('q', 'm', tables => {names})".encode(), [tables])


@contextmanager
def batch_of(connection: psycopg.Connection[Any], consumer: str) -> Iterator[Batch]:
    """All that a consumer has not read, and is not to have read."""
    connection.execute("select gdq.force_tick('q')")
    with connection.transaction(force_rollback=True):
        batch = Batch.open(connection, "q", consumer, 10_000_000)
        assert batch
        yield batch


def same(tap: Tap, mirror: psycopg.Connection[Any], table: str, **options: Any) -> tuple[pa.Table, pa.Table]:
    """What the login gets: rows and net change; both are what the owner of gdq gets."""
    found: list[tuple[pa.Table, pa.Table]] = []
    tap.owner.execute("select gdq.force_tick('q')")
    for connection, consumer in ((tap.owner, "c"), (mirror, "m")):
        with batch_of(connection, consumer) as batch:
            rows = batch.arrow(table, **options)
            found.append(
                (rows.sort_by([("ev_id", "ascending"), ("ev_op", "ascending")]), batch.delta(table, **options))
            )
    (rows, delta), (own_rows, own_delta) = found
    assert own_rows.schema == rows.schema
    assert own_rows.to_pylist() == rows.to_pylist()
    order = [(name, "ascending") for name in delta.column_names]
    assert own_delta.schema == delta.schema
    assert own_delta.sort_by(order).to_pylist() == delta.sort_by(order).to_pylist()
    return own_rows, own_delta


@pytest.mark.server
def test_every_type_as_for_the_owner(shop: Tap) -> None:
    values = [(kind, literal) for kind, literals, _ in EXACT for literal in literals]
    values += [(kind, literal) for kind, literal, _ in HOMELESS]
    values += [("real", "'-0'"), ("real", "0.1"), ("float8", "'Infinity'"), ("mood", "'so so'"), ("price", "1.5")]
    columns = ", ".join(f'"c%{i}" {kind}' for i, (kind, _) in enumerate(values))
    shop.write("create type mood as enum ('so so')", "create domain price as numeric(10,2)")
    shop.write(f"create table t ({columns})")
    shop.add("shop.t")
    register(shop)
    literals = ", ".join(literal for _, literal in values)
    nulls = ", ".join("null" for _ in values)
    shop.write(f"insert into t values ({literals})", f"insert into t values ({nulls})", 'update t set "c%2" = 7')
    with login(shop.db) as mirror:
        mirror.execute("set datestyle = german; set timezone = 'Asia/Tokyo'; set intervalstyle = sql_standard")
        mirror.execute("set bytea_output = escape; set extra_float_digits = -5; set search_path = shop")
        rows, delta = same(shop, mirror, "shop.t", unsupported="text")
        assert (rows.num_rows, delta.num_rows) == (4, 2)
        everything = [f"c%{i}" for i in range(len(values))]
        as_text, _ = same(shop, mirror, "shop.t", unsupported="text", as_text=everything)
        assert set(map(str, as_text.schema.types[4:])) == {"string"}
        assert mirror.execute("show timezone").fetchone() == ("Asia/Tokyo",)


@pytest.mark.parametrize("literal", ["'infinity'", "'-infinity'", "'294276-12-31 23:59:59'"])
def test_what_arrow_cannot_hold_is_refused(shop: Tap, literal: str) -> None:
    shop.write("create table t (at timestamptz, d date)")
    shop.add("shop.t")
    register(shop)
    shop.write(
        f"insert into t values ({literal}, {literal}::text::date)"
        if "inf" in literal
        else f"insert into t values ({literal})"
    )
    with login(shop.db) as mirror:
        with batch_of(mirror, "m") as batch, pytest.raises(UnsupportedValue, match='"at"'):
            batch.arrow("shop.t")
        if "inf" in literal:
            with batch_of(mirror, "m") as batch, pytest.raises(UnsupportedValue, match='"d"'):
                batch.arrow("shop.t", as_text=["at"])
        same(shop, mirror, "shop.t", as_text=["at", "d"])


@pytest.mark.parametrize(
    "options", [{"origin": True}, {"granularity": "statement"}, {"format": "json"}, {"exclude": ["pad"]}], ids=str
)
def test_options_of_capture(shop: Tap, options: dict[str, Any]) -> None:
    shop.write("create table t (id int primary key, v text, pad text)")
    shop.add("shop.t", **options)
    register(shop)
    shop.write("insert into t select i, 'v' || i from generate_series(1, 5) i", "update t set v = 'w' where id < 3")
    shop.write("delete from t where id = 5")
    with login(shop.db) as mirror:
        _, delta = same(shop, mirror, "shop.t")
        assert delta.num_rows == 4


def test_mode_pk_and_versions(shop: Tap) -> None:
    shop.write("create table k (id int primary key, v int)", "create table t (id int primary key, v int)")
    shop.add("shop.k", mode="pk", include=["v"])
    shop.add("shop.t")
    register(shop)
    shop.write("insert into k values (1, 1)", "update k set id = 2", "insert into t values (1, 1)")
    shop.write("alter table t add w text", "insert into t values (2, 2, 'two')")
    with login(shop.db) as mirror, batch_of(mirror, "m") as batch:
        rows = batch.arrow("shop.k").sort_by([("ev_id", "ascending"), ("ev_op", "ascending")])
        assert list(zip(rows["ev_op"].to_pylist(), rows["key_id"].to_pylist(), strict=True)) == [
            ("I", 1),
            ("D", 1),
            ("I", 2),
        ]
        with pytest.raises(ResyncRequired):
            batch.delta("shop.t")
    with login(shop.db) as mirror, batch_of(mirror, "m") as batch:
        first, second = batch.versions("shop.t")
        assert batch.delta("shop.t", version=first.id).to_pylist() == [{"id": 1, "v": 1, "_weight": 1}]
        assert batch.delta("shop.t", version=second.id).to_pylist() == [{"id": 2, "v": 2, "w": "two", "_weight": 1}]


def test_a_hundred_thousand_rows(shop: Tap) -> None:
    shop.write("create table t (id int primary key, v text, at timestamptz)")
    shop.add("shop.t")
    register(shop)
    shop.write("insert into t select i, repeat('v', 20), now() from generate_series(1, 100000) i")
    shop.write("update t set v = 'w' where id <= 1000")
    with login(shop.db) as mirror:
        with Consumer(mirror, "q", "m") as consumer:
            for batch in consumer.batches(once=True):
                sizes = [part.num_rows for part in batch.arrow_batches("shop.t")]
                delta = batch.delta("shop.t")
                batch.commit()
        assert (sum(sizes), max(sizes) <= 10_000) == (101_000, True)
        assert (delta.num_rows, pa.compute.sum(delta["id"]).as_py()) == (100_000, 5_000_050_000)
        assert mirror.execute(
            "select last_tick is not null from gdq.consumer_info('q') where consumer_name = 'm'"
        ).fetchone() == (True,)


def test_only_ones_own_batches(shop: Tap) -> None:
    shop.write("create table t (id int primary key)", "create table other (id int primary key)")
    shop.add("shop.t")
    shop.add("shop.other")
    register(shop, ["shop.t"])
    shop.write("insert into t values (1)", "insert into other values (1)")
    reads = {
        "rows": "select * from gdq.batch_rows({}, {}, {}::regclass) as r(ev_id bigint, ev_txid bigint, "
        "ev_time timestamptz, ev_op text, old_id int, new_id int)",
        "gaps": "select * from gdq.batch_gaps({}, {}, {}::regclass)",
        "versions": "select * from gdq.batch_versions({}, {}, {}::regclass)",
    }

    def read(connection: psycopg.Connection[Any], query: str, table: str) -> list[Any]:
        with mapped_errors():
            return connection.execute(sql.SQL(query).format(batch_id, str(token), table)).fetchall()

    with login(shop.db) as mirror, login(shop.db, "typed_rival") as rival:
        mirror.execute("select gdq.force_tick('q')")
        found = mirror.execute("select batch_id, token from gdq.next_batch('q', 'm')").fetchone()
        assert found
        batch_id, token = found
        for what, query in reads.items():
            assert len(read(mirror, query, "shop.t")) == (what != "gaps"), what
            with pytest.raises(errors.InsufficientPrivilege, match="belongs to role typed_mirror"):
                read(rival, query, "shop.t")
            with pytest.raises(errors.UndefinedObject, match="not among those of batch"):
                read(mirror, query, "shop.other")
        for query in ("gdq.batch_sql({}, {}, {}::regclass)", "gdq.table_changes_sql(1, '1:1:', '2:2:')"):
            with pytest.raises(errors.InsufficientPrivilege):
                read(mirror, f"select {query}", "shop.t")
        with pytest.raises(errors.UndefinedColumn):
            read(mirror, reads["rows"].replace("regclass)", "regclass, null, array['old_id', 'id) from t'])"), "shop.t")
        mirror.execute("select from gdq.next_batch('q', 'm')")
        with pytest.raises(StaleBatch):
            read(mirror, reads["rows"], "shop.t")
