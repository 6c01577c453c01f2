"""Signals: exceptions by which a part of a refresh makes the refresh loop start again. Users never see one."""

# ruff: noqa: N818 (a signal's name says what happened)

from __future__ import annotations


class _Signal(Exception):
    """Ends one attempt of a refresh. The loop starts another, or raises a GdqError if no attempt would help."""


class NeedsFull(_Signal):
    """The recorded changes are not enough; the view must be reloaded in full."""


class Diverged(_Signal):
    """The target's rows do not match its position; the view must be reloaded in full."""


class TableWanted(_Signal):
    """A TRUNCATE or ALTER TABLE waits for the snapshot holder, and a reader of the refresh waits behind that statement.

    The server sees no deadlock. The holder must end so that the statement can run; then the refresh starts again.
    """


class NeedsTables(_Signal):
    """One statement is not enough for the changes; the refresh must begin again, by temporary tables.

    Example: the target lacks the text of a row that went. It may hold an equal row, which only tables find.
    """


class ManyRows(NeedsTables):
    """Few changes change many rows of the view."""
