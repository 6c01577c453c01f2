"""Progress of `gdq refresh` on a terminal: a line for each view with its phase, rows and time."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress, TaskID

    _Told = Callable[[str, str, int], None]

# At most this many views are shown; the oldest is removed first.
_SHOWN = 8


def shown_progress(*, as_json: bool) -> AbstractContextManager[_Told]:
    """The progress function of a Refresher; it shows nothing with JSON, --quiet or output that is not a terminal."""
    context = click.get_current_context(silent=True)
    quiet = context is not None and context.find_root().params.get("quiet")
    if as_json or quiet or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return nullcontext(lambda _view, _phase, _rows: None)
    return _Screen()


class _Screen(AbstractContextManager["_Told"]):
    """Lines below the cursor, removed after the block."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        name = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), name, TextColumn("{task.fields[doing]}"), TimeElapsedColumn())
        self._progress: Progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._last: str | None = None

    def __enter__(self) -> _Told:
        self._progress.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _tell(self, view: str, phase: str, rows: int) -> None:
        doing = f"{phase} {rows:,} rows" if rows else phase
        if view == self._last:
            self._progress.update(self._tasks[view], doing=doing)
        else:
            self._begin(view, doing)

    def _begin(self, view: str, doing: str) -> None:
        if self._last is not None:
            self._progress.stop_task(self._tasks[self._last])
        if view in self._tasks:  # the refresh started again
            self._progress.remove_task(self._tasks.pop(view))
        if len(self._tasks) == _SHOWN:
            self._progress.remove_task(self._tasks.pop(next(iter(self._tasks))))
        self._tasks[view] = self._progress.add_task(view, total=None, doing=doing)
        self._last = view
