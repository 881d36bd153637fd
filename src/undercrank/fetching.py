"""A model's files from the hub, in a process of their own, so that a download can be ended at once.

What downloads waits in sockets and in native code, in threads that hear of no cancel before their next 10 MB; a process
can be ended whatever it waits for, and leaves no thread. What has come so far stays in the hub's cache, and the next
download goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Progress = Callable[[int, int], None]
"Told the bytes that have come and those of all files, several times a second. What it raises ends the download."

ASK_S = 0.1
END_S = 1.0
"For the process to end by itself."


def fetch(repo: str, options: dict[str, Any], progress: Progress) -> Path:
    """The folder of the downloaded snapshot; options: those of `snapshot_download`. Raises OSError with its reason."""
    answer: dict[str, Any] = {"error": "the process that downloads ended without a word"}
    done = total = 0
    with _downloading(repo, options) as words:
        for told in words:
            answer = told if told is not None and "done" not in told else answer
            done, total = (told["done"], told["total"]) if told is not None and "done" in told else (done, total)
            progress(done, total)
    if "folder" not in answer:
        raise OSError(answer["error"])
    return Path(answer["folder"])


@contextlib.contextmanager
def _downloading(repo: str, options: dict[str, Any]) -> Iterator[Iterator[dict[str, Any] | None]]:
    """What the process says, as it says it; None while it says nothing."""
    command = [sys.executable, "-m", __name__, json.dumps([repo, options])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout as pipe:
        try:
            yield _words(pipe.fileno())
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _words(pipe: int) -> Iterator[dict[str, Any] | None]:
    unread = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(ASK_S):
                yield None
                continue
            if not (some := os.read(pipe, 65536)):
                return
            *lines, unread = (unread + some).split(b"\n")
            yield from map(json.loads, lines)


# --------------------------------------------------------------------------- in that process


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for who started us, and who will end us
    repo, options = json.loads(sys.argv[1])
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repo, tqdm_class=_bar(), **options)
    except Exception as error:  # whatever it is, it is the answer
        _say({"error": str(error).strip() or type(error).__name__})
    else:
        _say({"folder": str(folder)})


def _bar() -> type:
    """A bar that is not drawn: that which counts bytes says how far it is."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        told_at = 0.0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B" and "Downloading" not in str(kwargs.get("desc"))
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.n, self.total = kwargs.get("initial") or 0, kwargs.get("total")

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.counts_bytes and time.monotonic() - Bar.told_at >= ASK_S:
                Bar.told_at = time.monotonic()
                _say({"done": int(self.n), "total": int(self.total or 0)})

    return Bar


_SAYING = threading.Lock()


def _say(words: dict[str, Any]) -> None:
    with _SAYING:
        print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
