"""Code of a view that runs in another role's session cannot leave the role of the view's owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

from gdq.conninfo import conninfo_without_password
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.errors import GdqError
from gdq.owner_sql import OwnerSql
from gdq.view.view import create_view, drop_view, set_view_audit, set_view_owner, view_info
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop
from tests.support.views import MANY_CHANGES, make_kinds
from tests.views.test_view_owners import role_named

# flee() tries to become the session's role, and notes each way that works.
ESCAPE = r"""
    create table trace (how text, who name); grant insert on trace to public;
    create function flee_now() returns void language plpgsql as $$
      declare way text;
      begin
        foreach way in array array['reset role', 'set role none', 'set local role to default',
                                   'set session authorization default', 'set role gdq_owner',
                                   'select set_config(''role'', ''none'', true)'] loop
          begin
            execute way;
          exception when others then null;
          end;
          if current_user::text not like '%analyst' then
            insert into public.trace values (way, current_user);
          end if;
        end loop;
      end $$;
    create function flee(v int) returns int immutable language plpgsql as
      $$ begin perform public.flee_now(); return v; end $$;
    create function fleeing() returns trigger language plpgsql as
      $$ begin perform public.flee_now(); return new; end $$;
    create domain small as int check (public.flee(value) < 1000);
    create type pair as (a small, b int)
"""
VIEWS = {
    "rows": "select id, flee(n) as n from orders where flee(n) > 2",
    "cast": "select id, n::small as n, '(1,2)'::pair as p, flee(1) as one from orders",
    "sums": "select flee(n) as k, count(*) as rows, sum(flee(id)) as n from orders group by flee(n)",
    "tops": "select status, max(flee(id)) as top from orders group by status",
    "outer": "select o.id, k.label from orders o left join kind k on k.status = o.status and k.n = flee(o.n)",
    "window": "select id, row_number() over (partition by flee(n) order by id) as nth from orders",
    "distinct": "select distinct flee(n) as n from orders",
}


@contextmanager
def owned_view(shop: Shop, query: str, **options: Any) -> Iterator[str]:
    """A view `w` of a role that the session of the refresh may act as."""
    with role_named(shop.db, "analyst", "") as role:
        with shop.db.connect("su") as su:
            su.execute(sql.SQL("grant {} to gdq_owner").format(sql.Identifier(role)))
            su.execute(sql.SQL("grant select on kind to {}").format(sql.Identifier(role)))
        target = options.pop("target", "public.w")
        create_view(shop.connection, "w", QUEUE, query, target, **{"engine": "postgres", **options})
        set_view_owner(shop.connection, "w", role)
        set_view_audit(shop.connection, "w", 1.0)
        yield role
        drop_view(shop.connection, "w")


@pytest.fixture
def fleeing(viewed: Shop) -> Shop:
    viewed.execute(ESCAPE)
    make_kinds(viewed)
    return viewed


def as_role(shop: Shop, role: str, statement: str) -> None:
    with shop.db.connect("su") as su:
        su.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
        su.execute(statement.encode())


def refresh_and_verify(shop: Shop) -> None:
    with Refresher(shop.db.dsn) as refresher:
        assert refresher.refresh("w").action == "full"
        for change in MANY_CHANGES[:4]:
            shop.execute(change)
            refresher.refresh("w")
        assert verify_with(refresher, "w").equal
    assert shop.execute("select how, who::text from trace") == []
    (view,) = view_info(shop.connection, "w")
    assert view.audits > 0, "an audit runs the owner's code too"


@pytest.mark.server
@pytest.mark.parametrize("name", VIEWS)
def test_no_code_leaves_the_role(fleeing: Shop, name: str) -> None:
    with owned_view(fleeing, VIEWS[name]):
        refresh_and_verify(fleeing)
        assert fleeing.differences("w", VIEWS[name]) == (0, 0)


@pytest.mark.server
def test_the_same_code_leaves_a_role_that_is_only_set(fleeing: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests show does not come from the code being harmless."""
    monkeypatch.setattr(OwnerSql, "run", lambda self, statement: self.connection.execute(statement).rowcount)
    with owned_view(fleeing, VIEWS["rows"]):
        with Refresher(fleeing.db.dsn) as refresher:
            refresher.refresh("w")
        assert fleeing.execute("select distinct who::text from trace") == [("gdq_owner",)]


