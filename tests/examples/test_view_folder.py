"""examples/view_folder: views are made in the order in which they read each other, and made anew when they change."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.examples import EXAMPLES, command_folder, make_shop
from tests.support.programs import environment
from tests.support.server import Database


def apply(database: Database, folder: Path, queue: str = "shop") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / "view_folder" / "apply_views.py", folder, "--queue", queue],
        env=environment(database.su_dsn),
        capture_output=True,
        text=True,
        check=False,
    )


def actions(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    """What was done to each view, in order."""
    assert done.returncode == 0, done.stderr
    lines = [line.partition(": ") for line in done.stdout.splitlines() if ": " in line]
    return [(name, rest.partition(",")[0]) for name, _, rest in lines]


@pytest.mark.long
def test_apply_views(empty_db: Database, tmp_path: Path) -> None:
    make_shop(empty_db, command_folder(tmp_path / "bin"))
    folder = tmp_path / "views"
    shutil.copytree(EXAMPLES / "view_folder" / "views", folder)
    with empty_db.connect("su") as su:
        su.execute("insert into orders (customer, amount) values ('Ann', 60), ('Ann', 70), ('Bob', 20)")
        # by name the first one would come first
        assert actions(apply(empty_db, folder)) == [("customers", "full"), ("best_customers", "full")]
        best = "select customer, amount::text from best_customers order by 1"
        assert su.execute(best).fetchall() == [("Ann", "130.00")]
        su.execute("insert into orders (customer, amount) values ('Bob', 100)")
        assert actions(apply(empty_db, folder)) == [("customers", "delta"), ("best_customers", "delta")]
        assert su.execute(best).fetchall() == [("Ann", "130.00"), ("Bob", "120.00")]
        (folder / "best_customers.sql").write_text(
            "select customer, amount from {{ ref('customers') }} where amount > 125"
        )
        assert actions(apply(empty_db, folder)) == [("customers", "none"), ("best_customers", "full")]
        assert su.execute(best).fetchall() == [("Ann", "130.00")]
        (folder / "customers.sql").write_text("select customer, max(amount) as amount from public.orders group by 1")
        assert actions(apply(empty_db, folder)) == [("customers", "full"), ("best_customers", "full")]
        assert su.execute(best).fetchall() == []
    done = apply(empty_db, folder, "none")
    assert (done.returncode, done.stderr) == (1, 'error: queue "none" does not exist\n')


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, "no .sql file there"),
        ({"a": "select * from {{ ref('b') }}"}, "a.sql: ref('b') names no file of the folder"),
        ({"a": "select * from {{ ref('b') }}", "b": "select * from {{ ref('a') }}"}, "these views read each other: "),
        ({"a": "select from"}, "error: "),
    ],
)
def test_one_line_for_a_mistake(db: Database, tmp_path: Path, files: dict[str, str], error: str) -> None:
    with db.connect() as connection:
        connection.execute("select gdq.create_queue('shop')")
    for name, text in files.items():
        (tmp_path / f"{name}.sql").write_text(text)
    done = apply(db, tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert error in line
