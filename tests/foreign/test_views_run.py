"""The harness makes views of a suite's queries, churns their tables, and finds a view that is wrong."""

from __future__ import annotations

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.installer.install import install
from tests.foreign.compare import differences, is_determined
from tests.foreign.scope_run import ScopeRun
from tests.foreign.scripts import Scope, split_sql
from tests.foreign.tally import Verdict
from tests.support.server import Database

SUITE = """
create table t (id int primary key, grp int, note text);
insert into t select i, i % 3, 'n' || i % 4 from generate_series(1, 12) i;
create table u (grp int, label text);
create materialized view sums as select grp, count(*) as n, sum(id) as s from t group by grp;
select * from sums where n > 1;
select note, note from t join u using (grp);
select grp from t limit 1;
select no_such_column from t;
select 1;
select now(), id from t;
select id from t order by random();
drop table u;
select label from u;
"""


def _run(db: Database) -> list[Verdict]:
    install(db.su_dsn)
    with db.connect("su") as su:
        su.execute("create schema gdq_views")
        with Refresher(db.su_dsn) as refresher:
            return ScopeRun(su, refresher, Scope("own", "suite.sql", split_sql(SUITE)), 1, 1).run()


@pytest.mark.long
def test_each_query_gets_a_verdict(empty_db: Database) -> None:
    outcomes = [one.outcome for one in _run(empty_db)]
    assert sorted(outcomes[:-1]) == sorted(
        ["incremental", "incremental", "incremental", "full", "invalid", "no table", "refused", "refused"]
    )
    assert outcomes[-1] == "invalid"


@pytest.mark.long
def test_a_wrong_view_is_found(empty_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh that does nothing after the first load leaves its views wrong."""
    refresh = Refresher.refresh
    seen: dict[str, object] = {}

    def lazy(self: Refresher, name: str) -> object:
        if name not in seen:
            seen[name] = refresh(self, name)
        return seen[name]

    monkeypatch.setattr(Refresher, "refresh", lazy)
    assert "wrong" in [one.outcome for one in _run(empty_db)]


def test_a_query_that_follows_the_order_of_rows_is_not_determined(db: Database) -> None:
    with db.connect("su") as su:
        su.execute("create table t (a int primary key, b int)")
        su.execute("insert into t select i, i % 3 from generate_series(1, 30) i")
        assert not is_determined(su, "select a from t limit 3", ["public.t"])
        assert is_determined(su, "select b, count(*) from t group by b", ["public.t"])
        su.execute("create table target as select a, b from t where a < 30 union all select 1, 1")
        assert differences(su, "target", "select a, b from t") == (1, 1)
