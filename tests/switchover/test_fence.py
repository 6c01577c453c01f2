"""The fence refuses the application's writes to a table and its partitions, and lets a replica's pass."""

from __future__ import annotations

import psycopg
import pytest

from gdq.consumers.switchover.fence import lower_fence, place_fence, raise_fence, remove_fence
from tests.support.server import Database

pytestmark = pytest.mark.server

TABLES = """
create schema gdq_target;
create table item (id int, n int) partition by range (id);
create table item_1 partition of item for values from (0) to (10) partition by range (id);
create table item_1_1 partition of item_1 for values from (0) to (5);
create table "Other one" (id int);
insert into item values (1, 1)"""

WRITES = (
    "insert into item values (2, 2)",
    "insert into item_1_1 values (2, 2)",
    "update item_1 set n = 2",
    "delete from item where id = 77",
    "truncate item_1_1",
    'insert into "Other one" values (1) on conflict do nothing',
    'copy "Other one" from stdin',
)


def test_the_fence(empty_db: Database) -> None:
    with empty_db.connect("su") as su, empty_db.connect("su") as writer:
        for statement in TABLES.split(";"):
            su.execute(statement.encode())
        raise_fence(su, "new.example:5432/it's 100% there")
        place_fence(su, ["public.item", 'public."Other one"'])
        # whatever a session's search_path, and where its operators come from
        writer.execute("set search_path = public, pg_catalog")
        for statement in WRITES:
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction) as refused:
                _write(writer, statement)
            assert "takes no writes here: the application writes to new.example:5432/it's 100% there" in str(
                refused.value
            )
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction, match=r"table public\.Other one takes"):
            writer.execute('delete from "Other one"')
        writer.execute("set session_replication_role = replica")
        for statement in WRITES:
            _write(writer, statement)
        writer.execute("reset session_replication_role")

        # a part made later is covered when the fence is placed again
        su.execute("create table item_2 partition of item for values from (10) to (20)")
        place_fence(su, ["public.item"])
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            writer.execute("insert into item_2 values (11, 1)")

        lower_fence(su)
        for statement in WRITES:
            _write(writer, statement)
        remove_fence(su)
        assert su.execute("select from pg_trigger where tgname = '!gdq_fence'").fetchall() == []
        assert su.execute("select from pg_proc where pronamespace = 'gdq_target'::regnamespace").fetchall() == []


def _write(writer: psycopg.Connection[tuple[object, ...]], statement: str) -> None:
    if statement.startswith("copy"):
        with writer.cursor().copy(statement.encode()) as copy:
            copy.write(b"3\n")
    else:
        writer.execute(statement.encode())
