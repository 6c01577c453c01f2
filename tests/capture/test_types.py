"""Values of every type come out as they went in, whatever the settings of the session that wrote them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from psycopg import errors, sql

from tests.support.events import Tap

pytestmark = pytest.mark.server

# One value for every type of pg_catalog that a column may have, as its input function takes it. None: a type that
# takes no input, or not in every build.
SAMPLES: dict[str, str | None] = {
    "aclitem": "postgres=r/postgres",
    "bit": "1",
    "bool": "t",
    "box": "(2,3),(0,1)",
    "bpchar": "ab  ",
    "bytea": r"\x00ff5c27",
    "char": "x",
    "cid": "7",
    "cidr": "10.0.0.0/8",
    "circle": "<(1,2),3>",
    "date": "2024-02-29",
    "daterange": "[2024-01-01,2024-02-01)",
    "datemultirange": "{[2024-01-01,2024-02-01),[2025-01-01,)}",
    "float4": "0.1",
    "float8": "0.30000000000000004",
    "gtsvector": None,
    "inet": "10.1.2.3/8",
    "int2": "-32768",
    "int2vector": "1 2 3",
    "int4": "-2147483648",
    "int4range": "[1,5)",
    "int4multirange": "{[1,5),[7,9)}",
    "int8": "-9223372036854775808",
    "int8range": "[1,5)",
    "int8multirange": "{}",
    "interval": "1 year -2 mons 3 days -04:05:06.789",
    "json": '{"a": 1,  "a":2}',
    "jsonb": '{"b": [1.50, null]}',
    "jsonpath": '$."a"[*]?(@ > 1)',
    "line": "{1,2,3}",
    "lseg": "[(0,1),(2,3)]",
    "macaddr": "08:00:2b:01:02:03",
    "macaddr8": "08:00:2b:01:02:03:04:05",
    "money": "-1234.56",
    "name": "a name",
    "numeric": "-12345678901234567890.1234567890",
    "numrange": "(1.10,)",
    "nummultirange": "{(1.10,2],[3.0,)}",
    "oid": "4294967295",
    "oidvector": "1 2",
    "oid8": "18446744073709551615",
    "path": "((0,1),(2,3))",
    "pg_brin_bloom_summary": None,
    "pg_brin_minmax_multi_summary": None,
    "pg_dependencies": None,
    "pg_lsn": "16/B374D848",
    "pg_mcv_list": None,
    "pg_ndistinct": None,
    "pg_node_tree": None,
    "pg_snapshot": "10:20:10,14",
    "point": "(1.5,-2)",
    "polygon": "((0,0),(1,1),(2,0))",
    "refcursor": "a cursor",
    "regclass": "pg_class",
    "regcollation": '"C"',
    "regconfig": "simple",
    "regdatabase": "postgres",
    "regdictionary": "simple",
    "regnamespace": "pg_catalog",
    "regoper": "||/",
    "regoperator": "+(integer,integer)",
    "regproc": "boolin",
    "regprocedure": "now()",
    "regrole": "postgres",
    "regtype": "integer",
    "text": "tab\t quote ' \" backslash \\ line\nend é",
    "tid": "(3,4)",
    "time": "24:00:00",
    "timestamp": "2024-02-29 12:34:56.789012",
    "timestamptz": "2024-02-29 12:34:56.789012+05:30",
    "timetz": "12:34:56.789+05:30",
    "tsquery": "'a' & !'b':*",
    "tsrange": '["2024-01-01 00:00:00",infinity]',
    "tsmultirange": "{}",
    "tstzrange": '["2024-01-01 00:00:00+00",)',
    "tstzmultirange": '{["2024-01-01 00:00:00+00",)}',
    "tsvector": "'a':1A 'b':2",
    "txid_snapshot": "10:20:10,14",
    "uuid": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    "varbit": "10110",
    "varchar": "",
    "xid": "4294967295",
    "xid8": "18446744073709551615",
    "xml": None,
    "cardinal_number": "5",
    "character_data": "abc",
    "sql_identifier": "an id",
    "time_stamp": "2024-02-29 12:34:56+00",
    "yes_or_no": "YES",
}

PINNED = {
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "quote_all_identifiers": "off",
    "xmlbinary": "base64",
    "search_path": "pg_catalog",
}

HOSTILE = {
    "datestyle": "SQL, DMY",
    "intervalstyle": "sql_standard",
    "timezone": "Asia/Kolkata",
    "extra_float_digits": "-15",
    "bytea_output": "escape",
    "quote_all_identifiers": "on",
    "xmlbinary": "hex",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "standard_conforming_strings": "off",
    "escape_string_warning": "off",
    "client_encoding": "LATIN1",
    "row_security": "off",
    "default_transaction_isolation": "serializable",
    "search_path": "pg_temp, public, pg_catalog",
}


def pin(connection: Any, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        connection.execute("select set_config(%s, %s, false)", [name, value])


def set_foreign_money(connection: Any) -> None:
    """lc_monetary of another country, where the machine has one."""
    for locale in ("de_DE.UTF-8", "en_US.UTF-8", "C.UTF-8"):
        try:
            connection.execute("select set_config('lc_monetary', %s, false)", [locale])
        except errors.InvalidParameterValue:
            continue
        return


def test_every_type_of_the_catalog(tap: Tap) -> None:
    found = tap.app.execute(
        "select t.typname, format_type(t.oid, -1), t.typarray <> 0 from pg_type t"
        " where t.typtype in ('b', 'r', 'm', 'd', 'e') and t.typcategory <> 'A' and t.oid < 16384 order by t.oid"
    ).fetchall()
    assert {name for name, _, _ in found} - SAMPLES.keys() == set()
    columns: dict[str, tuple[str, str | None]] = {}
    for number, (name, type_, has_array) in enumerate(found):
        columns[f"c{number}"] = (type_, SAMPLES[name])
        if has_array:
            columns[f"a{number}"] = (f"{type_}[]", None)
    columns["row"] = ("pg_catalog.pg_am", '(1,"a b",2,i)')
    columns["rows"] = ("pg_catalog.pg_am[]", '{"(1,\\"a b\\",2,i)",NULL}')
    tap.write(f"create table t (id int primary key, {', '.join(f'{c} {type_}' for c, (type_, _) in columns.items())})")
    tap.write("grant select on t to gdq_owner")
    tap.add("shop.t")
    tap.app.execute(
        sql.SQL("insert into t values (1, {})").format(sql.SQL(", ").join(sql.Literal(v) for _, v in columns.values()))
    )
    arrays = ", ".join(f"{a} = array[c{a[1:]}, null]" for a in columns if a.startswith("a"))
    tap.write(f"update t set {arrays}", "update t set id = 2")
    pin(tap.app, PINNED)
    text = ", ".join(f"case when num_nulls({c}) = 0 then format('%s', {c}) end" for c in columns)
    written = tap.app.execute(f"select {text} from shop.t".encode()).fetchone()
    assert written

    tap.owner.execute("select gdq.force_tick('q')")
    batch = tap.owner.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
    assert batch
    changes = tap.owner.execute("select old, new from gdq.get_batch(%s, %s) where op = 'update'", batch).fetchall()
    for image in changes[-1]:
        assert {c: as_text(image[c]) for c in columns} == dict(zip(columns, written, strict=True))

    typed = tap.owner.execute("select gdq.batch_sql(%s, %s, 'shop.t')", batch).fetchone()
    assert typed
    pin(tap.owner, PINNED)
    same = ", ".join(
        f"format('%s', r.new_{c}) = format('%s', t.{c}) and format('%s', r.old_{c}) = format('%s', t.{c})"
        for c in columns
    )
    equal = tap.owner.execute(
        f"select {same} from ({typed[0]}) r, shop.t t where r.old_id = 1 and r.new_id = 2".encode()
    )
    assert [c for c, is_same in zip(columns, equal.fetchone() or (), strict=True) if not is_same] == []


def as_text(value: Any) -> str | None:
    """A JSON value as PostgreSQL prints the column."""
    return {True: "t", False: "f"}[value] if isinstance(value, bool) else None if value is None else str(value)


FLOATS = ["-0", "0", "NaN", "Infinity", "-Infinity", "0.1", "5e-324", "1.7976931348623157e+308", "1", "1e22", "-1.5"]


def test_floats(tap: Tap) -> None:
    tap.write("create table t (id int primary key, d float8, r real)")
    tap.add("shop.t")
    tap.write("set extra_float_digits = -15", "insert into t values (0, 0.1::float8 + 0.2::float8, 16777217)")
    for number, value in enumerate(FLOATS, 1):
        real = value if len(value) < 6 or value.endswith("ity") else "3.4028235e+38"
        tap.write(f"insert into t values ({number}, '{value}', '{real}')")
    seen = tap.batch("shop.t")
    doubles = [(e.new or {})["d"] for e in seen.events]
    for double, want in zip(doubles, [0.1 + 0.2, *map(float, FLOATS)], strict=True):
        got = float(double)
        assert got == want or (math.isnan(got) and math.isnan(want))
        assert math.copysign(1, got) == math.copysign(1, want)
    assert [d for d in doubles if isinstance(d, str)] == ["-0", "NaN", "Infinity", "-Infinity"]
    assert [(e.new or {})["r"] for e in seen.events][:7] == [16777216, "-0", 0, "NaN", "Infinity", "-Infinity", 0.1]
    assert [repr(r["new_d"]) for r in seen.rows["shop.t"]][:6] == [
        "0.30000000000000004",
        "-0.0",
        "0.0",
        "nan",
        "inf",
        "-inf",
    ]


VALUES = {
    "timestamp": ["infinity", "-infinity", "294276-12-31 23:59:59.999999", "4713-01-01 00:00:00 BC"],
    "timestamptz": ["infinity", "294276-12-31 23:59:59.999999+00", "4713-01-01 00:00:00+00 BC"],
    "date": ["infinity", "-infinity", "5874897-12-31", "4713-01-01 BC"],
    "numeric": ["NaN", "Infinity", "-Infinity", "1.0", "1.00", "0.000", f"{'9' * 200}.{'9' * 100}", "1000000"],
    "numeric(6,2)": ["1.00", "NaN"],
    "interval": ["178000000 years", "-178000000 years", "1 mon -1 days", "00:00:00"],
    "bytea": [r"\x", r"\x00", r"\xdeadbeef"],
    "text": ["", " ", "NULL", "null", "é", "\\", "%s", "'", '"', "\n"],
    "varchar(3)": ["abc", ""],
    "char(5)": ["ab   ", "     "],
    "bit(3)": ["101"],
    "bit varying(5)": ["", "10"],
    "json": ['{"a":1,"a":2}', " [1 , 2.0]", "null"],
    "jsonb": ["null", "1.0", '"\\u00e9"'],
    "int[]": ["[2:3]={1,2}", "{}", "{NULL}", "{{1,2},{3,4}}"],
    "text[]": ['{"",NULL,"NULL","a,b","\\""}'],
    "int4range": ["empty", "(,)", "[1,2)"],
    "time(3)": ["24:00:00", "00:00:00.123"],
}


def test_values_that_encoders_lose(tap: Tap) -> None:
    names = {type_: f"c{n}" for n, type_ in enumerate(VALUES)}
    tap.write(f"create table t (id serial primary key, {', '.join(f'{c} {t}' for t, c in names.items())})")
    tap.add("shop.t")
    expected = []
    for type_, values in VALUES.items():
        for value in [*values, None]:
            tap.app.execute(
                sql.SQL("insert into t ({}) values ({})").format(sql.Identifier(names[type_]), sql.Literal(value))
            )
            expected.append((type_, value))
    seen = tap.events()
    got = [(type_, (e.new or {})[names[type_]]) for e, (type_, _) in zip(seen, expected, strict=True)]
    assert got == [(t, '"é"' if v == '"\\u00e9"' else v) for t, v in expected]


USER_TYPES = (
    "create type mood as enum ('sad', 'happy')",
    "create domain small as int check (value < 100)",
    "create domain sure as text not null",
    "create domain feeling as mood",
    "create domain smaller as small",
    "create type pair as (a int, b text, f float8, t timestamptz, m money, x bytea, d small, i interval, c regclass)",
    "create domain duo as pair",
    "create type span as range (subtype = timestamptz)",
    "create domain numbers as int[]",
    "create domain moods as mood[]",
)
USER_COLUMNS = {
    "e": ("mood", "happy", "happy"),
    "es": ("mood[]", "{happy,NULL}", "{happy,NULL}"),
    "d": ("small", "7", 7),
    "dd": ("smaller", "8", 8),
    "nn": ("sure", "", ""),
    "fe": ("feeling", "sad", "sad"),
    "p": (
        "pair",
        r'(1,"x ""y""",0.30000000000000004,"2024-02-29 12:00:00+00",-4.5,"\\x00ff",3,"1 day -02:00:00",pg_class)',
        r'(1,"x ""y""",0.30000000000000004,"2024-02-29 12:00:00+00",-$4.50,"\\x00ff",3,"1 day -02:00:00",pg_class)',
    ),
    "empty": ("pair", "(,,,,,,,,)", "(,,,,,,,,)"),
    "ps": ("pair[]", '{"(1,,,,,,,,)",NULL}', '{"(1,,,,,,,,)",NULL}'),
    "du": ("duo", "(,z,,,,,,,)", "(,z,,,,,,,)"),
    "r": (
        "span",
        "[2024-01-01 00:00:00+00,2024-02-01 00:00:00+00)",
        '["2024-01-01 00:00:00+00","2024-02-01 00:00:00+00")',
    ),
    "mr": ("span_multirange", "{}", "{}"),
    "ns": ("numbers", "[0:1]={1,2}", "[0:1]={1,2}"),
    "ms": ("moods", "{sad}", "{sad}"),
    "ds": ("small[]", "{1,2}", "{1,2}"),
}
EXTENSION_COLUMNS = {"citext": ("ci", "Ab"), "hstore": ("hs", '"a"=>NULL, "b"=>"c d"')}


