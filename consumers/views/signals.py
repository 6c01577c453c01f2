"""Signals: how a part of a refresh tells the refresh loop to begin again. No user sees one of them."""

# ruff: noqa: N818 (a signal's name says what happened)

from __future__ import annotations


class _Signal(Exception):
    """Ends one attempt of a refresh. The loop answers it, or raises a GdqError when no further attempt would help."""


class NeedsFull(_Signal):
    """The recorded changes are not enough; the view must be reloaded in full."""


class Diverged(_Signal):
    """The target does not hold the rows that its position stands for; the view must be reloaded in full."""


class TableWanted(_Signal):
    """A TRUNCATE or ALTER TABLE waits for the snapshot holder, and a reader of the refresh waits behind that statement.

    The server sees no deadlock there. The holder must end, so that the statement gets its turn; then the refresh begins
    again.
    """