@pytest.mark.server
def test_a_trigger_of_the_target_does_not_leave_the_role(fleeing: Shop) -> None:
    with owned_view(fleeing, VIEWS["rows"]) as role:
        with Refresher(fleeing.db.dsn) as refresher:
            refresher.refresh("w")
        as_role(fleeing, role, "create trigger t after insert or delete on w for each row execute function fleeing()")
        fleeing.execute(MANY_CHANGES[0])
        with Refresher(fleeing.db.dsn) as refresher:
            assert refresher.refresh("w").action == "delta"
        assert fleeing.execute("select * from trace") == []


@pytest.mark.server
def test_a_deferred_trigger_does_not_leave_the_role(fleeing: Shop) -> None:
    """PostgreSQL 18 runs it as the role that queued it; before, gdq refuses it."""
    with owned_view(fleeing, VIEWS["rows"]) as role:
        with Refresher(fleeing.db.dsn) as refresher:
            refresher.refresh("w")
        deferred = "create constraint trigger t after insert on w deferrable initially deferred"
        as_role(fleeing, role, f"{deferred} for each row execute function fleeing()")
        fleeing.execute(MANY_CHANGES[0])
        with Refresher(fleeing.db.dsn) as refresher:
            if fleeing.connection.info.server_version >= 180000:
                assert refresher.refresh("w").action == "delta"
            else:
                with pytest.raises(GdqError, match=r"trigger t of public\.w is deferrable"):
                    refresher.refresh("w")
        assert fleeing.execute("select * from trace") == []


LEFT = {
    "a function": "execute (select format('alter function pg_temp.%I(text) security invoker', proname) from pg_proc"
    " where pronamespace = pg_my_temp_schema() and proname like 'gdq_run_%' limit 1)",
    "another function": "create function pg_temp.gdq_run_more(text) returns text language sql as 'select $1'",
    "a prepared statement": "execute 'prepare later as select public.flee_now()'",
    "a statement of the session's": "execute 'deallocate all'; execute 'prepare _pg3_0 as select public.flee_now()'",
    "a cursor": "execute 'declare later cursor with hold for select public.flee_now()'",
}


@pytest.mark.server
@pytest.mark.parametrize("what", LEFT)
def test_what_code_leaves_behind_is_refused(fleeing: Shop, what: str) -> None:
    fleeing.execute(
        "create function leave_now() returns void language plpgsql as $$ begin "
        f"if current_user::text like '%analyst' then {LEFT[what]}; end if; end $$;"
        "create function leave(v int) returns int immutable language plpgsql as"
        " $$ begin if v = 77 then perform public.leave_now(); end if; return v; end $$"
    )
    with owned_view(fleeing, "select leave(id) as id from orders"):
        with Refresher(fleeing.db.dsn) as refresher, pytest.raises(Exception, match="left a function, a prepared"):
            refresher.refresh("w")
        assert fleeing.execute("select * from trace") == []


@pytest.mark.server
@pytest.mark.parametrize("name", ["rows", "cast", "sums", "window"])
def test_no_code_leaves_the_role_on_its_way_elsewhere(fleeing: Shop, empty_db: Database, name: str) -> None:
    with conninfo_without_password(empty_db.dsn) as dsn, owned_view(fleeing, VIEWS[name], target_dsn=dsn):
        refresh_and_verify(fleeing)


@pytest.mark.server
@pytest.mark.parametrize("name", ["rows", "sums", "window"])
def test_no_code_leaves_the_role_on_its_way_to_a_lake(fleeing: Shop, name: str, tmp_path: Path) -> None:
    with owned_view(fleeing, VIEWS[name], target=f"delta:{tmp_path}/w"):
        refresh_and_verify(fleeing)
