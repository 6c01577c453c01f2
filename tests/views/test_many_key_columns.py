"""Views that are keyed by more columns than an index of PostgreSQL can have."""

from __future__ import annotations

import pytest

from gdq.consumers.refresh.refresher import Refresher
from tests.support.spark import Shop

pytestmark = pytest.mark.server


@pytest.mark.long
@pytest.mark.parametrize("count", [32, 33, 100])
@pytest.mark.parametrize("query", ["select distinct {} from wide", "select {}, count(*) as n from wide group by {}"])
def test_more_columns_than_an_index_has(viewed: Shop, query: str, count: int) -> None:
    names = [f"c{n}" for n in range(count)]
    listed = ", ".join(names)
    viewed.execute(f"create table wide (id int primary key, {', '.join(f'{name} int default 0' for name in names)})")
    viewed.capture("wide")
    view = query.format(listed, listed)
    viewed.view("many", view, engine="postgres")
    viewed.execute("insert into wide (id, c0) select i, i % 7 from generate_series(1, 50) i")
    with Refresher(viewed.db.dsn) as refresher:
        assert viewed.check(refresher, {"many": view})["many"].action == "full"
        viewed.execute("update wide set c1 = 5 where id % 10 = 0")
        viewed.execute("delete from wide where c0 = 3")
        assert viewed.check(refresher, {"many": view})["many"].action == "delta"
