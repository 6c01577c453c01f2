"""What `make test` leaves out of tests with many cases, so that it stays short: `make test-all` runs every case."""

from __future__ import annotations

from collections import defaultdict

import pytest

from gdq.embedded.files import MAJORS

_CASES = 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a parametrized test that needs a server two cases are not long, first and last; one on old PostgreSQLs.

    They are the same two in every run, whatever the order that the tests run in.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "server" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0]].append(item)
    places = range(_CASES if config.getoption("--pg") == max(MAJORS) else 1)
    for same in cases.values():
        kept = {round(place * (len(same) - 1) / (_CASES - 1)) for place in places}
        for place, item in enumerate(sorted(same, key=lambda item: item.nodeid)):
            if place not in kept:
                item.add_marker(pytest.mark.long)
