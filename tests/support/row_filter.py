"""A table for row filters, as a fixture."""

from __future__ import annotations

import pytest

from tests.support.events import Tap

_TABLE = """create table t (id int primary key, region text, amount numeric, vip boolean, day date, code varchar(9),
             big bigint, f float8, at timestamptz, pad char(4), "Odd ""name" int, j jsonb, tags text[], u uuid)"""


@pytest.fixture
def table_t(tap: Tap) -> Tap:
    """The table t, not captured, with columns of many types."""
    tap.write(_TABLE)
    return tap
