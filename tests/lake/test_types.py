"""What a lake table holds of each type, what it refuses, and the commands for views over one."""

from __future__ import annotations

import datetime as dt
import fcntl
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import IO, Any
from zoneinfo import ZoneInfo

import pytest
from click.testing import CliRunner, Result

from gdq.cli import main
from gdq.consumers.lake import parquet as lake_parquet
from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import GdqError, UnsupportedValue
from gdq.view.lake_name import lake_name
from tests.support.lake import Lakes
from tests.support.spark import QUEUE
from tests.support.view_grammar import SHAPES

# Expressions over few.v, and what they are in the lake; smallint is checked apart.
_VALUES: dict[str, Any] = {
    "v = 1": True,
    "v::bigint * 9007199254740993": 9007199254740993,
    "v / 4::float8": 0.25,
    "'NaN'::float8 + v": float("nan"),
    "v / 8::float4": 0.125,
    "(v + 0.5)::numeric(10,2)": Decimal("1.50"),
    "v + 0.50": "1.5",
    "'a  '::char(3)": "a  ",
    "null::text": None,
    "''::text": "",
    "'\\x00ff'::bytea": b"\x00\xff",
    "date '2026-01-31' + v": dt.date(2026, 2, 1),
    "timestamp '0001-01-01 00:00:00.000001'": dt.datetime(1, 1, 1, 0, 0, 0, 1),
    "timestamptz '1900-01-01 00:00+00:19:32'": dt.datetime(1899, 12, 31, 23, 40, 28, tzinfo=ZoneInfo("UTC")),
    "time '12:00'": "12:00:00",
    "interval '1 day'": "1 day",
    "array[v, null]": "{1,NULL}",
    "'{\"a\": 1}'::jsonb": '{"a": 1}',
    "'glad'::mood": "glad",
    "'11111111-1111-1111-1111-111111111111'::uuid": "11111111-1111-1111-1111-111111111111",
}


def test_types(lakes: Lakes) -> None:
    """Written by a full load, found again by the row that goes."""
    listed = ", ".join(f"{expression} as c{n}" for n, expression in enumerate(_VALUES))
    query = f"select v::smallint as small, {listed} from few"
    lakes.shop.execute("truncate few; insert into few values (1, 1), (2, 1), (3, 5)")
    lakes.view("types", query)
    with Refresher(lakes.shop.db.dsn) as refresher:
        assert refresher.refresh("types").rows_changed == 3
        lakes.shop.execute("delete from few where id > 1")
        result = refresher.refresh("types")
        assert (result.action, result.rows_changed) == ("delta", 2)
    (batch,) = [batch for batch in lakes.open("types").scan() if batch.num_rows]
    (row,) = batch.to_pylist()
    assert row.pop("small") == 1
    assert batch.schema.field("small").type == ("int32" if lakes.kind == "iceberg" else "int16")
    assert str(list(row.values())) == str(list(_VALUES.values()))


@pytest.mark.parametrize("lakes", ["delta"], indirect=True)
def test_key_of_many_texts(lakes: Lakes) -> None:
    """A group that PostgreSQL takes for the one that the lake has under another text."""
    lakes.shop.execute("truncate item; insert into item (id, flag) values (1, true)")
    span = "case when flag then interval '1 day' else interval '24 hours' end"
    lakes.view("spans", f"select {span} as span, count(*) as n from item group by 1")
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("spans")
        lakes.shop.execute("insert into item (id, flag) values (2, false)")
        assert refresher.refresh("spans").action == "delta"
    assert [row["n"] for batch in lakes.open("spans").scan() for row in batch.to_pylist()] == [2]


@pytest.mark.parametrize("lakes", ["delta"], indirect=True)
def test_texts(lakes: Lakes) -> None:
    """In a view of one column, where a NULL is an empty line on the way."""
    texts = [None, "", '"', "a,b", "x\ny\r\n", "\\.", "\\N", "'ü", None]
    lakes.shop.execute("truncate item")
    for number, text in enumerate(texts):
        lakes.shop.execute("insert into item (id, note) values (%s, %s)", number, text)
    lakes.view("texts", "select note from item")
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("texts")
        assert lakes.rows("texts") == Counter(str([text]) for text in texts)
        lakes.shop.execute("delete from item where id in (0, 1, 4)")
        assert refresher.refresh("texts").action == "delta"
    assert lakes.equal("texts", "select note from item")


@pytest.mark.parametrize("lakes", ["delta"], indirect=True)
def test_text_that_begins_as_a_file_may(lakes: Lakes) -> None:
    """As the first value of rows, and as a key."""
    query = "select note, count(*) as n from item group by note"
    lakes.shop.execute("truncate item; insert into item (id, note) values (1, U&'\\FEFFx')")
    lakes.view("marks", query)
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("marks")
        assert lakes.rows("marks") == Counter([str(["\ufeffx", 1])])
        lakes.shop.execute("insert into item (id, note) select 2, note from item")
        assert refresher.refresh("marks").action == "delta"
    assert lakes.rows("marks") == Counter([str(["\ufeffx", 2])])


