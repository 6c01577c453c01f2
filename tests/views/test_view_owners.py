"""A view is refreshed with the rights of its owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql

from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import GdqError
from gdq.view.view import drop_view, set_view_owner, view_info
from tests.support.server import PASSWORD, Database
from tests.support.spark import Shop
from tests.support.views import MANY_CHANGES


@contextmanager
def role_named(db: Database, suffix: str, rights: str, table: str = "orders") -> Iterator[str]:
    """A role for one test, which may make tables in public."""
    role = sql.Identifier(f"{db.name}_{suffix}")
    with db.connect("su") as su:
        su.execute(sql.SQL("create role {} login password {} " + rights).format(role, sql.Literal(PASSWORD)))
        may = sql.SQL("grant create on schema public to {0}; grant select on {1} to {0}")
        su.execute(may.format(role, sql.Identifier(table)))
    try:
        yield f"{db.name}_{suffix}"
    finally:
        with db.connect("su") as su:
            su.execute(sql.SQL("drop owned by {0} cascade; drop role {0}").format(role))


NOTES = """create table trace (who name); grant insert on trace to public;
    create function note_down() returns void language plpgsql as
      $$ begin insert into public.trace values (current_user); end $$;
    create function note(int) returns int immutable language plpgsql as
      $$ begin perform public.note_down(); return $1; end $$"""


@pytest.mark.server
@pytest.mark.parametrize(
    "query", ["select id, note(n) as n from orders", "select status, sum(note(n)) as n from orders group by status"]
)
def test_the_code_of_a_view_runs_as_its_owner(viewed: Shop, query: str) -> None:
    """The owner may neither read the logs nor use gdq."""
    viewed.execute(NOTES)
    viewed.view("noted", query, engine="postgres")
    with role_named(viewed.db, "analyst", "") as role:
        with viewed.db.connect("su") as su:
            su.execute(sql.SQL("grant {} to gdq_owner").format(sql.Identifier(role)))
        set_view_owner(viewed.connection, "noted", role)
        assert view_info(viewed.connection, "noted")[0].owner == role
        with Refresher(viewed.db.dsn) as refresher:
            assert refresher.refresh("noted").action == "full"
            for change in MANY_CHANGES[:3]:
                viewed.execute(change)
                assert refresher.refresh_together(["v", "noted"])[1].action == "delta"
            assert refresher.refresh("v").action == "none"
        assert viewed.execute("select distinct who::text from trace") == [(role,)]
        assert viewed.differences("noted", query) == (0, 0)
        owners = viewed.execute(
            "select relname::text, relowner::regrole::text from pg_class where relname in ('v', 'noted')"
        )
        assert dict(owners) == {"v": "gdq_owner", "noted": role}
        with viewed.db.connect("su") as su:
            su.execute(sql.SQL("revoke select on orders from {}").format(sql.Identifier(role)))
        viewed.execute("insert into orders values (2000, 's1', 3)")
        with Refresher(viewed.db.dsn) as refresher, pytest.raises(psycopg.errors.InsufficientPrivilege, match="orders"):
            refresher.refresh("noted")
        drop_view(viewed.connection, "noted")


@pytest.mark.server
def test_a_session_that_may_not_act_as_the_owner(viewed: Shop) -> None:
    with role_named(viewed.db, "analyst", "") as role, viewed.db.connect("su") as su:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not act as"):
            set_view_owner(viewed.connection, "v", role)
        with pytest.raises(psycopg.errors.UndefinedObject):
            set_view_owner(viewed.connection, "v", "nobody")
        set_view_owner(su, "v", role)
        with Refresher(viewed.db.dsn) as refresher, pytest.raises(GdqError, match=f"rights of {role}") as raised:
            refresher.refresh("v")
        assert raised.value.hint is not None
        assert "alter-view v --owner gdq_owner" in raised.value.hint
        set_view_owner(viewed.connection, "v", "gdq_owner")
        with Refresher(viewed.db.dsn) as refresher:
            refresher.refresh("v")


@pytest.mark.server
def test_a_superuser_refreshes_as_the_owner(viewed: Shop) -> None:
    viewed.execute(NOTES)
    viewed.view("noted", "select id, note(n) as n from orders", engine="postgres")
    with Refresher(viewed.db.su_dsn) as refresher:
        refresher.refresh("noted")
        viewed.execute("insert into orders values (2000, 's1', 3)")
        assert refresher.refresh("noted").action == "delta"
    assert viewed.execute("select distinct who::text from trace") == [("gdq_owner",)]
    with Refresher(viewed.db.dsn) as refresher:
        viewed.execute("insert into orders values (2001, 's1', 3)")
        assert refresher.refresh("noted").action == "delta"
