"""A database as an older revision left it, with queues, logs and unread rows in it, and writers that never pause.

The functions of older revisions are not kept, but revisions mostly add tables and columns: taking away what came later
gives the tables of then with their rows; a table that was dropped since is made again without rows. What writers run,
the capture functions and logs in gdq_log, stays as it is.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import psycopg
from alembic import command
from sqlalchemy import NullPool, create_engine

from gdq.conninfo import connect
from gdq.installer import install
from tests.support.server import Database
from tests.support.waiting import until

REVISIONS = sorted(path.name[:4] for path in Path("migrations/versions").glob("0*.sql"))


class Column(NamedTuple):
    """One column of a control table; the name is NULL for a sequence or an index."""

    relation: str
    kind: str
    name: str | None
    description: str | None


def catalog(connection: psycopg.Connection[Any]) -> list[Column]:
    """The tables, columns, sequences and indexes of schema gdq; those of keys come and go with their tables."""
    rows = connection.execute(
        """select c.relname, c.relkind::text, a.attname, concat_ws(' ', format_type(a.atttypid, a.atttypmod),
                  a.attnotnull, pg_get_expr(d.adbin, d.adrelid))
             from pg_class c
             left join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                                         and c.relkind in ('r', 'p')
             left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
            where c.relnamespace = 'gdq'::regnamespace and c.relkind in ('r', 'p', 'S', 'i')
              and not exists (select from pg_constraint k where k.conindid = c.oid) order by c.relname, a.attnum"""
    )
    return [Column(*row) for row in rows]


def catalogs(db: Database) -> dict[str, list[Column]]:
    """What each revision leaves, in an empty database that goes through all of them."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: connect(db.dsn), poolclass=NullPool)
    found = {}
    with db.connect() as owner:
        owner.execute("create schema gdq")
        for revision in REVISIONS:
            with engine.begin() as connection:
                config = install._config()
                config.attributes["connection"] = connection
                command.upgrade(config, revision)
            found[revision] = catalog(owner)
    return found


def downgrade(owner: psycopg.Connection[Any], revision: str, wanted: list[Column]) -> None:
    """Take away what came after a revision. The DDL guard is an empty one from then on, as it would fail."""
    keep = {(column.relation, column.name) for column in wanted}
    relations = {column.relation for column in wanted}
    with owner.transaction():
        owner.execute(
            "create or replace function gdq.ddl_guard() returns event_trigger language plpgsql as 'begin end'"
        )
        for column in catalog(owner):
            if column.relation not in relations:
                kind = {"S": "sequence", "i": "index"}.get(column.kind, "table")
                owner.execute(f'drop {kind} if exists gdq."{column.relation}" cascade'.encode())
            elif (column.relation, column.name) not in keep:
                owner.execute(f'alter table gdq."{column.relation}" drop column if exists "{column.name}"'.encode())
        for relation in sorted(relations - {column.relation for column in catalog(owner)}):
            _create(owner, [column for column in wanted if column.relation == relation and column.kind == "r"])
        owner.execute("update gdq.schema_version set version_num = %s", [revision])
        owner.execute("comment on schema gdq is 'as an older gdq left it'")
    assert catalog(owner) == wanted


def _create(owner: psycopg.Connection[Any], columns: list[Column]) -> None:
    """Make a table again that a later revision has dropped."""
    if columns:
        kinds = ", ".join(
            f'"{column.name}" {kind}' + (" not null" if required == "t" else "")
            for column in columns
            for kind, _, required in [str(column.description).rpartition(" ")]
        )
        owner.execute(f'create table gdq."{columns[0].relation}" ({kinds})'.encode())


class Writers:
    """Writers in READ COMMITTED and REPEATABLE READ on the tables of a Scene, each on rows of its own.

    So nothing but gdq could make one of them wait or fail: not one error is passed over.
    """

    def __init__(self, db: Database) -> None:
        self.db = db
        self.commits = [0] * 4
        self.messages: list[str] = []
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=[number, isolation])
            for number, isolation in enumerate(("read committed", "repeatable read") * 2)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def more(self, commits: int) -> None:
        """Wait until each writer has committed that often again."""
        wanted = [done + commits for done in self.commits]
        until(lambda: self._errors or all(map(int.__ge__, self.commits, wanted)))

    def _guarded(self, number: int, isolation: str) -> None:
        try:
            with self.db.connect() as connection:
                connection.execute("set lock_timeout = '500ms'")
                while not self._stop.wait(0.02):
                    self._transaction(connection, number, isolation)
        except BaseException as error:  # the main thread raises it
            self._errors.append(error)

    def _transaction(self, connection: psycopg.Connection[Any], number: int, isolation: str) -> None:
        rng = random.Random(self.commits[number])
        key = number * 1_000_000 + self.commits[number] * 10 + 1
        message = f"{number} {self.commits[number]}"
        with connection.transaction():
            connection.execute(f"set transaction isolation level {isolation}; select from acct where id = 0".encode())
            for statement in changes(key, rng):
                connection.execute(statement.encode())
            connection.execute("select gdq.insert_event('q', 'm', %s)", [message])
        self.messages.append(message)
        self.commits[number] += 1


def changes(key: int, rng: random.Random) -> Iterator[str]:
    """The statements of one transaction on rows from `key` on, and on those of the transaction before."""
    before = key - 10
    yield f"insert into acct values ({key}, nextval('label'), 'row'), ({key + 1}, nextval('label'), 'row')"
    yield f"insert into item values ({key}, nextval('label'))"
    yield f"insert into part values ({key}, {rng.randint(0, 2)}, nextval('label'))"
    if rng.random() < 0.5:
        yield f"savepoint s; update acct set label = nextval('label') where id = {key}; rollback to s"
    yield f"update acct set label = nextval('label'), id = {key + 2} where id = {before}"
    yield f"update item set label = nextval('label'), id = {key + 2} where id = {before}"
    yield f"update part set label = nextval('label'), region = (region + 1) % 3 where id = {before}"
    yield f"delete from acct where id = {before + 1}"


@contextmanager
def locked_by_revisions(db: Database) -> Iterator[None]:
    """Hold what an upgrade through all revisions holds at its end: every control table that one of them alters."""
    texts = "".join(path.read_text() for path in sorted(Path("migrations/versions").glob("0*.sql"))[1:])
    altered = sorted(set(_altered(texts)))
    assert len(altered) > 4
    with ExitStack() as stack:
        holder = stack.enter_context(db.connect())
        stack.enter_context(holder.transaction())
        for table in altered:
            holder.execute(f"lock table {table} in access exclusive mode".encode())
        yield


def _altered(text: str) -> Iterator[str]:
    for statement in text.split(";"):
        words = statement.split()
        for at in range(len(words) - 2):
            if [word.lower() for word in words[at : at + 2]] == ["alter", "table"]:
                yield words[at + 2]
