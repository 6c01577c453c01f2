"""A target that exists and is not the view's own: create-view refuses it, and drop-view leaves it alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from gdq.conninfo import conninfo_without_password
from tests.support.programs import gdq
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop

pytestmark = pytest.mark.server

SQL = "select status, count(*) from orders group by status"


def views(shop: Shop) -> list[tuple[object, ...]]:
    return shop.execute("select view_name from gdq.view_info() order by 1")


@pytest.mark.long
@pytest.mark.parametrize("place", ["here", "elsewhere", "delta"])
def test_create_view_refuses_a_target_of_another(viewed: Shop, empty_db: Database, tmp_path: Path, place: str) -> None:
    """No view is left behind, and the other's rows stay."""
    target, options, name = "public.w", [], '"public"."w"'
    with conninfo_without_password(empty_db.dsn) as dsn, empty_db.connect() as far:
        if place == "delta":
            target = name = f"delta:{tmp_path}/w"
            write_deltalake(tmp_path / "w", pa.table({"id": [7]}))
        elif place == "elsewhere":
            options = ["--target-dsn", dsn]
            far.execute("create table w as select 7 as id")
        else:
            viewed.execute("create table w as select 7 as id")
        create = ["create-view", "w", "--queue", QUEUE, "--sql", "-", "--target", target, *options]
        done = gdq(*create, dsn=viewed.db.dsn, stdin=SQL)
        assert done.returncode == 1
        assert done.stderr.splitlines()[0].startswith(f"Error: {'' if place == 'delta' else 'table '}{name} exists")
        assert done.stderr.splitlines()[1].startswith("Hint: Choose another target")
        assert views(viewed) == [("v",)]


@pytest.mark.long
def test_drop_view_leaves_a_table_that_took_the_targets_place(viewed: Shop) -> None:
    """A view whose target somebody has replaced can neither be refreshed nor does it hold its name for ever."""
    create = ["create-view", "w", "--queue", QUEUE, "--sql", "-", "--target", "public.w"]
    assert gdq(*create, dsn=viewed.db.dsn, stdin=SQL).returncode == 0
    viewed.execute("create table w as select 7 as id")
    done = gdq("refresh", "w", dsn=viewed.db.dsn)
    assert (done.returncode, "is not the target of view w" in done.stderr) == (1, True)
    done = gdq("drop-view", "w", dsn=viewed.db.dsn)
    assert (done.returncode, done.stderr) == (0, "dropped view w\n")
    assert viewed.execute("select id from w") == [(7,)]
    assert gdq(*create[:-1], "public.x", dsn=viewed.db.dsn, stdin=SQL).returncode == 0
    assert gdq("refresh", "w", dsn=viewed.db.dsn).returncode == 0


def test_a_target_that_cannot_be_reached_is_looked_at_later(viewed: Shop) -> None:
    create = ["create-view", "w", "--queue", QUEUE, "--sql", "-", "--target", "public.w"]
    done = gdq(*create, "--target-dsn", "host=127.0.0.1 port=1 dbname=d", dsn=viewed.db.dsn, stdin=SQL)
    assert done.returncode == 0
    assert done.stderr.splitlines()[0].startswith("the target was not looked at: ")
    assert views(viewed) == [("v",), ("w",)]
