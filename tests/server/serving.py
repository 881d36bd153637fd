"""A real `undercrank serve` for tests: its processes, ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

import undercrank

SOURCE = Path(undercrank.__file__).parents[1]
PATIENCE_S = 120.0
"For a machine that has other work too."


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "undercrank.cli", *words]


def environment() -> dict[str, str]:
    """Each process on one thread, as all tests run."""
    return os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


@dataclass(kw_only=True)
class Serving:
    process: subprocess.Popen[str]
    url: str

    @property
    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE_S)

    @property
    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, word: str) -> psutil.Process:
        """The one whose command holds that word."""
        return next(child for child in self.family if word in " ".join(child.cmdline()))

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@contextmanager
def serving(data: Path, *words: str, wait: bool = True) -> Iterator[Serving]:
    """Serve from `data` on a free port; wait: until a worker is ready."""
    process = subprocess.Popen(
        command("serve", "--port", "0", "--data", str(data), *words),
        stdout=subprocess.PIPE, text=True, cwd=data,
        env=environment() | {"UNDERCRANK_LEDGER": str(data / "ledger.jsonl")},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        served = Serving(process=process, url=process.stdout.readline().strip())
        assert served.url.startswith("http://"), "it did not start"
        with served.http as http:
            if wait:
                until(lambda: http.get("/readyz").status_code == 200)
        yield served
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        psutil.wait_procs(family, timeout=20)
        for child in family:
            if child.is_running():
                child.kill()
        process.stdout.close()
        process.wait()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)
