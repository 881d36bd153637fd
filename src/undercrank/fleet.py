"""Worker processes: started, watched, started again; and what has to be done beside them, whoever serves.

`housekeeping` gives back jobs whose worker fell silent, forgets the dead, removes what was deleted or has expired, and
tells webhooks of what has ended. It may run in several processes over one store. Nothing here imports torch: a worker
is a process of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from undercrank.beside import beside
from undercrank.jobs import Store, StoreUnavailable, Watch
from undercrank.shelf import remove_files
from undercrank.undo import swap_env
from undercrank.webhooks import delivering

LEASE_S = 60.0
"A worker that has not been heard for so long is given up. Its heart beats twice a second, whatever it works on."
LEAVE_S = 30.0
"How long a worker may take to stop what it does, once told to leave."
LONGEST_REST_S = 30.0
"Between two starts of a worker that dies at once."


@contextmanager
def workers(
    url: str, data: Path, *, count: int = 1, options: Sequence[str] = (), gpus: Sequence[str] = ()
) -> Iterator[Fleet]:
    """Keep `count` worker processes running over this store and data folder; on leaving they hand back what they do.

    options: more of `undercrank worker`'s, such as ("--device", "cuda:1"). gpus: as CUDA_VISIBLE_DEVICES names them;
    each worker sees its own share. A worker outlives a parent that is killed:
    it ends the job at hand, then itself.
    """
    fleet = Fleet(url, data, count=count, options=options, gpus=gpus)
    try:
        with _every(0.2, fleet.look_after, name="fleet"):
            yield fleet
    finally:
        fleet.dismiss()


@contextmanager
def housekeeping(
    store: Store, data: Path, *, lease_s: float = LEASE_S, every_s: float = 1.0, tidy_every_s: float = 5.0
) -> Iterator[None]:
    leases, hearts = Watch(lease_s), Watch(lease_s)

    def give_back() -> None:
        store.requeue_expired(leases)
        hearts.look({worker.id: worker.beats for worker in store.workers()})
        for worker in hearts.silent:
            store.worker_lost(worker)

    with ExitStack() as stack:
        stack.enter_context(_every(every_s, give_back, name="give back"))
        stack.enter_context(delivering(store))
        stack.enter_context(_every(tidy_every_s, lambda: store.retain(partial(remove_files, data)), name="tidy"))
        yield


class Fleet:
    def __init__(
        self, url: str, data: Path, *, count: int, options: Sequence[str] = (), gpus: Sequence[str] = ()
    ) -> None:
        self._url, self._data, self._options = url, data, tuple(options)
        self._shares = shares(gpus, count)
        self._posts = [_Post(slot) for slot in range(count)]
        self._store: Store | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that run now."""
        return tuple(post.process.pid for post in self._posts if post.process is not None)

    def look_after(self) -> None:
        """Start who is missing; say in the store who has died, so that nobody has to wait for a silence."""
        for post in self._posts:
            if post.process is not None and post.process.poll() is not None:
                self._report_lost(post.process.pid)
                post.has_died()
            if post.process is None and post.may_start():
                post.started(self._start(post.slot))

    def dismiss(self) -> None:
        """Tell all to leave, wait, kill those who do not."""
        running = [post.process for post in self._posts if post.process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + LEAVE_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.returncode != 0:
                with suppress(StoreUnavailable):  # then its silence will tell
                    self._report_lost(process.pid)
        if self._store is not None:
            self._store.close()

    def _start(self, slot: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "undercrank.cli", "worker", "--data", str(self._data), "--slot", str(slot)]
        command += ["--parent", str(os.getpid()), *self._options]
        with swap_env("UNDERCRANK_DB", self._url), seeing(self._shares[slot]):  # anybody here can read arguments
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def _report_lost(self, pid: int) -> None:
        self._store = self._store or Store.open(self._url)
        for worker in self._store.workers():
            if (worker.host, worker.pid) == (socket.gethostname(), pid):
                self._store.worker_lost(worker.id)


def shares(gpus: Sequence[str], count: int) -> list[Sequence[str]]:
    """The GPUs of each of `count` workers: equal groups in order; more workers than GPUs take turns."""
    if count < len(gpus):
        return [gpus[len(gpus) * slot // count : len(gpus) * (slot + 1) // count] for slot in range(count)]
    return [gpus[slot % len(gpus) :][:1] if gpus else () for slot in range(count)]


@contextmanager
def seeing(gpus: Sequence[str]) -> Iterator[None]:
    """Processes that are started in this block see these GPUs only; none: whatever we see."""
    with swap_env("CUDA_VISIBLE_DEVICES", ",".join(gpus)) if gpus else nullcontext():
        yield


class _Post:
    """One place in the fleet, and who fills it. Who dies at once is started again ever more slowly."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.process: subprocess.Popen[bytes] | None = None
        self._started_at = self._not_before = 0.0
        self._rest_s = 0.0

    def may_start(self) -> bool:
        return time.monotonic() >= self._not_before

    def started(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self._started_at = process, time.monotonic()

    def has_died(self) -> None:
        now = time.monotonic()
        lived_long = now - self._started_at > LONGEST_REST_S
        self._rest_s = 0.0 if lived_long else min(LONGEST_REST_S, max(0.5, 2 * self._rest_s))
        self.process, self._not_before = None, now + self._rest_s


@contextmanager
def _every(seconds: float, do: Callable[[], object], *, name: str) -> Iterator[None]:
    """Do it again and again in a thread. A store that is away is waited for; a disk that errs is tried again."""

    def run(over: threading.Event) -> None:
        while True:
            try:
                do()
            except (StoreUnavailable, OSError) as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            if over.wait(seconds):
                return

    with beside(run, name=name):
        yield
