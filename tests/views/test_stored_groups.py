"""Groups of views that are stored: none of their views is ever refreshed alone, wherever their targets are."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from gdq.cli import main
from gdq.consumers.refresh.follow import Follower
from gdq.consumers.refresh.groups import refresh_groups
from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.consumers.refresh.verify import verify_with
from gdq.errors import GdqError
from gdq.view.group import alter_group, create_group, drop_group, group_info
from gdq.view.view import create_view
from tests.support.spark import Shop
from tests.support.views import GROUPED

CHANGE = "update item set n = n + 1, k = (k + 1) % 5 where id % 3 = 0"


def snapshots(shop: Shop) -> dict[str, str]:
    """The snapshot that each target stands for."""
    query = "select view, split_part(position, '/', 3) from gdq_target.position order by 1"
    return dict(shop.execute(query))


def said(shop: Shop, *arguments: str, code: int = 0) -> str:
    """What a command prints that is not data."""
    done = CliRunner().invoke(main, [*arguments, "-d", shop.db.dsn])
    assert done.exit_code == code, done.output
    return done.stderr


def listed(shop: Shop, *arguments: str) -> Any:
    """What a command prints as JSON."""
    done = CliRunner().invoke(main, [*arguments, "--json", "-d", shop.db.dsn])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_from_creation_to_the_end(grouped: Shop) -> None:
    """By the command: who is refreshed with whom, and where it shows."""
    assert said(grouped, "create-group", "g", "rows", "sums") == "created group g\n"
    assert said(grouped, "create-group", "g", "sums", "rows") == "already there: group g\n"
    done = listed(grouped, "refresh")
    assert [(row["view_name"], row["group_name"]) for row in done] == [("rows", "g"), ("sums", "g"), ("tops", None)]
    grouped.execute(CHANGE)
    assert [row["view_name"] for row in listed(grouped, "refresh", "sums")] == ["rows", "sums"]
    assert len(set(snapshots(grouped).values())) == 2
    done = listed(grouped, "refresh", "--full", "rows")
    assert [(row["view_name"], row["action"]) for row in done] == [("rows", "full"), ("sums", "none")]
    assert said(grouped, "alter-group", "g", "--add", "tops", "--remove", "rows") == "changed group g\n"
    assert said(grouped, "alter-group", "g", "--add", "tops") == "already so: group g\n"
    assert [row["view_name"] for row in listed(grouped, "refresh", "--group", "g")] == ["sums", "tops"]
    at = snapshots(grouped)
    assert at["sums"] == at["tops"] != at["rows"]
    (group,) = listed(grouped, "groups")
    assert (group["group_name"], group["queue_name"], group["views"]) == ("g", "q", ["sums", "tops"])
    assert group["last_refresh"]
    assert [run["group_name"] for run in listed(grouped, "view-history", "tops")] == ["g", None]
    status = {view["view_name"]: view["group_name"] for view in listed(grouped, "status")["views"]}
    assert status == {"rows": None, "sums": "g", "tops": "g"}
    dropped = said(grouped, "drop-view", "tops")
    assert dropped.splitlines()[0].endswith('view "tops" was in group "g", which goes on without it')
    assert said(grouped, "drop-group", "g") == "dropped group g\n"
    assert said(grouped, "drop-group", "g") == "already gone: group g\n"
    assert [row["group_name"] for row in listed(grouped, "refresh")] == [None, None]
    missing = said(grouped, "refresh", "--group", "g", code=1)
    assert missing.splitlines()[0] == 'Error: group "g" does not exist'


def test_nobody_refreshes_a_member_alone(grouped: Shop) -> None:
    create_group(grouped.connection, "g", ["rows", "sums"])
    told: list[str] = []
    with Refresher(grouped.db.dsn) as refresher:
        with pytest.raises(GdqError, match="view rows is refreshed with group g only"):
            refresher.refresh("rows")
        with pytest.raises(GdqError, match="view rows is refreshed with group g only"):
            refresher.refresh_together(["rows", "tops"])
        assert verify_with(refresher, "sums").equal
        assert len(set(snapshots(grouped).values())) == 1
        grouped.execute(CHANGE)
        grouped.execute("select gdq.set_view_audit('sums', 0); insert into sums values (99, 1, 1)")
        assert verify_with(refresher, "sums").unexpected == 1
        grouped.execute(CHANGE)

        def failed(name: str, error: Exception) -> None:
            pytest.fail(f"{name}: {error}")

        def report(result: RefreshResult) -> None:
            told.append(result.view_name)

        follower = Follower(refresher, ["sums"], interval=0.05, report=report, failed=failed)
        follower.run(lambda: len(told) >= 2)
        assert told == ["rows", "sums"]
        # one that is new to a group is brought to where the others stand, though nothing has changed
        alter_group(grouped.connection, "g", add=["tops"])
        follower.run(lambda: len(told) >= 5)
        assert told[2:] == ["rows", "sums", "tops"]
        create_view(grouped.connection, "own", "q", GROUPED["rows"], "public.own", engine="postgres")
        follower = Follower(refresher, groups=["g"], interval=0.05, report=report, failed=failed)
        follower.run(lambda: len(told) >= 8)
    assert told[5:] == ["rows", "sums", "tops"]
    assert set(snapshots(grouped)) == {"rows", "sums", "tops"}
    assert len(set(snapshots(grouped).values())) == 1
    assert grouped.differences("rows", GROUPED["rows"]) == (0, 0)


def test_error_of_one_leaves_all_and_names_it(grouped: Shop) -> None:
    grouped.view("shares", "select id, 100 / n as share from item", engine="postgres")
    create_group(grouped.connection, "g", ["rows", "shares"])
    refresh(grouped)
    before = snapshots(grouped)
    grouped.execute("update item set n = 0 where id = 1")
    assert said(grouped, "refresh", code=1) == "Error: view shares: division by zero\n"
    after = snapshots(grouped)
    assert (after["rows"], after["shares"]) == (before["rows"], before["shares"])
    assert after["sums"] != before["sums"]
    assert group_info(grouped.connection, "g")[0].error == "view shares: division by zero"


@pytest.mark.server
def test_refused(grouped: Shop) -> None:
    connection = grouped.connection
    refresh(grouped)
    grouped.capture("rows")
    create_view(connection, "above", "q", "select k from rows", "public.above", engine="postgres")
    refresh(grouped)
    grouped.capture("above")
    create_view(connection, "top", "q", "select count(*) as n from above", "public.top", engine="postgres")
    grouped.execute("select gdq.create_queue('other')")
    grouped.execute("select gdq.add_table('other', 'item')")
    create_view(connection, "foreign", "other", GROUPED["rows"], "public.foreign", engine="postgres")
    refused = psycopg.errors.FeatureNotSupported
    for views, told in (
        (["rows", "above"], 'view "above" reads the target of view "rows"'),
        (["top", "rows"], 'view "top" reads the target of view "rows"'),
        (["rows", "foreign"], 'views "rows" and "foreign" are of two queues'),
    ):
        with pytest.raises(refused, match=told):
            create_group(connection, "g", views)
    with pytest.raises(psycopg.errors.UndefinedObject, match='view "nothing" does not exist'):
        create_group(connection, "g", ["rows", "nothing"])
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        create_group(connection, "g", [])
    assert group_info(connection) == []
    create_group(connection, "g", ["rows", "sums"])
    with pytest.raises(psycopg.errors.DuplicateObject, match='view "sums" is in group "g"'):
        create_group(connection, "h", ["sums", "tops"])
    with pytest.raises(psycopg.errors.DuplicateObject, match="exists with other views"):
        create_group(connection, "g", ["sums"])
    with pytest.raises(refused, match="they cannot be in one group"):
        alter_group(connection, "g", add=["above"])
    # over the target of one of the group: after all of it
    create_group(connection, "a", ["above", "tops"])
    wanted = refresh_groups(connection, ["top", "above", "rows"])
    assert [(unit.group_name, unit.names) for unit in wanted] == [
        ("g", ["rows", "sums"]),
        ("a", ["above", "tops"]),
        (None, ["top"]),
    ]
    assert alter_group(connection, "a", remove=["above", "tops"])
    assert said(grouped, "refresh", "--group", "a", code=1).splitlines()[0] == "Error: group a has no views"
    assert drop_group(connection, "a")


def refresh(shop: Shop) -> None:
    with Refresher(shop.db.dsn) as refresher:
        for unit in refresh_groups(refresher.control):
            refresher.refresh_group(unit)