def user_columns(tap: Tap) -> dict[str, tuple[str, str, Any]]:
    there = {name for (name,) in tap.app.execute("select typname from pg_type").fetchall()}
    extension = {c: (t, value, value) for t, (c, value) in EXTENSION_COLUMNS.items() if t in there}
    return USER_COLUMNS | extension


def create_user_table(tap: Tap) -> dict[str, tuple[str, str, Any]]:
    """The table t (id, one column for each user type), holding nothing."""
    tap.write(*USER_TYPES)
    columns = user_columns(tap)
    tap.write(f"create table t (id int primary key, {', '.join(f'{c} {t}' for c, (t, _, _) in columns.items())})")
    return columns


def test_user_types_are_their_own_text(tap: Tap) -> None:
    columns = create_user_table(tap)
    tap.add("shop.t")
    tap.app.execute(
        sql.SQL("insert into t values (1, {})").format(
            sql.SQL(", ").join(sql.Literal(v) for _, v, _ in columns.values())
        )
    )
    tap.write("update t set id = 2", "insert into t (id, nn) values (3, '')")
    _, update, nulls = (e for e in tap.events())
    expected = {c: text for c, (_, _, text) in columns.items()}
    assert update.old == {"id": 1, **expected}
    assert update.new == {"id": 2, **expected}
    assert nulls.new == dict.fromkeys(columns) | {"id": 3, "nn": ""}


