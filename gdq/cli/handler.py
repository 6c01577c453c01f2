"""The handler that `gdq consume` calls: found by its name, checked, and its errors told with the line that raised."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg import Connection

from gdq.cli import base
from gdq.errors import GdqError
from gdq.retry import RetryOutcome
from gdq.source import Event

log = logging.getLogger(__name__)


class Handler:
    """A user's function that takes batches, or with `each` single events.

    `name`: module:function. CommandFailure if there is no such function, or if it cannot be called as it is: an async
    function, or with `each` a generator.
    """

    def __init__(self, name: str, *, each: bool = False) -> None:
        self.name = name
        self._each = each
        self._function = _load(name)
        # The last error of each kind: an error passes through the library before errors() meets it again.
        self._gdqs: Exception | None = None
        self._own: Exception | None = None
        if _is_any(self._function, inspect.iscoroutinefunction, inspect.isasyncgenfunction):
            raise base.CommandFailure(
                f"handler {name} is an async function",
                hint="Give a plain function, or write a program with gdq.AsyncConsumer.",
            )
        if each and _is_any(self._function, inspect.isgeneratorfunction):
            raise base.CommandFailure(
                f"handler {name} is a generator", hint="With --each, raise gdq.Retry or gdq.DeadLetter; do not yield."
            )
        if not _takes_two(self._function):
            raise base.CommandFailure(
                f"handler {name} does not take two arguments",
                hint=f"It is called with the connection and {'an event' if each else 'the events of a batch'}.",
            )

    def __call__(self, connection: Connection[Any], given: Any) -> list[RetryOutcome]:
        """Call the function with events or one event; returns the outcomes of a function that takes batches."""
        try:
            returned = self._function(connection, given)
            if self._each or returned is None:
                return []
            if isinstance(returned, Iterable):
                return list(returned)
        except Exception as error:
            if self._is_own(error, connection):
                self._own = error
            raise
        raise base.CommandFailure(
            f"handler {self.name} returned {returned!r}", hint="Return nothing, or a list of gdq.Retry, gdq.DeadLetter."
        )

    def events(self, events: Iterator[Event]) -> Iterator[Event]:
        """The events; an error of reading them is gdq's, although it passes through the function."""
        try:
            yield from events
        except Exception as error:
            self._gdqs = error
            raise

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise a CommandFailure for the function's own errors, with -v after their traceback; others pass through.

        An own error ends the command, even where gdq's own statements are tried again: the function's statement that
        ran into a timeout would do so again.
        """
        try:
            yield
        except RetryOutcome as outcome:
            raise base.CommandFailure(
                f"handler {self.name} raised {type(outcome).__name__}: {outcome}",
                hint="A handler of batches returns it, with event=; with --each it may be raised.",
            ) from outcome
        except Exception as error:
            if error is not self._own:
                raise
            log.debug("handler %s failed, the batch is rolled back", self.name, exc_info=error)
            raise self._failure(error) from error

    def _is_own(self, error: Exception, connection: Connection[Any]) -> bool:
        """True for an error of the function itself: none of gdq's, and no loss of gdq's connection."""
        if isinstance(error, (GdqError, RetryOutcome)) or error is self._gdqs:
            return False
        return not (isinstance(error, psycopg.Error) and connection.broken)

    def _failure(self, error: Exception) -> base.CommandFailure:
        """The line for an error: what was raised, and where in the function's own file."""
        place = f"handler {self.name}"
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if code is not None and frame.filename == code.co_filename
        ]
        if code is not None and lines:
            place = f"{place} ({Path(code.co_filename).name}, line {lines[-1]})"
        shown = base.command_failure(error)
        kind = type(error).__name__
        return base.CommandFailure(f"{place}: {kind}: {shown.message}", detail=shown.detail, hint=shown.hint)


def _is_any(function: Callable[..., Any], *tests: Callable[[Any], bool]) -> bool:
    """True if one of the tests holds for a function, or for the method by which an object is called."""
    return any(test(candidate) for test in tests for candidate in (function, getattr(function, "__call__", None)))  # noqa: B004


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with two arguments, as far as Python knows that of it."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a function in C that does not tell
        return True
    return True


def _load(name: str) -> Callable[[Any, Any], Any]:
    """The function that `module:function` names; a module is also looked for in the current folder."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise base.CommandFailure(f"no handler {name}", hint="Write module:function, such as shop.mail:send.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # for an installed command the current folder is not on the path
    try:
        loaded = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        hint = f"Modules are looked for on Python's path and in {Path.cwd()}."
        if module.endswith(".py"):
            hint = f"Write {module.removesuffix('.py').replace('/', '.')}:{function}, as in import."
        raise base.CommandFailure(f"no handler {name}: {error}", hint=hint) from error
    except Exception as error:
        log.debug("handler %s cannot be loaded", name, exc_info=error)
        raise base.CommandFailure(f"handler {name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(loaded):
        raise base.CommandFailure(f"handler {name} is not a function")
    handler: Callable[[Any, Any], Any] = loaded
    return handler
