"""New files of a lake table: by threads side by side, with no remains of what fails, or taken over as they are."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from gdq.consumers.lake import data_files
from gdq.consumers.lake.columns import with_numbers
from gdq.consumers.lake.data_files import DataFileWriter, RowPart, RowParts, StagedFiles, write_parts
from gdq.consumers.lake.files import ArrowDifference, rewrite_data_files
from tests.support.waiting import SECONDS

SCHEMA = pa.schema([("n", pa.int64()), ("same", pa.string()), ("other", pa.string())])
SYSTEM = fs.LocalFileSystem()


def batch(start: int, rows: int = 1000) -> pa.RecordBatch:
    numbers = range(start, start + rows)
    return pa.record_batch([list(numbers), ["x"] * rows, [f"value {n}" for n in numbers]], schema=SCHEMA)


def part(start: int) -> RowPart:
    yield batch(start)
    yield batch(start + 1000)


def test_parts_by_two_threads(tmp_path: Path) -> None:
    """Each row once, whichever thread has written it, in row groups of many batches."""
    both = threading.Barrier(2, timeout=SECONDS)

    def first(start: int) -> RowPart:
        both.wait()
        yield from part(start)

    rows = RowParts(lambda: iter([first(0), first(2000), *(part(n) for n in range(4000, 40000, 2000))]))
    files = write_parts(SYSTEM, str(tmp_path), SCHEMA, rows)
    assert len(files) == 2
    assert sum(file.rows for file in files) == 40_000
    found = [n for file in files for n in pq.read_table(file.path)["n"].to_pylist()]
    assert sorted(found) == list(range(40_000))
    assert {pq.read_metadata(file.path).num_row_groups for file in files} == {1}


def test_a_part_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others wait for is cancelled, and no file stays."""
    monkeypatch.setattr(data_files, "_GROUP_ROWS", 500)
    monkeypatch.setattr(data_files, "FILE_BYTES", 1)
    cancelled = threading.Event()

    def waits() -> Generator[pa.RecordBatch, None, None]:
        yield batch(0)
        assert cancelled.wait(SECONDS)
        raise TimeoutError

    def fails() -> Generator[pa.RecordBatch, None, None]:
        yield batch(1000)
        raise ValueError("no such row")

    rows = RowParts(lambda: iter([waits(), fails()]), cancelled.set)
    with pytest.raises(ValueError, match="no such row"):
        write_parts(SYSTEM, str(tmp_path), SCHEMA, rows)
    assert cancelled.is_set()
    assert not list(tmp_path.iterdir())


def test_only_values_that_repeat_have_a_dictionary(tmp_path: Path) -> None:
    with DataFileWriter(SYSTEM, str(tmp_path), SCHEMA) as writer:
        writer.write(batch(0))
    group = pq.read_metadata(writer.files[0].path).row_group(0)
    assert [group.column(n).has_dictionary_page for n in range(3)] == [False, True, False]


@pytest.mark.parametrize("numbers", [(1, 2, 3), (4, 5, 6)])
def test_staged_files_are_taken_over(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """Those with the numbers of the table's columns are linked; others are written anew, from the rows."""
    waiting, folder = tmp_path / "waiting", tmp_path / "table"
    waiting.mkdir()
    folder.mkdir()
    rows = RowParts(lambda: iter([part(0), part(2000)]))
    staged = write_parts(SYSTEM, str(waiting), with_numbers(SCHEMA, (1, 2, 3)), rows)
    change = ArrowDifference("full", SCHEMA, rows.rows, parts=rows, staged=StagedFiles(SYSTEM, tuple(staged)))
    done = rewrite_data_files(SYSTEM, str(folder), [], change, with_numbers(SCHEMA, numbers))
    assert done.inserted == 4000
    assert {Path(file.path).parent for file in done.added} == {folder}
    same = {Path(file.path).stat().st_ino for file in done.added} == {Path(file.path).stat().st_ino for file in staged}
    assert same == (numbers == (1, 2, 3))
    found = [n for file in done.added for n in pq.read_table(file.path)["n"].to_pylist()]
    assert sorted(found) == list(range(4000))
