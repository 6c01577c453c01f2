"""docs/from-pgq.md leaves no function of PgQ out, and with from-londiste.md names none of gdq's that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.server import Database

PAGE = Path(__file__).parent.parent.parent / "docs" / "from-pgq.md"
LONDISTE = PAGE.with_name("from-londiste.md")

# pg_proc of pgq 3.5, but for its two trigger functions of former names.
_PGQ = """_grant_perms_from batch_event_sql batch_event_tables batch_retry create_queue current_event_table drop_queue
event_retry event_retry_raw find_tick_helper finish_batch force_tick get_batch_cursor get_batch_events get_batch_info
get_consumer_info get_queue_info grant_perms insert_event insert_event_raw jsontriga logutriga maint_operations
maint_retry_events maint_rotate_tables_step1 maint_rotate_tables_step2 maint_tables_to_vacuum next_batch
next_batch_custom next_batch_info quote_fqname register_consumer register_consumer_at seq_getval seq_setval
set_queue_config sqltriga ticker tune_storage unregister_consumer upgrade_schema version"""
PGQ = re.findall(r"\w+", _PGQ)

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no documentation")


def rows(page: Path = PAGE) -> list[list[str]]:
    """The cells of every table row."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_function_of_pgq_is_there() -> None:
    named = [name for row in rows() for name in re.findall(r"`pgq\.(\w+)`", row[0])]
    assert sorted(named) == PGQ


def test_every_function_of_gdq_exists(db: Database) -> None:
    named = sorted({name for row in rows() + rows(LONDISTE) for name in re.findall(r"\bgdq\.(\w+)\(\)", row[1])})
    assert len(named) > 30
    with db.connect() as owner:
        known = owner.execute("select proname from pg_proc where pronamespace = 'gdq'::regnamespace").fetchall()
    assert set(named) <= {row[0] for row in known}


def test_every_row_has_an_answer() -> None:
    """A function of gdq's, or a reason why there is none."""
    for row in rows():
        assert len(row) == 3 or (len(row) == 2 and row[1] != "none"), row
        assert row[1] != "none" or len(row[2]) > 10, row
