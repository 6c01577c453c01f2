"""Views that Spark does not join itself: PostgreSQL finds the keys, Spark's tasks compute their rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gdq.cli import main
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.consumers.spark import key_statements
from gdq.consumers.views.difference import KeySet
from gdq.plan.postgres import PostgresPlan
from gdq.plan.spark.keys import SparkKeyPlan
from gdq.view.cost import BY_COST
from gdq.view.view import create_view, view_history
from tests.support.server import Database
from tests.support.spark import QUEUE, SPARK_MARKS, Shop, make_shop

pytestmark = SPARK_MARKS

RANKED = "select k, id, v, rank() over (partition by k order by v desc, id) as place from sale"


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    statements = [
        "create table sale (id int primary key, k int, v numeric)",
        "insert into sale select i, nullif(i % 20, 0), i % 7 from generate_series(1, 400) i",
        "create index on sale (k)",
        f"select gdq.add_table('{QUEUE}', 'sale')",
        "analyze sale",
    ]
    yield from make_shop(db, statements)


def make(shop: Shop, name: str, query: str) -> None:
    plan = create_view(shop.connection, name, QUEUE, query, f"public.{name}", engine="spark", audit_share=1.0)
    assert isinstance(plan, SparkKeyPlan)


@pytest.mark.long
def test_window_is_computed_for_keys_in_shares(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_statements, "KEYS_EACH", 1)
    make(shop, "ranked", RANKED)
    with Refresher(shop.db.dsn) as refresher:
        assert shop.check(refresher, {"ranked": RANKED})["ranked"].action == "full"
        shop.execute(
            "update sale set v = v + 3 where id in (1, 2, 3, 44); update sale set k = null where id = 5;"
            " delete from sale where id = 6; insert into sale values (500, 19, 2.50)"
        )
        assert shop.check(refresher, {"ranked": RANKED})["ranked"].action == "delta"
        shop.execute("update sale set v = 1 where k = 7")
        assert verify_with(refresher, "ranked").equal
    last, before, first = view_history(shop.connection, "ranked")
    assert [run.kind for run in (first, before, last)] == ["full", "by-key", "by-key"]
    assert first.rows_read == 400
    assert before.delta_rows == 12
    # seven keys of twenty rows each, counted in seven tasks
    assert before.rows_read is not None
    assert before.rows_read >= 7 * 20


@pytest.mark.long
@pytest.mark.parametrize(
    ("query", "kind"),
    [
        ("select k, count(*) as n, sum(id) as ids from sale group by k", "incremental"),
        ("select k, count(*) as n, sum(v) as v from sale group by k", "by-key"),
        ("select a.id, b.v from sale a join sale b on b.id = a.k", "incremental"),
        (RANKED, "by-key"),
    ],
)
def test_history_tells_what_spark_did_and_is_heeded(shop: Shop, query: str, kind: str) -> None:
    plan = create_view(shop.connection, "v", QUEUE, query, "public.v", engine="spark")
    assert not isinstance(plan, PostgresPlan) or isinstance(plan, SparkKeyPlan)
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("v")
        shop.execute("update sale set v = v + 3 where id in (21, 22)")
        assert shop.check(refresher, {"v": query})["v"].action == "delta"
        shop.execute(
            "select gdq.finish_view_run(gdq.start_view_run('v'), 'delta',"
            " kind => 'x', delta_rows => 4, work_seconds => 9999)"
        )
        shop.execute("update sale set v = v + 3 where id in (21, 22)")
        assert shop.check(refresher, {"v": query})["v"].action == "full"
    chosen, _, delta, first = view_history(shop.connection, "v")
    assert str(chosen.reason).startswith(BY_COST)
    assert (first.kind, first.delta_rows, delta.kind, delta.delta_rows) == ("full", None, kind, 4)
    assert first.rows_read is not None
    # groups that the server makes come to Spark as one row each
    assert first.rows_read >= (400 if kind == "incremental" or query == RANKED else 20)
    assert delta.rows_read is not None
    assert delta.rows_read >= 2


def test_explained(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "view.sql"
    file.write_text(RANKED)
    command = ["explain-view", "--queue", QUEUE, "--sql", str(file), "--engine", "spark", "--dsn", shop.db.dsn]
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0, shown.output
    assert "way: keys" in shown.stdout
    assert "spark-window" in shown.stdout
    plan = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert (plan["engine"], plan["way"]) == ("spark", "keys")
    make(shop, "ranked", RANKED)
    stored = CliRunner().invoke(main, ["explain-view", "ranked", "--dsn", shop.db.dsn])
    assert stored.stdout == shown.stdout


def test_no_row_is_computed_by_two_tasks(db: Database) -> None:
    cases = {
        ("integer", "pg_catalog._int8"): True,
        ("numeric(10,2)", "pg_catalog._numeric"): True,
        ("double precision", "pg_catalog._float8"): True,
        ("double precision", "pg_catalog._int8"): False,
        ("real", "pg_catalog._numeric"): False,
    }
    keys = "9007199254740992,9007199254740993"
    with db.connect() as connection:
        for (column, kind), one in cases.items():
            assert key_statements.has_one_key(connection, column, KeySet("x", f"{{{keys}}}", kind, null=False)) == one
        equal = (
            f"select count(*) from unnest('{{{keys}}}'::bigint[]) as k where 9007199254740992::float8 = any (array[k])"
        )
        assert connection.execute(equal.encode()).fetchone() == (2,)
