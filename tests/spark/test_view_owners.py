"""A view on Spark is refreshed with the rights of its owner, who may not read the logs."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from gdq.consumers.refresh.refresher import Refresher
from gdq.view.view import set_view_owner
from tests.support.server import PASSWORD
from tests.support.spark import SPARK_MARKS, Shop
from tests.views.test_view_owners import role_named

pytestmark = SPARK_MARKS

QUERIES = {
    "joined": "select o.id, o.n, k.label from orders o join kind k on k.status = o.status",
    "noted": "select id, note(n) as n from orders where note(n) > 2",
    "summed": "select status, count(*) as rows, sum(n) as n from orders group by status",
    "keyed": "select id, note(n) as n, row_number() over (partition by status order by id) as nth from orders",
}
CHANGES = [
    "insert into orders (id, status, n) values (1000, 's1', 8)",
    "update orders set n = n + 1 where id < 20; delete from orders where id = 30",
]


@pytest.mark.parametrize(
    ("name", "admin"),
    [
        pytest.param(name, admin, marks=[] if (name, admin) == ("joined", False) else [pytest.mark.long])
        for admin in (False, True)
        for name in QUERIES
    ],
)
def test_the_owner_need_not_read_logs(shop: Shop, name: str, admin: bool) -> None:
    """An owner in gdq_admin may, so that Spark joins changes."""
    shop.execute("create table kind (status text, label text); insert into kind values ('s1', 'one'), ('s2', 'two')")
    shop.execute(
        "create function leave_role() returns void language plpgsql as"
        " $$ begin reset role; exception when insufficient_privilege or invalid_parameter_value then null; end $$;"
        "create function note(int) returns int immutable language plpgsql as $$ begin perform public.leave_role();"
        " if current_user like 'test%' then return $1; end if; raise 'run as %', current_user; end $$"
    )
    shop.capture("orders")
    shop.capture("kind")
    shop.view(name, QUERIES[name])
    with role_named(shop.db, "analyst", "") as role:
        with shop.db.connect("su") as su:
            su.execute(sql.SQL("grant {} to gdq_owner").format(sql.Identifier(role)))
            su.execute(sql.SQL("grant select on kind to {}").format(sql.Identifier(role)))
            if admin:
                su.execute(sql.SQL("grant gdq_admin to {}").format(sql.Identifier(role)))
        set_view_owner(shop.connection, name, role)
        with Refresher(shop.db.dsn) as refresher:
            assert refresher.refresh(name).action == "full"
            for change in CHANGES:
                shop.execute(change)
                how = ("delta", False) if admin or name == "keyed" else ("full", True)
                result = refresher.refresh(name)
                assert (result.action, "not in gdq_admin" in str(result.reason)) == how, result
                dsn = shop.db.server.conninfo(role, shop.db.name, PASSWORD)
                with psycopg.connect(dsn, autocommit=True) as own:
                    assert Shop(shop.db, own).differences(name, QUERIES[name]) == (0, 0)
