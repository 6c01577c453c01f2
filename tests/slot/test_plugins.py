"""Lines of test_decoding are taken apart as they were put together, or refused."""

from __future__ import annotations

import pytest

from tests.support.slot_plugins import Change, parse_decoded


def parse(text: str) -> list[Change]:
    return parse_decoded(7, 3, text)


def test_values_that_look_like_the_form() -> None:
    """Columns, quotes, line ends and marks of the plugin's own inside of values and names."""
    text = (
        """table public."t: UPDATE": UPDATE: old-key: "a b"[text]:'old' new-tuple: "a b"[text]:'it''s b[text]:null\n'"""
        """ "c""]:"[public."m]: x"]:'new-tuple: x' d[integer[]]:'{}' e[text]:null f[text]:'null' g[bit]:B'10'"""
        """ h[text]:unchanged-toast-datum i[numeric]:-1e5 j[text]:''"""
    )
    [change] = parse(text)
    assert (change.op, change.table, change.old) == ("update", 'public."t: UPDATE"', {"a b": ("text", "old")})
    assert change.new == {
        "a b": ("text", "it's b[text]:null\n"),
        'c"]:': ('public."m]: x"', "new-tuple: x"),
        "d": ("integer[]", "{}"),
        "e": ("text", None),
        "f": ("text", "null"),
        "g": ("bit", "10"),
        "i": ("numeric", "-1e5"),
        "j": ("text", ""),
    }


def test_truncate_of_several_tables() -> None:
    changes = parse('table s.a, s."b, c": TRUNCATE: restart_seqs cascade')
    assert [(change.op, change.table) for change in changes] == [("truncate", "s.a"), ("truncate", 's."b, c"')]


def test_deleted_row_without_identity() -> None:
    assert parse("table s.a: DELETE: (no-tuple-data)") == [Change(7, 3, "delete", "s.a")]


@pytest.mark.parametrize(
    "text",
    [
        "table s.a: MERGE: id[integer]:1",
        "table s.a: INSERT: id[integer]:1 and more",
        "table s.a: INSERT: v[text]:'open",
        "table s.a: UPDATE: old-key: id[integer]:1 id[integer]:2",
    ],
)
def test_what_is_not_understood_is_an_error(text: str) -> None:
    with pytest.raises(AssertionError, match="not understood"):
        parse(text)
