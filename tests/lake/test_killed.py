"""Lake tables whose refreshes are killed for good, at moments around the commit, and read while they are refreshed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gdq.consumers.refresh.refresher import Refresher
from tests.support.lake import Lakes
from tests.support.view_grammar import SHAPES
from tests.support.waiting import until

BAG = SHAPES["bag"].query
MORE = "insert into fact select k, grp, label, qty + 1, price from fact limit 3; delete from fact where qty = 2"

# Says when it has all that it takes, and refreshes when it is told to.
_CHILD = """
import sys
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.lake import delta as lake_delta
from gdq.consumers.lake import iceberg as lake_iceberg
from gdq.consumers.lake import types as lake_types

with Refresher(sys.argv[1]) as refresher:
    print("ready", flush=True)
    sys.stdin.readline()
    refresher.refresh("bag")
"""


def files(folder: Path, suffix: str) -> set[str]:
    """The names of the files in a folder that end like this, at any depth, but not those that links lead to."""
    return {name for _, _, names in os.walk(folder) for name in names if name.endswith(suffix)}


def kill_at_file(lakes: Lakes, suffix: str) -> int:
    """Kill a refresh as soon as there is a new file of a suffix, or let it end; how the process ended."""
    known = files(lakes.folder, suffix)
    command = [sys.executable, "-c", _CHILD, lakes.shop.db.dsn]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.stdin.write(b"go\n")
        child.stdin.flush()
        until(lambda: child.poll() is not None or files(lakes.folder, suffix) - known, pause=0)
        child.kill()
        return child.wait()


# What is there once the rows are written, and once the commit is on its way or done.
MOMENTS = {
    "delta": (".parquet", ".json"),
    "parquet": (".parquet", ".json"),
    "iceberg": (".parquet", ".avro", ".metadata.json"),
}


@pytest.mark.long
def test_killed_around_the_commit(lakes: Lakes) -> None:
    """A reader finds what was there or what is to be there, and the next refresh makes it right."""
    lakes.view("bag", BAG)
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        ends = []
        for suffix in MOMENTS[lakes.kind]:
            before = lakes.rows("bag")
            lakes.shop.execute(MORE)
            ends.append(kill_at_file(lakes, suffix))
            assert lakes.rows("bag") in (before, lakes.expected(BAG))
            assert refresher.refresh("bag").action in ("delta", "none")
            assert lakes.equal("bag", BAG)
            assert refresher.refresh("bag").action == "none"
        assert -signal.SIGKILL in ends


def read(lakes: Lakes) -> Counter[int]:
    """The rows, by a reader that knows nothing of gdq where there is one."""
    folder = lakes.folder / "accounts"
    if lakes.kind == "delta":
        from deltalake import DeltaTable

        table = DeltaTable(str(folder))
        rows = [row for file in table.file_uris() for row in pq.ParquetFile(file).read().to_pylist()]
    elif lakes.kind == "parquet":
        rows = pq.read_table(os.path.realpath(folder / "current")).to_pylist()
    else:
        rows = [row for batch in lakes.open("accounts").scan() for row in batch.to_pylist()]
    return Counter({row["id"]: int(row["amount"]) for row in rows})


@pytest.mark.long
def test_reader_meanwhile(lakes: Lakes) -> None:
    """Money goes from one account to another: whoever reads during refreshes finds all of it, at every look."""
    lakes.shop.execute("delete from few; insert into few select i, 100 from generate_series(1, 50) i")
    lakes.view("accounts", "select id, v as amount from few")
    looks: list[Counter[int]] = []
    problems: list[BaseException] = []
    over = threading.Event()

    def look() -> None:
        try:
            while not over.is_set():
                looks.append(read(lakes))
        except BaseException as error:
            problems.append(error)

    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("accounts")
        reader = threading.Thread(target=look)
        reader.start()
        try:
            for n in range(8):
                lakes.shop.execute(
                    f"update few set v = v + case when id % 2 = 0 then {n + 1} else {-n - 1} end where id > {n}"
                    f"{' and id < 50' if n % 2 else ''}"
                )
                assert refresher.refresh("accounts").action == "delta"
        finally:
            over.set()
            reader.join()
    assert problems == []
    assert {(len(found), sum(found.values())) for found in looks} == {(50, 5000)}
    assert len({tuple(sorted(found.items())) for found in looks}) > 1
