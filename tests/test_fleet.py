"""The fleet: who dies is started again and reported; housekeeping gives back, forgets and tidies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from undercrank import fleet as fleet_module
from undercrank.fleet import Fleet, housekeeping, shares, workers
from undercrank.jobs import State, Store, StoreUnavailable
from undercrank.undo import swap_attr


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


def wait_for(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


@pytest.fixture
def sleepers(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Processes that sleep in place of workers; the commands that would have started workers."""
    commands: list[list[str]] = []
    popen = subprocess.Popen

    def sleeping(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return popen([sys.executable, "-c", "import time; time.sleep(600)"], **options)

    monkeypatch.setattr(fleet_module.subprocess, "Popen", sleeping)
    return commands


@pytest.mark.parametrize(
    ("gpus", "count", "expected"),
    [
        ("", 2, ["", ""]),
        ("0", 1, ["0"]),
        ("0123", 1, ["0123"]),
        ("0123", 2, ["01", "23"]),
        ("012", 2, ["0", "12"]),
        ("01", 3, ["0", "1", "0"]),
        ("0", 0, []),
    ],
)
def test_gpus_are_shared_out_in_groups(gpus: str, count: int, expected: list[str]) -> None:
    assert ["".join(share) for share in shares(tuple(gpus), count)] == expected


def test_a_worker_sees_its_own_gpus(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def popen(command: list[str], **_: Any) -> Any:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return subprocess.Popen(["sleep", "600"])

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(fleet_module, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=None))
        fleet = Fleet(url, tmp_path, count=2, gpus=("4", "5", "GPU-6"))
        fleet.look_after()
    fleet.dismiss()
    assert seen == ["4", "5,GPU-6"] and "CUDA_VISIBLE_DEVICES" not in os.environ


def test_as_many_as_asked_for_run_and_none_is_left(url: str, tmp_path: Path, sleepers: list[list[str]]) -> None:
    with workers(url, tmp_path, count=2, options=("--device", "cpu")) as fleet:
        pids = wait_for(lambda: len(fleet.pids) == 2 and fleet.pids)
    assert [command[command.index("--slot") + 1] for command in sleepers] == ["0", "1"]
    assert all(command[-2:] == ["--device", "cpu"] and str(os.getpid()) in command for command in sleepers)
    assert url not in " ".join(map(" ".join, sleepers)), "a password among the arguments"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_who_dies_is_reported_and_started_again(
    url: str, store: Store, tmp_path: Path, sleepers: list[list[str]]
) -> None:
    job, _ = store.enqueue(owner="ann", model="m", request={})
    with workers(url, tmp_path) as fleet:
        (pid,) = wait_for(lambda: fleet.pids)
        store.beat("w1", host=socket.gethostname(), pid=pid, device="cpu", state="busy")
        store.beat("w2", host="elsewhere", pid=pid, device="cpu", state="busy")
        assert store.claim("w1")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: store.get(job.id).state is State.QUEUED)
        wait_for(lambda: fleet.pids and fleet.pids != (pid,))
    assert [worker.id for worker in store.workers()] == ["w2"]


def test_who_dies_at_once_is_started_ever_more_slowly() -> None:
    now = [100.0]
    post = fleet_module._Post(0)
    rests = []
    with swap_attr(fleet_module.time, "monotonic", lambda: now[0]):
        for _ in range(9):
            assert post.may_start()
            post.started(None)  # type: ignore[arg-type]
            post.has_died()
            begun = now[0]
            while not post.may_start():
                now[0] += 0.25
            rests.append(now[0] - begun)
        post.started(None)  # type: ignore[arg-type]
        now[0] += 100
        post.has_died()
        assert post.may_start()
    assert rests == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_who_does_not_leave_is_killed(url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); time.sleep(600)"

    def start(command: list[str], **options: Any) -> Any:
        process = popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, **options)
        process.stdout.readline()
        process.stdout.close()
        return process

    monkeypatch.setattr(fleet_module.subprocess, "Popen", start)
    monkeypatch.setattr(fleet_module, "LEAVE_S", 0.1)
    fleet = Fleet(url, tmp_path, count=1)
    fleet.look_after()
    store.beat("w1", host=socket.gethostname(), pid=fleet.pids[0], device="cpu", state="idle")
    fleet.dismiss()
    assert store.workers() == ()


def test_housekeeping_gives_back_what_fell_silent_and_forgets_the_dead(store: Store, tmp_path: Path) -> None:
    job, _ = store.enqueue(owner="ann", model="m", request={})
    store.beat("w1", host="h", pid=1, device="cpu", state="busy")
    assert store.claim("w1")
    with housekeeping(store, tmp_path, lease_s=0.2, every_s=0.01):
        wait_for(lambda: store.get(job.id).state is State.QUEUED)
        wait_for(lambda: store.workers() == ())


def test_housekeeping_removes_what_was_deleted_with_its_files(store: Store, tmp_path: Path) -> None:
    job, _ = store.enqueue(owner="ann", model="m", request={})
    film = tmp_path / "videos" / f"{job.id}.1" / "video.mp4"
    film.parent.mkdir(parents=True)
    film.touch()
    store.delete(job.id)
    with housekeeping(store, tmp_path, tidy_every_s=0.01):
        wait_for(lambda: not film.parent.exists())
        wait_for(lambda: store.events_after(job_id=job.id) == ())


def test_housekeeping_outlives_a_store_that_is_away(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[bool] = []

    def away(watch: Any) -> tuple[str, ...]:
        calls.append(True)
        if len(calls) < 3:
            raise StoreUnavailable("locked")
        return ()

    monkeypatch.setattr(store, "requeue_expired", away)
    with housekeeping(store, tmp_path, every_s=0.01):
        wait_for(lambda: len(calls) > 3)
    assert "give back: locked" in capsys.readouterr().err
