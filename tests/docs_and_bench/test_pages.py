"""What README and docs/consumers.md show works as it stands there, block after block."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

import gdq
from tests.support.page import ROOT, blocks, run_page
from tests.support.server import Database

PAGES = ["README.md", "docs/consumers.md"]

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="an sdist has no documentation"),
]


def test_pages_run_as_they_stand(empty_db: Database, tmp_path: Path) -> None:
    for page in PAGES:
        run_page(page, empty_db, tmp_path, Path(sys.executable).parent)
    with empty_db.connect("su") as su:
        assert su.execute("select customer, orders, amount::text from by_customer order by 1").fetchall() == [
            ("Ann", 2, "13.50"),
            ("Bob", 1, "3.00"),
        ]
        assert su.execute("select id, customer from mirror").fetchall() == [(4, "Cid")]
        assert su.execute("select id from live").fetchall() == [(8,)]
        assert su.execute("select customer from sent").fetchall() == [("Eve",)]


class _Killed(BaseException):
    """Ends a program between two statements."""


def test_a_position_kept_elsewhere_is_exact(db: Database, empty_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe writes each change once, also if it is killed after the target's COMMIT or before it."""
    (text,) = (text for _, file, text in blocks("docs/consumers.md") if file == "elsewhere.py")
    recipe = ModuleType("elsewhere")
    exec(compile(text, "elsewhere.py", "exec"), vars(recipe))
    with db.connect() as source, empty_db.connect() as target:
        source.execute("create table orders (id int primary key); select gdq.create_queue('shop')")
        source.execute("select gdq.add_table('shop', 'orders')")
        source.execute("select gdq.register_consumer('shop', 'elsewhere')")
        target.execute("create table orders (id int primary key); create table position (position text)")
        target.execute("insert into position values (null)")
        commit = gdq.Batch.commit
        for number, killed in enumerate(("never", "before", "never", "after", "never")):
            source.execute("insert into orders values (%s)", [number])

            def end(batch: gdq.Batch, when: str = killed) -> None:
                if when == "after":
                    raise _Killed
                commit(batch)

            monkeypatch.setattr(gdq.Batch, "commit", end)
            if killed == "before":
                _fail_once(target)
            try:
                recipe.copy(db.dsn, target)
            except (_Killed, psycopg.errors.RaiseException):
                target.execute("drop trigger if exists t on position")
        assert target.execute("select array_agg(id order by id) from orders").fetchone() == ([0, 1, 2, 3, 4],)


def _fail_once(target: psycopg.Connection[tuple[object, ...]]) -> None:
    """Let the next change of the position fail, so that the target's transaction is rolled back."""
    target.execute(
        """create or replace function stop() returns trigger language plpgsql as $$ begin raise 'stop'; end $$;
           create trigger t before update on position for each row execute function stop()"""
    )
