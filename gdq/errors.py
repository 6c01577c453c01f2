"""Errors of gdq. All but ConnectionLost are below GdqError.

    GdqError
     +-- DivergedView             an audit found a view's rows different from its query
     +-- EmbeddedError            an embedded server or its Java cannot be set up
     +-- ForeignTarget            a view's target exists and is not the view's own
     +-- InstallError             gdq cannot be installed here
     +-- PlanError                the view cannot be kept up to date from changes
     +-- RefreshConflict          another refresh has overtaken this one
     +-- SinkUnavailable          the receiver of a relay takes nothing
     +-- UnsupportedValue         a column or value has no faithful Arrow or Spark form
     +-- ServerError              a SQL function of gdq has refused, with one of gdq's SQLSTATEs:
          +-- StaleBatch          GDQ01
          +-- TruncatedPosition   GDQ02
          +-- ResyncRequired      GDQ03
          +-- WrongIsolation      GDQ04
          +-- EraEnded            GDQ07
          +-- DivergedPosition    GDQ08
    psycopg.OperationalError
     +-- ConnectionLost           the stream of a logical slot has ended

Other server errors pass through as psycopg.Error. An error without a message has its class's docstring as message.
"""

# ruff: noqa: N818 (as in psycopg, an error's name says what happened: StaleBatch)

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import psycopg


class GdqError(Exception):
    """gdq failed."""

    def __init__(self, message: str | None = None, *, detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)
        self.detail = detail
        self.hint = hint
        # Tracebacks show notes, not attributes.
        for label, text in (("Detail", detail), ("Hint", hint)):
            if text:
                self.add_note(f"{label}: {text}")


class DivergedView(GdqError):
    """An audit found that a view's rows differ from its query; the next refresh loads the view in full."""


class EmbeddedError(GdqError):
    """The embedded server or its Java cannot be set up; the message is one line that says what is missing."""


class ForeignTarget(GdqError):
    """The target of a view exists and is not the view's own; it is left as it is."""


class InstallError(GdqError):
    """gdq cannot be installed here."""


class PlanError(GdqError):
    """The view cannot be refreshed from its changes.

    `code` is stable and names the construct: join, distinct, window, pk-columns-missing, ...
    """

    def __init__(self, code: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{message} [{code}]", hint=hint)
        self.code = code


class RefreshConflict(GdqError):
    """Another refresh of the view has moved its position meanwhile."""


class SinkUnavailable(GdqError):
    """The receiver of a relay as a whole takes nothing: it is down, full, or lets nobody in.

    `wait_seconds`: how long it wants not to be asked; None if it has not said.
    """

    def __init__(
        self, message: str | None = None, *, wait_seconds: float | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.wait_seconds = wait_seconds


class UnsupportedValue(GdqError):
    """A column or value has no faithful form in Arrow or Spark."""


class ServerError(GdqError):
    """A function of gdq refused."""

    sqlstate: ClassVar[str] = ""


class StaleBatch(ServerError):
    """The batch is not open any more under this token: another session took it over or its rows are gone."""

    sqlstate = "GDQ01"


class TruncatedPosition(ServerError):
    """The position is below the truncation horizon: rows after it are gone."""

    sqlstate = "GDQ02"


class ResyncRequired(ServerError):
    """Capture had a gap: changes are missing and the consumer must read its tables afresh."""

    sqlstate = "GDQ03"


class WrongIsolation(ServerError):
    """Ticks and positions need a READ COMMITTED transaction that has not written yet."""

    sqlstate = "GDQ04"


class EraEnded(ServerError):
    """The queue was restored from a dump and not rebased, or the position is from before that."""

    sqlstate = "GDQ07"


class DivergedPosition(ServerError):
    """The server lost the position: what was read up to there may never have happened in this server."""

    sqlstate = "GDQ08"


class ConnectionLost(psycopg.OperationalError):
    """The server has ended a connection beside the one at hand."""


_BY_SQLSTATE = {
    error.sqlstate: error
    for error in (StaleBatch, TruncatedPosition, ResyncRequired, WrongIsolation, EraEnded, DivergedPosition)
}


def error_from_server(error: psycopg.Error) -> GdqError | None:
    """The error of gdq for a server error's SQLSTATE; None if the SQLSTATE is not one of gdq's."""
    kind = _BY_SQLSTATE.get(error.sqlstate or "")
    if kind is None:
        return None
    diag = error.diag
    return kind(diag.message_primary, detail=diag.message_detail, hint=diag.message_hint)


def error_by_sqlstate(sqlstate: str | None, message: str, *, hint: str | None = None) -> Exception:
    """The error for an SQLSTATE from another driver: gdq's class, or psycopg's."""
    own = _BY_SQLSTATE.get(sqlstate or "")
    if own is not None:
        return own(message, hint=hint)
    try:
        return psycopg.errors.lookup(sqlstate or "")(message)
    except KeyError:
        return psycopg.OperationalError(message)


@contextlib.contextmanager
def mapped_errors() -> Iterator[None]:
    """Turn server errors with an SQLSTATE of gdq's into the classes above; let others pass."""
    try:
        yield
    except psycopg.Error as error:
        own = error_from_server(error)
        if own is None:
            raise
        raise own from error


def notice_line(diag: psycopg.errors.Diagnostic) -> str:
    """A NOTICE or WARNING of the server as one line, with its hint."""
    line = f"{diag.severity}: {diag.message_primary}"
    return f"{line} ({diag.message_hint})" if diag.message_hint else line
