"""What `gdq refresh` shows on a terminal while it works: a line for each view with its phase, rows and time."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress, TaskID

    Told = Callable[[str, str, int], None]

# So many views are shown; the oldest goes first.
_SHOWN = 8


def shown(*, as_json: bool) -> AbstractContextManager[Told]:
    """What a Refresher tells its progress: shown where all output goes to a terminal, unless it is JSON or --quiet."""
    context = click.get_current_context(silent=True)
    quiet = context is not None and context.find_root().params.get("quiet")
    if as_json or quiet or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return nullcontext(lambda _view, _phase, _rows: None)
    return _Screen()


class _Screen(AbstractContextManager["Told"]):
    """Lines below the cursor, gone when the block ends."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        name = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), name, TextColumn("{task.fields[doing]}"), TimeElapsedColumn())
        self._progress: Progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._last: str | None = None

    def __enter__(self) -> Told:
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
        if view in self._tasks:  # begun again
            self._progress.remove_task(self._tasks.pop(view))
        if len(self._tasks) == _SHOWN:
            self._progress.remove_task(self._tasks.pop(next(iter(self._tasks))))
        self._tasks[view] = self._progress.add_task(view, total=None, doing=doing)
        self._last = view
