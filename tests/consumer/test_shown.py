"""What a person sees of gdq's objects: one line in a shell, a small table in a notebook."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, get_args, get_type_hints

from psycopg.conninfo import conninfo_to_dict

import gdq
from gdq.consumers.compare.figures import Figures
from gdq.consumers.compare.rules import Mismatch
from tests.support.consumed import consumed, insert
from tests.support.server import Database

SECRET = "not-to-be-shown"


def html_of(thing: object) -> str:
    """What a notebook shows of it, with all tags closed."""
    shown: str = thing._repr_html_()  # type: ignore[attr-defined]
    for tag in ("table", "tr", "td", "th", "p"):
        assert len(re.findall(f"<{tag}>", shown)) == shown.count(f"</{tag}>"), tag
    return shown


def rows_of(thing: object) -> int:
    return html_of(thing).count("<tr>") - 1


def event(**changed: Any) -> gdq.Event:
    values: dict[str, Any] = {
        "id": 7,
        "xid": 5,
        "time": datetime(2026, 1, 2, tzinfo=UTC),
        "op": "insert",
        "table": "public.orders",
    }
    return gdq.Event(**(values | {"key": {"id": 1}, "old": None, "new": {"id": 1}} | changed))


def test_the_operations_of_events_are_known_to_type_checkers() -> None:
    known = {"insert", "update", "delete", "truncate", "ddl", "message", "read"}
    assert set(get_args(get_type_hints(gdq.Event)["op"])) == known


def test_a_consumer_and_its_batches_in_one_line_without_the_password(shop: Database) -> None:
    insert(shop, 1, 1)
    password = str(conninfo_to_dict(shop.dsn)["password"])
    with gdq.Consumer(shop.dsn, "q", "c") as consumer:
        assert repr(consumer) == "<Consumer 'c' of queue 'q': idle>"
        for batch in consumer.batches(once=True):
            assert repr(consumer) == "<Consumer 'c' of queue 'q': in a batch>"
            line = r"<Batch \d+ of consumer 'c' of queue 'q': ticks \d+ to \d+, not finished>"
            assert re.fullmatch(line, repr(batch))
            assert password not in repr(consumer) + html_of(batch)
        assert repr(batch).endswith(" finished>")
    assert repr(consumer) == "<Consumer 'c' of queue 'q': closed>"
    named = gdq.Consumer(shop.dsn, "q", "a\nb", member="m")
    with named:
        assert repr(named) == r"<Consumer 'a\nb' of queue 'q', member 'm': idle>"


def test_a_batch_shows_its_first_events_and_loses_none(shop: Database) -> None:
    insert(shop, 1, 30)
    with shop.connect() as connection:
        connection.execute("insert into orders values (0, '<b>bold</b>')")
    with gdq.Consumer(shop.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            events = batch.events()
            first = next(events)
            assert rows_of(batch) == 20
            assert [first, *events] == list(batch.events())
            batch.connection.execute("insert into seen values (1, 'kept')")
            html_of(batch)
            batch.commit()
            assert "<table>" not in html_of(batch)
    with shop.connect() as connection:
        assert connection.execute("select from seen").rowcount == 1
    assert consumed(shop) == []


def test_events_and_what_is_in_them_is_escaped_and_cut() -> None:
    shown = event(new={"note": f"<script>{'x' * 5000}"})
    assert repr(event()) == (
        "Event(id=7, xid=5, time=datetime.datetime(2026, 1, 2, 0, 0, tzinfo=datetime.timezone.utc), op='insert',"
        " table='public.orders', key={'id': 1}, new={'id': 1}, retries=0)"
    )
    assert len(repr(shown)) < 400
    assert "\n" not in repr(event(new={"a": "1\n2"}))
    assert "&lt;script&gt;" in html_of(shown)
    assert "<script" not in html_of(shown)
    assert len(html_of(shown)) < 1000


def test_listings_are_tables_of_twenty_rows(shop: Database) -> None:
    with shop.connect() as connection:
        for number in range(24):
            gdq.register_consumer(connection, "q", f"more{number}")
        consumers = gdq.consumer_info(connection)
        assert rows_of(consumers) == 20
        assert "<p>5 more rows</p>" in html_of(consumers)
        assert rows_of(gdq.queue_info(connection)) == 1
        assert "no rows" in html_of(gdq.view_info(connection))
        insert(shop, 1, 3)
        assert rows_of(gdq.peek(connection, "q", "c", limit=9)) == 3


def test_a_view_shows_neither_its_options_nor_its_text(shop: Database) -> None:
    with shop.connect() as connection:
        query = "select id, note from orders"
        gdq.create_view(connection, "v", "q", query, "public.v", target_dsn=f"host=h.example application_name={SECRET}")
        [view] = gdq.view_info(connection, "v")
    assert view.target_dsn is not None
    assert SECRET in view.target_dsn
    assert repr(view).startswith("ViewInfo(view_name='v', queue_name='q', target=")
    assert len(repr(view)) < 300
    for shown in (repr(view), html_of(view)):
        assert SECRET not in shown


def test_results_of_comparisons() -> None:
    result = gdq.VerifyResult("v", 3, 1, 0)
    assert repr(result) == "VerifyResult(view_name='v', rows=3, missing=1, unexpected=0)"
    assert rows_of(result) == 4
    figures = Figures("d", "18", "2026", 60, ["public.orders"], True, differences=["long"] * 100)
    assert len(repr(figures)) < 200
    assert rows_of(figures) == 6
    mismatch = Mismatch("key", 5, "public.orders", {"id": "<i>"}, event(), event(), rule="why")
    assert "&lt;i&gt;" in html_of(mismatch)
