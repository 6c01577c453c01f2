"""Random changes of tables that foreign keys join, in a target where these fire: it is equal after every round."""

from __future__ import annotations

import random

import psycopg
import pytest

from gdq.consumers.replica.replica import Replica
from tests.replica.conftest import Pair

pytestmark = pytest.mark.server

# Keys that delete, that follow an update, that point to their own table, over two columns and to another unique key.
RANDOM = """
create table place (id int primary key, code text unique);
create table person (id int primary key, boss int references person on delete set null,
                     place text references place (code) on update cascade on delete set null);
create table job (id int, person int references person on delete cascade, name text unique, primary key (id, person));
create table task (id int primary key, job int, person int, before int references task,
                   foreign key (job, person) references job on delete cascade)"""
NAMES = ("place", "person", "job", "task")


class Writer:
    """Changes the source at random; what a foreign key or a unique key forbids is left out."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.random = random.Random(seed)
        self.columns = 0
        self.connection = pair.source.connect()

    def number(self) -> int:
        return self.random.randint(1, 12)

    def code(self) -> str:
        return self.random.choice(["'a'", "'b'", "'c'", "'d'", "'e'", "null"])

    def statement(self) -> str:
        n, code = self.number, self.code
        changes = [
            f"insert into place values ({n()}, {code()})",
            f"update place set code = {code()} where id = {n()}",
            f"update place set id = {n()} where id = {n()}",
            f"delete from place where id = {n()}",
            f"insert into person values ({n()}, {n()}, {code()})",
            f"insert into person values ({n()}, null, {code()})",
            f"update person set boss = {n()}, place = {code()} where id = {n()}",
            f"delete from person where id = {n()}",
            f"insert into job values ({n()}, {n()}, {code()})",
            f"update job set name = {code()} where id = {n()}",
            f"delete from job where id = {n()}",
            f"insert into task (id, job, person) select {n()}, id, person from job order by random() limit 1",
            f"insert into task (id, job, person, before) values ({n()}, null, null, {n()})",
            f"update task set (job, person) = (select id, person from job order by random() limit 1) where id = {n()}",
            f"update task set before = {n()} where id = {n()}",
            f"delete from task where id = {n()}",
        ]
        if self.random.random() < 0.01:
            self.columns += 1
            return f"alter table {self.random.choice(NAMES[1:])} add extra_{self.columns} int"
        if self.random.random() < 0.01:
            return f"truncate {self.random.choice(NAMES)} cascade"
        if self.random.random() < 0.005:
            self.columns += 1
            return f"alter table {self.random.choice(NAMES)} add extra_{self.columns} int default 7"
        return self.random.choice(changes)

    def write(self, transactions: int) -> None:
        for _ in range(transactions):
            try:
                with self.connection.transaction():
                    for _ in range(self.random.randint(1, 4)):
                        self.connection.execute(self.statement().encode())
            except psycopg.errors.IntegrityError:
                continue


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("local", [False, True])
def test_random_writers(pair: Pair, seed: int, local: bool) -> None:
    """`local`: a table of the target's own keeps the server from TRUNCATE."""
    pair.make(RANDOM)
    if local:
        pair.there("create table local (place int references place, person int references person on delete cascade)")
    pair.capture(*NAMES)
    writer = Writer(pair, seed)
    with writer.connection:
        for round_number in range(10):
            writer.write(10 + 60 * (round_number % 3))
            with Replica(pair.source.dsn, pair.target.dsn, "shop", "mirror") as replica:
                list(replica.run())
            pair.same(*NAMES)