@pytest.mark.parametrize("lakes", ["delta"], indirect=True)
@pytest.mark.parametrize(
    "odd",
    [
        "(case when v > 100 then 'NaN'::numeric end)::numeric(5,2)",
        "case when v > 100 then date 'infinity' end",
        "case when v > 100 then timestamp '10000-01-01' end",
    ],
)
def test_value_that_does_not_fit(lakes: Lakes, odd: str) -> None:
    lakes.view("odd", f"select id, {odd} as odd from few")
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("odd")
        before = lakes.rows("odd")
        lakes.shop.execute("insert into few values (99, 101)")
        with pytest.raises(UnsupportedValue, match='column "odd"'):
            refresher.refresh("odd")
    assert lakes.rows("odd") == before


@pytest.mark.parametrize(
    "target",
    [
        "delta:",
        "delta:s3://key:secret@bucket/x",
        "delta:abfss://c@a/x?sig=1",
        "iceberg:s3://b/ns.x",
        "iceberg:/w/x",
        "iceberg:x",
    ],
)
def test_bad_target(target: str) -> None:
    with pytest.raises(GdqError):
        lake_name(target)


def test_good_target() -> None:
    assert str(lake_name("delta:s3://bucket/x/")) == "delta:s3://bucket/x"
    assert str(lake_name("parquet:s3://bucket/x")) == "parquet:s3://bucket/x"
    assert str(lake_name("parquet:x")) == f"parquet:{Path.cwd()}/x"
    assert str(lake_name("iceberg:prod/ns.t")) == "iceberg:prod/ns.t"
    assert lake_name("public.x") is None


@pytest.mark.parametrize("lakes", ["delta"], indirect=True)
def test_lake_that_cannot_be_written(lakes: Lakes) -> None:
    """One line that names it, so that other views go on."""
    lakes.view("bag", SHAPES["bag"].query)
    (lakes.folder / "bag").write_text("a file where a folder should be")
    with Refresher(lakes.shop.db.dsn) as refresher, pytest.raises(GdqError, match=r"delta:.*/bag: "):
        refresher.refresh("bag")


def test_columns_that_a_lake_cannot_have(lakes: Lakes) -> None:
    with pytest.raises(GdqError, match="by case"):
        lakes.view("odd", 'select id, v as "ID" from few')
    if lakes.kind != "parquet":
        with pytest.raises(GdqError, match="cannot have a column"):
            lakes.view("odd", 'select id as "a b" from few')


def test_folder_of_another(lakes: Lakes) -> None:
    """A table that is there and is not the view's is left alone."""
    lakes.view("bag", SHAPES["bag"].query)
    lakes.view("other", SHAPES["bag"].query)
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        lakes.shop.execute(
            "update gdq.view set target = regexp_replace(target, 'other$', 'bag') where view_name = 'other'"
        )
        with pytest.raises(GdqError, match="is not the target of view other"):
            refresher.refresh("other")


@pytest.mark.parametrize("lakes", ["parquet"], indirect=True)
def test_two_views_make_the_same_folder(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits for the lock of the other: it is refused, and the folder stays the other's."""
    for name in ("bag", "other"):
        lakes.view(name, SHAPES["bag"].query)
    lakes.shop.execute("update gdq.view set target = replace(target, '/other', '/bag') where view_name = 'other'")
    flock = fcntl.flock

    def overtaken(handle: IO[str], operation: int) -> None:
        monkeypatch.undo()
        with Refresher(lakes.shop.db.dsn) as second:
            second.refresh("other")
        flock(handle, operation)

    with Refresher(lakes.shop.db.dsn) as refresher:
        monkeypatch.setattr(fcntl, "flock", overtaken)
        with pytest.raises(GdqError, match="is not the target of view bag"):
            refresher.refresh("bag")
        assert refresher.refresh("other").action == "none"


@pytest.mark.parametrize("lakes", ["parquet"], indirect=True)
def test_old_versions(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay for an hour, for those who are reading them."""
    lakes.view("bag", SHAPES["bag"].query)
    found = []
    with Refresher(lakes.shop.db.dsn) as refresher:
        for keep in (3600.0, 3600.0, -1.0):
            monkeypatch.setattr(lake_parquet, "PARQUET_KEEP_SECONDS", keep)
            lakes.shop.execute("insert into fact (k) values (1)")
            refresher.refresh("bag")
            found.append(len(list((lakes.folder / "bag").glob("v*"))))
    assert found == [1, 2, 1]


def test_commands(lakes: Lakes, tmp_path: Path) -> None:
    def gdq(*arguments: str) -> Result:
        done = CliRunner().invoke(main, [*arguments, "--dsn", lakes.shop.db.dsn])
        assert done.exit_code == 0, done.output
        return done

    file = tmp_path / "bag.sql"
    file.write_text(SHAPES["bag"].query)
    place = tmp_path / "w" / "ns.bag" if lakes.kind == "iceberg" else tmp_path / "t"
    gdq("create-view", "bag", "--queue", QUEUE, "--sql", str(file), "--target", f"{lakes.kind}:{place}")
    assert "elsewhere" in gdq("explain-view", "bag").output
    gdq("refresh", "bag")
    assert json.loads(gdq("views", "--json").stdout)[0]["target"] == f"{lakes.kind}:{place}"
    assert json.loads(gdq("verify-view", "bag", "--json").stdout)[0]["missing"] == 0
    assert len(json.loads(gdq("view-history", "bag", "--json").stdout)) == 2
    gdq("drop-view", "bag")
    assert not place.exists()
