"""Work on a connection without I/O: statements, and generators that yield them and are sent their results.

What Consumer and AsyncConsumer share is written so. execute() and run() do it on a connection, execute_async() and
run_async() on an async one.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, BaseConnection, Connection, sql
from psycopg.pq import TransactionStatus
from psycopg.rows import scalar_row

from gdq.errors import mapped_errors
from gdq.sql_text import raw

_Result = TypeVar("_Result")

AnyConnection = Connection[Any] | AsyncConnection[Any]


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement with its values. Its result is the first value of the first row, or with `row` all rows.

    `row`: a row factory of psycopg. `result`: False for a statement that returns no rows. `alone`: in a READ COMMITTED
    transaction of its own, whose BEGIN and COMMIT are sent with the statement; needs an idle connection. The server
    then commits without hearing of this program again. A program that stands still, or is cut off, while the
    transaction is open would hold locks on logs and ticks until the server notices: consumers, and writers that come
    late to a log, would wait as long.
    """

    query: str | sql.SQL | sql.Composed
    values: Sequence[Any] = ()
    row: Callable[[Any], Any] | None = None
    binary: bool = False
    alone: bool = False
    result: bool = True
    prepare: bool | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait until the server has sent something, or one of `sockets` is readable; the result is True for the former.

    It ends after `seconds` at the latest.
    """

    seconds: float
    sockets: Sequence[int] = ()


Steps = Generator[Statement | Wait, Any, _Result]


def called(function: str, *values: Any, **named: Any) -> Statement:
    """The call of a SQL function of gdq: called("pause", "orders") is `select gdq.pause('orders')`.

    `values`: arguments by position; `named`: by name. The function must have a single signature, which gives the types.
    """
    arguments: list[sql.Composable] = [sql.Placeholder()] * len(values)
    arguments += [sql.SQL("{} => %s").format(sql.Identifier(name)) for name in named]
    query = sql.SQL("select gdq.{}({})").format(sql.Identifier(function), sql.SQL(", ").join(arguments))
    return Statement(query, [*values, *named.values()])


def execute(connection: Connection[Any], statement: Statement) -> Any:
    """The result of a statement."""
    if statement.alone:
        return _execute_alone(connection, statement)
    with mapped_errors(), connection.cursor(row_factory=_factory(statement), binary=statement.binary) as cursor:
        cursor.execute(statement.query, statement.values or None, prepare=statement.prepare)
        if not statement.result:
            return None
        return cursor.fetchall() if statement.row else cursor.fetchone()


async def execute_async(connection: AsyncConnection[Any], statement: Statement) -> Any:
    """The result of a statement."""
    if statement.alone:
        return await _execute_alone_async(connection, statement)
    with mapped_errors():
        async with connection.cursor(row_factory=_factory(statement), binary=statement.binary) as cursor:
            await cursor.execute(statement.query, statement.values or None, prepare=statement.prepare)
            if not statement.result:
                return None
            return await (cursor.fetchall() if statement.row else cursor.fetchone())


def run(connection: Connection[Any], steps: Steps[_Result]) -> _Result:
    """Take all steps on a connection; returns the generator's result."""
    with closing(steps):
        try:
            step = next(steps)
            while True:
                step = steps.send(execute(connection, step) if isinstance(step, Statement) else _wait(connection, step))
        except StopIteration as end:
            result: _Result = end.value
            return result


async def run_async(connection: AsyncConnection[Any], steps: Steps[_Result]) -> _Result:
    """Take all steps on an async connection; returns the generator's result."""
    with closing(steps):
        step: Statement | Wait | None = None
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                result: _Result = end.value
                return result
            if isinstance(step, Statement):
                answer = await execute_async(connection, step)
            else:
                answer = await _wait_async(connection, step)


def _execute_alone(connection: Connection[Any], statement: Statement) -> Any:
    autocommit = connection.autocommit
    connection.autocommit = True
    # one message: in a pipeline each command is a message of its own
    cursor = psycopg.ClientCursor(connection, row_factory=_factory(statement))
    try:
        with mapped_errors():
            cursor.execute(_alone(statement), statement.values or None)
    finally:
        if connection.info.transaction_status == TransactionStatus.INERROR:
            connection.rollback()
        if connection.info.transaction_status == TransactionStatus.IDLE:
            connection.autocommit = autocommit
    cursor.nextset()
    return cursor.fetchall() if statement.row else cursor.fetchone()


async def _execute_alone_async(connection: AsyncConnection[Any], statement: Statement) -> Any:
    """As _execute_alone(), on a connection in autocommit."""
    cursor = psycopg.AsyncClientCursor(connection, row_factory=_factory(statement))
    try:
        with mapped_errors():
            await cursor.execute(_alone(statement), statement.values or None)
    finally:
        await end_failed(connection)
    cursor.nextset()
    return await (cursor.fetchall() if statement.row else cursor.fetchone())


async def end_failed(connection: AsyncConnection[Any]) -> None:
    """Roll back what a statement that failed or was cancelled has left open."""
    if is_left_open(connection):
        await connection.rollback()


def is_left_open(connection: BaseConnection[Any]) -> bool:
    """True if a transaction is open, or has failed."""
    return connection.info.transaction_status in (TransactionStatus.INERROR, TransactionStatus.INTRANS)


def _alone(statement: Statement) -> sql.SQL:
    assert isinstance(statement.query, str)
    return raw(f"begin isolation level read committed; {statement.query}; commit")


def _factory(statement: Statement) -> Any:
    return statement.row or scalar_row


def _wait(connection: Connection[Any], wait: Wait) -> bool:
    own = connection.fileno()
    return own in select.select([own, *wait.sockets], [], [], wait.seconds)[0]


async def _wait_async(connection: AsyncConnection[Any], wait: Wait) -> bool:
    """Only for steps without sockets."""
    loop, readable, own = asyncio.get_running_loop(), asyncio.Event(), connection.fileno()
    if wait.seconds <= 0:  # a look, for which the loop would not run
        return bool(select.select([own], [], [], 0)[0])
    loop.add_reader(own, readable.set)
    try:
        await asyncio.wait_for(readable.wait(), wait.seconds)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(own)
    return True
