"""`gdq relay` to a Kafka broker whose disk is full: the relay waits, says why, and goes on when there is room."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.relay.conftest import KafkaTopic, relay, relaying, retries, sent_all, wait_for_line, write
from tests.support.kafka import kafka_broker
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.long]

_CHUNK = b"x" * 65536


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    """Take what is left of a file system; the file that holds it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(_CHUNK) == len(_CHUNK):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return ballast


def test_a_broker_whose_disk_is_full(shop: Database, kafka_classpath: str, small_disk: Path, tmp_path: Path) -> None:
    """Nothing is lost or put aside, and each key is in order."""
    rows = "insert into orders select g, 0, '0' from generate_series(1, 300) g"
    with kafka_broker(kafka_classpath, tmp_path / "kafka", small_disk / "logs") as broker:
        topic = KafkaTopic(broker)
        write(shop, rows)
        relay(shop, *topic.to)
        with relaying(shop, *topic.to, "--set", "timeout=5") as process:
            ballast = fill(small_disk)
            write(shop, "update orders set note = repeat('1', 10000)", "update orders set note = '2'")
            wait_for_line(process, "Kafka takes nothing: ")
            write(shop, "update orders set note = '3'")
            ballast.unlink()
            broker.kill()  # a broker whose only disk has failed has ended, or does not use it any more
            broker.start()
            until(lambda: sent_all(shop), "the end")
            assert process.poll() is None
        assert retries(shop) == []
        assert topic.changes() == {key: ["0", "1" * 10000, "2", "3"] for key in range(1, 301)}
