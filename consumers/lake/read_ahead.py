"""Reading ahead: what a server sends is received by a thread while the caller works on what came before."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import TypeVar

_Item = TypeVar("_Item")

# So long a thread may take to end by itself before what it waits for is cancelled.
_END_SECONDS = 0.5


def read_ahead(
    items: Generator[_Item, None, None], most: int, cancel: Callable[[], None]
) -> Generator[_Item, None, None]:
    """The items, of which a thread takes at most `most` before they are asked for; their error is raised here.

    Close the iterator when you leave it before its end: then the thread has ended, and `items` is closed. `cancel` has
    an item that the thread waits for end with an error.
    """
    room, stopped = Semaphore(most - 1), Event()
    found: SimpleQueue[tuple[_Item] | BaseException | None] = SimpleQueue()

    def work() -> None:
        try:
            with closing(items):
                for item in items:
                    found.put((item,))
                    room.acquire()
                    if stopped.is_set():
                        return
            found.put(None)
        except BaseException as error:
            found.put(error)

    # an error may keep the iterator open until the program ends: that must not wait for the thread
    thread = Thread(target=work, name="gdq read ahead", daemon=True)
    thread.start()
    try:
        while (got := found.get()) is not None:
            if isinstance(got, BaseException):
                raise got
            room.release()
            yield got[0]
    finally:
        stopped.set()
        room.release()
        thread.join(_END_SECONDS)
        if thread.is_alive():
            cancel()
            thread.join()
