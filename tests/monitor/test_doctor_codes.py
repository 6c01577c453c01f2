"""The codes of the doctor: documented, tested, and those that no other test produces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gdq.monitor.doctor import doctor
from tests.support.events import Tap

ROOT = Path(__file__).parent.parent.parent
SQL = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "gdq" / "sql" / "monitor").glob("*.sql")))
SEVERITIES = {"error", "warning", "note"}


def in_the_sql() -> dict[str, set[str]]:
    """Each code with its severities, as the functions return them."""
    made: dict[str, set[str]] = {}
    for severity, code in re.findall(r"select ((?:case |')[^,]*), '([a-z_]+)',", SQL):
        if found := set(re.findall(r"'(\w+)'", severity)) & SEVERITIES:
            made.setdefault(code, set()).update(found)
    return made


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="an sdist has no documentation")
def test_documentation_lists_every_code_with_its_severities() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    listed = {
        code: set(severities.split(", "))
        for codes, severities in re.findall(r"(?m)^\| ((?:`[a-z_]+`(?:, )?)+) \| ([a-z, ]+) \|", page)
        for code in re.findall(r"\w+", codes)
    }
    assert len(listed) > 30
    assert listed == in_the_sql()


def test_every_code_is_in_a_test() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    text = "\n".join(page for page in pages if "doctor" in page)
    assert [code for code in in_the_sql() if f'"{code}"' not in text] == []


def test_events_that_were_given_up(tap: Tap) -> None:
    tap.owner.execute(
        "insert into gdq.dead_letter (subscription_id, ev_id, ev_txid, ev_time, op, retries)"
        " select 1, g, 3, now(), 'insert', 10 from generate_series(1, 3) g"
    )
    [finding] = doctor(tap.owner)
    assert (finding.severity, finding.code, finding.object) == ("warning", "dead_letters", "c")
    assert "has given up 3 events" in finding.cause


def test_check_that_cannot_look(tap: Tap) -> None:
    """What a check needs is locked: it says so at once, and the others go on."""
    with tap.db.connect(autocommit=False) as other:
        other.execute("lock table gdq.dead_letter")
        tap.owner.execute("set statement_timeout = '10 min'")
        [finding] = doctor(tap.owner)
        assert (finding.severity, finding.code, finding.object) == ("warning", "check_failed", "flow")
    assert doctor(tap.owner) == []


def test_rows_that_are_not_frozen(tap: Tap) -> None:
    with tap.db.connect("su") as su:
        old = "((pg_snapshot_xmax(pg_current_snapshot())::text::bigint - 300000000) & 4294967295)::text::xid"
        su.execute(f"update pg_class set relfrozenxid = {old} where oid = 'gdq.consumer'::regclass".encode())
    [finding] = doctor(tap.owner)
    assert (finding.severity, finding.code, finding.object) == ("warning", "not_frozen", "gdq.consumer")
    assert "VACUUM (FREEZE)" in finding.cure
