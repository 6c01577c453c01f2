"""gdq.alembic.include_name() keeps an application's Alembic from gdq's tables."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import MetaData, create_engine

from gdq.alembic import include_name
from tests.support.programs import gdq
from tests.support.server import Database


def proposed(db: Database, **options: Any) -> list[str]:
    """What autogenerate would do for an application without tables of its own."""
    with db.connect() as owner:
        engine = create_engine("postgresql+psycopg://", creator=lambda: owner)
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"include_schemas": True, **options})
            return [str(change[0]) for change in compare_metadata(context, MetaData())]


@pytest.mark.long
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
    assert proposed(db).count("remove_table") > 20
    assert proposed(db, include_name=include_name) == ["remove_table"]
