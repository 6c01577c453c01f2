"""Refreshes that end where a test says: as if their process were killed, or by Ctrl-C."""

from __future__ import annotations

from gdq.consumers.refresh.view_refresh import RefreshPoint


class Killed(Exception):  # noqa: N818 (it stands for no error)
    """Stands for the end of the process."""


class Deaths(list[RefreshPoint]):
    """The points at which a Refresher is killed, each once, in this order; for its argument `at`."""

    def __call__(self, point: RefreshPoint) -> None:
        if self and self[0] == point:
            raise Killed(self.pop(0))


class Interrupts(list[str]):
    """The phases in which Ctrl-C comes to a Refresher, each once, in this order; for its argument `progress`."""

    def __call__(self, _view: str, phase: str, _rows: int, _expected: int | None) -> None:
        if self and self[0] == phase:
            raise KeyboardInterrupt(self.pop(0))
