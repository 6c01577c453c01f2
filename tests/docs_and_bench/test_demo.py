"""The demo, small: it checks itself, and says what it did."""

from __future__ import annotations

import pytest

from gdq.consumers import demo
from gdq.consumers.refresh.refresher import RefreshResult
from tests.support.spark import SPARK_MARKS

pytestmark = SPARK_MARKS


@pytest.mark.long
def test_demo_runs_small(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--scale", "0.002", "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("query EXCEPT ALL view: 0; view EXCEPT ALL query: 0") == len(demo.DEMO_VIEWS)
    assert "REFRESH in PostgreSQL" in said


def results(changed: int) -> dict[str, list[RefreshResult]]:
    first = RefreshResult("v", "full", "first load", 5, 1.0)
    return {"v": [first, RefreshResult("v", "delta" if changed else "none", None, changed, 1.0)]}


def test_demo_fails_when_it_shows_nothing() -> None:
    with pytest.raises(demo.DemoError, match="did not change"):
        demo._judge(demo.DemoLoad(truncations=1), results(0))
    with pytest.raises(demo.DemoError, match="emptied"):
        demo._judge(demo.DemoLoad(truncations=0), results(3))
    demo._judge(demo.DemoLoad(truncations=1), results(3))