@pytest.mark.parametrize("log_format", ["typed", "json"])
def test_log_does_not_hold_on_to_user_types(tap: Tap, log_format: str) -> None:
    create_user_table(tap)
    tap.add("shop.t", format=log_format)
    tap.write("insert into t (id, nn) values (1, 'x')", "drop table t")
    tap.write("drop type moods, duo, pair, span, feeling, mood, smaller, small, sure, numbers")
    assert [e.op for e in tap.events()] == ["insert", "ddl"]


@pytest.mark.parametrize("mode", ["full", "pk"])
def test_hostile_settings_give_equal_images(tap: Tap, mode: str) -> None:
    """The same row, written by a plain session and by one with every setting that text follows turned around."""
    columns = create_user_table(tap)
    builtin = {f"b{n}": v for n, v in enumerate((f"{t}|{v[0]}") for t, v in VALUES.items())}
    tap.write("alter table t " + ", ".join(f"add {c} {v.partition('|')[0]}" for c, v in builtin.items()))
    tap.write("create table seed (like t)")
    values = [*(v for _, v, _ in columns.values()), *(v.partition("|")[2] for v in builtin.values())]
    tap.app.execute(
        sql.SQL("insert into seed values (0, {})").format(sql.SQL(", ").join(sql.Literal(v) for v in values))
    )
    logged = [*columns, *builtin]
    tap.add("shop.t", mode=mode, **({"include": logged} if mode == "pk" else {}))
    rest = ", ".join(logged)
    with tap.db.connect("app") as plain, tap.db.connect("app") as hostile:
        pin(hostile, HOSTILE)
        set_foreign_money(hostile)
        for number, writer in ((1, plain), (2, hostile)):
            writer.execute(f"insert into shop.t select {number}, {rest} from shop.seed".encode())
            writer.execute(f"update shop.t set id = id + 10 where id = {number}".encode())
            writer.execute(f"delete from shop.t where id = {number + 10}".encode())
    pin(tap.owner, HOSTILE | {"default_transaction_isolation": "read committed"})
    set_foreign_money(tap.owner)
    seen = tap.events()
    images = [{k: v for k, v in (image or {}).items() if k != "id"} for e in seen for image in (e.old, e.new)]
    half = len(images) // 2
    assert [e.op for e in seen[: half // 2]] == [e.op for e in seen[half // 2 :]]
    assert images[:half] == images[half:]
    assert all(image.get(c) == text for image in images if image for c, (_, _, text) in columns.items())


def test_settings_do_not_make_a_version(tap: Tap) -> None:
    """DDL that changes no column, in a session that prints names otherwise, leaves the log as it is."""
    create_user_table(tap)
    tap.add("shop.t")
    with tap.db.connect("app") as hostile:
        pin(hostile, HOSTILE)
        hostile.execute("alter table shop.t set (fillfactor = 80)")
    assert tap.events() == []
