"""Mode pk takes a key only if it identifies a row at every moment; a key that stops doing so switches capture off."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import errors

from tests.support.events import Tap

pytestmark = pytest.mark.server


def wrong(tap: Tap) -> list[Any]:
    """What doctor says of the queue's tables."""
    return tap.owner.execute("select code, cause from gdq.doctor('q') where severity = 'error'").fetchall()


def refusal(tap: Tap, table: str, **options: Any) -> str:
    """The one line that says why not."""
    with pytest.raises((errors.FeatureNotSupported, errors.InvalidParameterValue)) as error:
        tap.add(table, **options)
    said = error.value.diag
    assert said.message_hint
    assert "\n" not in f"{said.message_primary}{said.message_hint}"
    return f"{said.sqlstate} {said.message_primary}"


@pytest.mark.parametrize("form", ["typed", "json"])
@pytest.mark.parametrize("granularity", ["row", "statement"])
@pytest.mark.parametrize("how", ["deferrable", "deferrable initially deferred"])
def test_mode_pk_refuses_a_deferrable_primary_key(tap: Tap, how: str, granularity: str, form: str) -> None:
    tap.write(f"create table t (id int primary key {how}, k int not null unique)")
    said = refusal(tap, "shop.t", mode="pk", granularity=granularity, format=form)
    assert said.startswith("0A000 the primary key of shop.t is DEFERRABLE")
    tap.add("shop.t", mode="pk", granularity=granularity, format=form, key=["k"])


def test_mode_pk_refuses_a_partitioned_table_with_one(tap: Tap) -> None:
    tap.write("create table t (id int primary key deferrable) partition by range (id)")
    tap.write("create table t1 partition of t for values from (0) to (9)")
    assert refusal(tap, "shop.t", mode="pk").startswith("0A000 the primary key of shop.t is DEFERRABLE")


def test_rows_that_exchange_a_deferrable_key_are_complete_in_mode_full(tap: Tap) -> None:
    tap.write("create table t (id int primary key deferrable, v text)", "insert into t values (1, 'a'), (2, 'b')")
    tap.add("shop.t")
    tap.write("update t set id = 3 - id")
    assert [(e.old, e.new) for e in tap.events()] == [
        ({"id": 1, "v": "a"}, {"id": 2, "v": "a"}),
        ({"id": 2, "v": "b"}, {"id": 1, "v": "b"}),
    ]
    with pytest.raises(errors.FeatureNotSupported, match="is DEFERRABLE"):
        tap.owner.execute("""select gdq.alter_table_options('q', 'shop.t', '{"mode": "pk"}')""")


@pytest.mark.parametrize(
    "replace",
    [
        ["alter table t drop constraint t_pkey, add primary key (id) deferrable"],
        ["alter table t drop constraint t_pkey", "alter table t add constraint t_pkey primary key (id) deferrable"],
        [
            "create unique index u on t (id)",
            "alter table t drop constraint t_pkey, add constraint p primary key using index u deferrable",
        ],
    ],
)
def test_a_key_that_becomes_deferrable_switches_capture_off(tap: Tap, replace: list[str]) -> None:
    tap.write("create table t (id int primary key)")
    tap.add("shop.t", mode="pk")
    tap.write("insert into t values (1), (2)", *replace, "update t set id = 3 - id")
    events = tap.events()
    assert [e.op for e in events][:3] == ["insert", "insert", "resync"]
    assert {e.op for e in events[2:]} == {"resync"}
    tap.owner.execute("select gdq.maintain()")
    ((code, cause),) = wrong(tap)
    assert (code, "is DEFERRABLE" in cause) == ("capture_off", True)
    (name,) = tap.owner.execute("select conname from pg_constraint where contype = 'p' and conname ~ '^(t_pkey|p)$'")
    tap.write(f"alter table t drop constraint {name[0]}, add primary key (id)")
    tap.owner.execute("select gdq.maintain()")
    tap.write("insert into t values (3)")
    assert [e.op for e in tap.events()][-2:] == ["resync", "insert"]


@pytest.mark.parametrize("mode", ["pk", "full"])
def test_a_key_that_is_not_null_for_new_rows_only(tap: Tap, mode: str) -> None:
    """PostgreSQL 18 has NOT NULL ... NOT VALID: rows that were there may hold NULL."""
    if tap.app.info.server_version < 180000:
        with pytest.raises(psycopg.Error):
            tap.write("create table t (k int unique)", "alter table t add constraint sure not null k not valid")
        return
    tap.write("create table t (k int unique)", "insert into t values (null)")
    tap.write("alter table t add constraint sure not null k not valid")
    assert refusal(tap, "shop.t", mode=mode, key=["k"]) == (
        "22023 key column k of shop.t may be null: its NOT NULL is NOT VALID"
    )
    tap.write("delete from t", "alter table t validate constraint sure")
    tap.add("shop.t", mode=mode, key=["k"])
    tap.write("alter table t drop constraint sure, add constraint more not null k not valid")
    ((code, cause),) = wrong(tap)
    assert (code, "is NOT VALID" in cause) == ("capture_off", True)
    assert [e.op for e in tap.events()] == ["resync"]
