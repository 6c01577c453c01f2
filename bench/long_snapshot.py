"""Whether a consumer slows down while another session holds a snapshot, and what is left behind.

    python -m bench.long_snapshot [BATCHES]

Every batch has one change. Prints the rate of the last tenth of the batches over that of the first (processor time of
the server process, since ten thousand batches cannot be interleaved), the dead rows in gdq's tables at the end, and
the growth of the catalogs for 1,000 rotations.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
from rich.progress import track

from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.installer import install

MAINTAIN_EVERY = 50
CATALOGS = ("pg_class", "pg_proc", "pg_attribute", "pg_depend")
DEAD = """
  select relname, n_dead_tup from pg_stat_user_tables
   where schemaname in ('gdq', 'gdq_log') and n_dead_tup > 0 order by n_dead_tup desc, relname
"""


def main(batches: int) -> None:
    with EmbeddedServer(binaries=find_binaries(18), settings={}) as server:
        install.install(server.conninfo())
        with (
            psycopg.connect(server.conninfo(), autocommit=True) as connection,
            psycopg.connect(server.conninfo()) as holder,
        ):
            connection.execute("select gdq.create_event_triggers()")
            connection.execute("create table t (id bigint generated always as identity primary key, v text)")
            connection.execute("select gdq.create_queue('q', rotation_period => '1 microsecond')")
            connection.execute("select gdq.add_table('q', 't')")
            connection.execute("select gdq.register_consumer('q', 'c')")
            holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            holder.execute("select count(*) from t")
            before = _catalogs(connection)
            used = [_ticks(connection)]
            rotations = 0
            for number in track(range(batches), description="batches"):
                _cycle(connection)
                if number % MAINTAIN_EVERY == 0:
                    rotations += _maintain(connection)
                if (number + 1) % (batches // 10) == 0:
                    used.append(_ticks(connection))
            tenths = [later - earlier for earlier, later in pairwise(used)]
            print(f"rate of the last tenth of {batches} batches over the first: {tenths[0] / tenths[-1]:.2f}")
            connection.execute("select pg_stat_force_next_flush()")
            print("dead rows:", ", ".join(f"{name} {dead}" for name, dead in connection.execute(DEAD)) or "none")
            grown = {name: size - before[name] for name, size in _catalogs(connection).items()}
            print(f"{rotations} rotations; bytes of catalog growth for 1,000 rotations under the held snapshot:")
            print(", ".join(f"{name} {size * 1000 // max(rotations, 1):,}" for name, size in grown.items()))


def _ticks(connection: psycopg.Connection[Any]) -> int:
    """Clock ticks of processor time that the connection's server process has used."""
    fields = Path(f"/proc/{connection.info.backend_pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def _cycle(connection: psycopg.Connection[Any]) -> None:
    connection.execute("insert into t (v) values ('x')")
    connection.execute("select gdq.force_tick('q')")
    batch = connection.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
    assert batch
    assert len(connection.execute("select * from gdq.get_batch(%s, %s)", batch).fetchall()) == 1
    connection.execute("select gdq.finish_batch(%s, %s)", batch)


def _maintain(connection: psycopg.Connection[Any]) -> int:
    """All maintenance that is due; how many rotations it made."""
    slot = "select sum(current_slot) from gdq.log_ring"
    before = connection.execute(slot).fetchone()
    while connection.execute("select gdq.maintain()").fetchone() == (True,):
        pass
    return int(connection.execute(slot).fetchone() != before)


def _catalogs(connection: psycopg.Connection[Any]) -> dict[str, int]:
    rows = connection.execute(
        "select relname::text, pg_total_relation_size(oid) from pg_class where oid = any (%s::text[]::regclass[])",
        [list(CATALOGS)],
    )
    return dict(rows.fetchall())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
