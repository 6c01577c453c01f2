"""Captured tables of many kinds for the tests of the DDL guard's alarm and witness, as fixtures."""

from __future__ import annotations

import pytest

from tests.support.events import Tap, drain
from tests.support.guarded import maintain

SCHEMA = (
    "create type mood as enum ('good')",
    "create type pair as (x int, y int)",
    "create table rowed (x int)",
    "create table t (id int primary key, v int default 1, w text, m mood[], c pair, r rowed)",
    "create table p (id int, v int, w text) partition by list (id)",
    "create table p1 partition of p for values in (1)",
    "create table p2 partition of p for values in (2) partition by list (v)",
    "create table p21 partition of p2 for values in (1)",
    "create table other (id int, v int, w text)",
    "create table below (id int, v int, w text)",
    "create table i (id int, v int)",
    "create table ch (id int, v int)",
)


@pytest.fixture
def alarmed(tap: Tap) -> Tap:
    tap.write(
        "create table t (id int primary key, v int)",
        "create table c (id int primary key, v int)",
        "create type mood as enum ('good')",
        "create table m (m mood)",
        "create table p (id int) partition by list (id)",
        "create table p1 partition of p for values in (1)",
        "create table p2 (id int)",
        "insert into t values (1, 1)",
        "insert into c values (5, 1)",
        "insert into m values ('good')",
        "insert into p values (1)",
        "insert into p2 values (2)",
    )
    for name in ("t", "c", "m", "p"):
        tap.add(f"shop.{name}")
    maintain(tap)
    drain(tap.db)
    return tap


@pytest.fixture
def witnessed(tap: Tap) -> Tap:
    tap.write(*SCHEMA)
    tap.write(
        "insert into t (id) values (1)",
        "insert into p values (1, 1), (2, 1)",
        "insert into other values (3, 7)",
        "insert into below values (2, 7)",
        "insert into ch values (1, 1)",
    )
    for name in ("t", "p", "i", "ch"):
        tap.add(f"shop.{name}")
    maintain(tap)
    drain(tap.db)
    return tap
