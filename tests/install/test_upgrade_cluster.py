"""pg_upgrade keeps transaction numbers: queues, open batches and positions go on exactly."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.era import check_position, position
from gdq.installer import install
from gdq.monitor.doctor import doctor


def shut_down(server: EmbeddedServer) -> None:
    """Stop a temporary server in an orderly way, and leave its data."""
    server.account.run(server.binaries.program("pg_ctl"), "stop", "--wait", "--mode=fast", f"--pgdata={server.data}")
    server.crash()


def upgrade(old: EmbeddedServer, new: EmbeddedServer) -> None:
    """Make `new`, which is running and empty, the upgraded `old`, which is running."""
    with psycopg.connect(new.conninfo(), autocommit=True) as su:
        su.execute(f"alter role postgres password '{old.password}'".encode())
    for server in (old, new):
        shut_down(server)
    new.account.write(new.folder / "password", old.password)
    new.account.run(new.binaries.program("pg_checksums"), "--disable", f"--pgdata={new.data}")
    command: list[str | Path] = [new.binaries.program("pg_upgrade"), "-U", "postgres", "--no-sync", "--link"]
    command += ["-b", old.binaries.folder, "-d", old.data, "-B", new.binaries.folder, "-D", new.data]
    script = 'cd "$1" && shift && exec "$@"'
    environment: list[str | Path] = ["env", f"PGPASSWORD={old.password}"]
    new.account.run("/bin/sh", "-c", script, "sh", new.folder, *environment, *command)


@pytest.mark.long
def test_16_to_18(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--pg") != 18:
        pytest.skip("the upgrade from 16 to 18 runs once")
    with EmbeddedServer(binaries=find_binaries(16)) as old, EmbeddedServer(binaries=find_binaries(18)) as new:
        install.install(old.conninfo())
        with psycopg.connect(old.conninfo(), autocommit=True) as su:
            su.execute("create table t (gone int, id int primary key); alter table t drop gone")
            su.execute("select gdq.create_queue('q')")
            su.execute("select gdq.add_table('q', 't')")
            su.execute("create table secured (id int primary key); alter table secured enable row level security")
            su.execute("select gdq.add_table('q', 'secured', allow_rls => true)")
            for consumer in ("open", "behind"):
                su.execute("select gdq.register_consumer('q', %s)", [consumer])
            su.execute("insert into t values (1)")
            su.execute("select gdq.force_tick('q')")
            su.execute("insert into t values (2)")
            batch = su.execute("select batch_id, token from gdq.next_batch('q', 'open')").fetchone()
            assert batch
            events = su.execute("select * from gdq.get_batch(%s, %s)", batch).fetchall()
            outside = position(su, "q", "open")
        upgrade(old, new)
        new.start()
        with psycopg.connect(new.conninfo(), autocommit=True) as su:
            assert su.info.server_version // 10000 == 18
            check_position(su, "q", outside)
            assert su.execute("select * from gdq.get_batch(%s, %s)", batch).fetchall() == events
            su.execute("select gdq.finish_batch(%s, %s)", batch)
            su.execute("alter table t add more int; insert into t values (3, 4)")
            su.execute("select gdq.force_tick('q')")
            wanted = {"open": [2, 3], "behind": [1, 2, 3]}
            for consumer, ids in wanted.items():
                found = su.execute("select batch_id, token from gdq.next_batch('q', %s)", [consumer]).fetchone()
                assert found
                query = "select (new->>'id')::int from gdq.get_batch(%s, %s) where op = 'insert'"
                assert [row[0] for row in su.execute(query, found)] == ids
                su.execute("select gdq.finish_batch(%s, %s)", found)
            assert [finding for finding in doctor(su) if finding.severity == "error"] == []
            assert "row_security" not in [finding.code for finding in doctor(su)]
            assert install.install(new.conninfo()).changed is False
