"""Dump and restore between clusters, as an administrator does it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import psycopg
from psycopg import sql

from gdq.embedded.server import EmbeddedServer
from tests.support.programs import client_program
from tests.support.server import Database


@dataclass(frozen=True, slots=True)
class Cluster:
    """A server beside that of the session, with transaction numbers of its own."""

    server: EmbeddedServer

    def copy_roles(self, source: Database) -> None:
        """Make the roles of another cluster; the superuser is there, and keeps the password of this server."""
        command = [str(client_program(source, "pg_dumpall")), "--roles-only", "-d", source.su_dsn]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = [line for line in text.splitlines() if not line.startswith("ALTER ROLE postgres ")]
        restore(Database(self.server, "postgres"), "\n".join(lines), stop=False)

    def create_database(self, name: str, *, owner: str = "gdq_owner") -> Database:
        with psycopg.connect(self.server.conninfo(), autocommit=True) as su:
            su.execute(
                sql.SQL("create database {} owner {} template template0").format(
                    sql.Identifier(name), sql.Identifier(owner)
                )
            )
        return Database(self.server, name)


def advance(database: Database, transactions: int) -> None:
    """Use up transaction numbers of the cluster."""
    with database.connect("su") as su:
        loop = f"for i in 1 .. {transactions:d} loop perform pg_current_xact_id(); commit; end loop"
        su.execute(f"do $$ begin {loop}; end $$".encode())


def dump(database: Database, *options: str) -> str:
    """What pg_dump writes as the superuser."""
    command = [str(client_program(database, "pg_dump")), *options, database.su_dsn]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def restore(database: Database, text: str, *, dsn: str | None = None, stop: bool = True) -> str:
    """Run a dump in psql, as the superuser unless `dsn` says otherwise; the errors when they do not stop it."""
    command = [str(client_program(database, "psql")), "-Xq", "-v", f"ON_ERROR_STOP={stop:d}", "-o", "/dev/null"]
    done = subprocess.run([*command, dsn or database.su_dsn], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr
