"""A thread for the length of a block. Floor 1."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(run: Callable[[threading.Event], object], *, name: str) -> Iterator[None]:
    """`run(over)` in a thread beside the block; where the block ends `over` is set, and the thread waited for."""
    over = threading.Event()
    thread = threading.Thread(target=run, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
