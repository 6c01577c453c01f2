"""The function in docs/operations.md keeps an application's Alembic from gdq's tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import MetaData, create_engine

from tests.support.programs import gdq
from tests.support.server import Database

PAGE = Path(__file__).parent.parent.parent / "docs" / "operations.md"


def proposed(db: Database, **options: Any) -> list[str]:
    """What autogenerate would do for an application without tables of its own."""
    with db.connect() as owner:
        engine = create_engine("postgresql+psycopg://", creator=lambda: owner)
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"include_schemas": True, **options})
            return [str(change[0]) for change in compare_metadata(context, MetaData())]


@pytest.mark.server
@pytest.mark.filterwarnings("ignore:Did not recognize type")
def test_autogenerate_leaves_gdq_alone(db: Database) -> None:
    with db.connect() as owner:
        owner.execute("select gdq.create_queue('q')")
        owner.execute("create table t (id int primary key)")
        owner.execute("select gdq.add_table('q', 't')")
    view = ("create-view", "v", "--queue", "q", "--sql", "-", "--target", "public.v")
    assert gdq(*view, dsn=db.dsn, stdin="select id from public.t").returncode == 0
    assert gdq("refresh", dsn=db.dsn).returncode == 0
    with db.connect() as owner:
        owner.execute("drop table public.v")
    (text,) = re.findall(r"```python\n(def include_name.*?)\n\n\ncontext", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(text, names)
    assert proposed(db).count("remove_table") > 20
    assert proposed(db, include_name=names["include_name"]) == ["remove_table"]
