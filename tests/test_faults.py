"""What must survive: killed workers, full disks, locked databases, moved clocks, broken models, spent memory."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.pretended import PretendedEngine, small
from undercrank import worker as worker_module
from undercrank.engine import Clip, Engine
from undercrank.fleet import housekeeping, workers
from undercrank.jobs import Job, State, Store
from undercrank.records import Request
from undercrank.testing import tiny_folder
from undercrank.trace import Event, Listener
from undercrank.worker import Habits, Worker

ROOT = Path(__file__).parents[1]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder("wan2.1-1.3b", tmp_path_factory.mktemp("models") / "wan")


def add(store: Store, request: Request | None = None, **settings: Any) -> Job:
    request = request or small(**settings)
    return store.enqueue(owner="ann", model=request.model, request=request.to_dict())[0]


def wait_for(what: Callable[[], Any], seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def ended(store: Store, *jobs: Job) -> bool:
    return all(store.get(job.id).ended_at for job in jobs)


def kinds(store: Store, job: Job) -> list[str]:
    shown = ("stage", "step", "progress", "preview")
    return [event.kind for event in store.events_after(job_id=job.id) if event.kind not in shown]


def hash_of(store: Store, job: Job) -> str:
    seen = store.get(job.id)
    assert seen.state is State.COMPLETED and seen.result, seen.error
    return str(seen.result["report"]["frames_hash"])


# --------------------------------------------------------------------------- killed


def test_a_worker_killed_in_step_3_has_its_job_made_again_once_with_the_same_frames(
    store: Store, url: str, data: Path
) -> None:
    """flipbook, in worker processes that the fleet starts; the second job is the undisturbed reference."""
    request = Request(prompt="a red ball rolls left", width=64, height=64, num_frames=5, num_inference_steps=6)
    job = add(store, request)
    with workers(url, data, options=("--device", "cpu")) as fleet:
        wait_for(lambda: any(e.data.get("step") == 2 for e in store.events_after(job_id=job.id) if e.kind == "step"))
        (victim,) = fleet.pids
        os.kill(victim, signal.SIGKILL)
        again = add(store, Request.from_dict(job.request))
        wait_for(lambda: ended(store, job, again))
        assert fleet.pids != (victim,)
        long = add(store, Request.from_dict({**job.request, "num_inference_steps": 200}))
        wait_for(lambda: store.get(long.id).stage == "denoise")
    handed_back = store.get(long.id)
    assert (handed_back.state, handed_back.attempts) == (State.QUEUED, 0), "told to leave, it hands its job back"
    assert kinds(store, job) == ["queued", "started", "requeued", "started", "completed"]
    assert hash_of(store, job) == hash_of(store, again)
    assert store.get(job.id).attempts == 2 and store.get(again.id).attempts == 1
    assert {path.name for path in (data / "videos").iterdir()} == {f"{job.id}.2", f"{again.id}.1"}
    assert store.workers() == ()


def pretended_worker(url: str, data: Path, step_s: float = 0.0) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tests.pretended", url, str(data), str(step_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_two_workers_make_200_jobs_none_twice_and_none_is_lost(store: Store, url: str, data: Path) -> None:
    """One of them is killed half-way and a third takes its place."""
    jobs = [add(store, num_frames=1, num_inference_steps=1, width=16, height=16) for _ in range(200)]
    processes = [pretended_worker(url, data) for _ in range(3)]
    try:
        names = [process.stdout.readline().strip() for process in processes if process.stdout]
        wait_for(lambda: store.counts()[State.COMPLETED] >= 60)
        processes[0].kill()
        processes[0].wait()
        lost = store.worker_lost(names[0])
        wait_for(lambda: store.counts()[State.COMPLETED] == 200)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    started = {job.id: kinds(store, job).count("started") for job in jobs}
    assert len(lost) <= 1 and all(count == (2 if job in lost else 1) for job, count in started.items())
    made = {store.get(job.id).worker for job in jobs}
    assert made <= set(names) and len(made) >= 2
    assert len(list((data / "videos").glob("*/video.mp4"))) == 200


def test_a_full_queue_survives_a_restart_also_one_with_a_broken_model(url: str, data: Path, tmp_path: Path) -> None:
    with Store.open(url) as store:
        broken = add(store, model=str(tmp_path / "gone"))
        jobs = [add(store) for _ in range(5)]
        assert store.claim("a worker that is killed")
    with Store.open(url) as store:
        assert store.counts()[State.QUEUED] == 5
        with (
            housekeeping(store, data, lease_s=2.0, every_s=0.02),
            Worker(store, data, habits=Habits(beat_s=0.02), new_engine=Pretended) as worker,
        ):
            wait_for(lambda: worker.run(until_idle=True) or ended(store, broken, *jobs))
        error = store.get(broken.id).error
        assert error and error.code in ("missing", "bad_input")
        assert [store.get(job.id).state for job in jobs] == [State.COMPLETED] * 5
        order = sorted(jobs, key=lambda job: store.get(job.id).ended_at or 0)
        assert [job.id for job in order] == [job.id for job in jobs]


# --------------------------------------------------------------------------- disk, database, clock


class Pretended(PretendedEngine):
    """A class of its own, so that what it remembers is not that of other tests."""

    alive: list[PretendedEngine] = []
    born: list[PretendedEngine] = []
    made: list[str] = []


def doing(stage: str, done: int, do: Callable[[], Any]) -> type[PretendedEngine]:
    """An engine that does something before it tells that event, each time."""

    def during(engine: PretendedEngine, event: Event, request: Request) -> None:
        if (event.stage, event.done) == (stage, done):
            do()

    return type("Engine", (PretendedEngine,), {"alive": [], "born": [], "made": [], "during": staticmethod(during)})


def test_a_disk_that_is_full_fails_the_job_and_leaves_nothing_half_written(
    store: Store, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system itself refuses to let a file grow: as on a full disk, after some bytes."""
    write, full = worker_module.write_files, [True]

    def on_a_full_disk(*args: Any, **options: Any) -> Any:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if full.pop() if full else False:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            return write(*args, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(worker_module, "write_files", on_a_full_disk)
    failed, good = add(store), add(store)
    with Worker(store, data, habits=Habits(beat_s=60, told_s=60), new_engine=Pretended) as worker:
        worker.run(until_idle=True)
    error = store.get(failed.id).error
    assert error and error.code == "disk_full" and "room" in error.remedy
    assert store.get(good.id).state is State.COMPLETED
    assert [path.name for path in (data / "videos").iterdir()] == [f"{good.id}.1"]
    assert not list(data.rglob("*.part*"))


@pytest.mark.parametrize("busy_s", [30.0, 0.1], ids=["waited for", "longer than anybody waits"])
def test_a_locked_database_loses_no_job(url: str, tmp_path: Path, data: Path, busy_s: float) -> None:
    """Locked for three times as long as a lease lives without being renewed."""

    def lock() -> None:
        other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")

        def let_go() -> None:
            time.sleep(3.0)
            other.execute("ROLLBACK")
            other.close()

        threading.Thread(target=let_go).start()

    engine = doing("denoise", 2, lock)
    with Store.open(url, busy_s=busy_s) as store:
        job = add(store)
        with (
            housekeeping(store, data, lease_s=1.0, every_s=0.02),
            Worker(store, data, habits=Habits(beat_s=0.02), new_engine=engine) as worker,
        ):
            wait_for(lambda: worker.run(until_idle=True) or ended(store, job))
        assert (store.get(job.id).state, store.get(job.id).attempts) == (State.COMPLETED, 1)
        steps = [event.data["step"] for event in store.events_after(job_id=job.id) if event.kind == "step"]
        assert steps == [1, 2, 3, 4] if busy_s > 1 else 1 in steps


@pytest.mark.parametrize("jump_s", [1e7, -1e7])
def test_a_clock_that_is_moved_under_a_job_changes_nothing(
    store: Store, data: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    real = time.time
    engine = doing("denoise", 2, lambda: monkeypatch.setattr(time, "time", lambda: real() + jump_s))
    jobs = [add(store), add(store)]
    with housekeeping(store, data, lease_s=5, every_s=0.02), Worker(store, data, new_engine=engine) as worker:
        worker.run(until_idle=True)
        later = add(store)
        worker.run(until_idle=True)
    for job in (*jobs, later):
        assert kinds(store, job) == ["queued", "started", "completed"]
    ends = [store.get(job.id).ended_at or 0 for job in (*jobs, later)]
    assert ends == sorted(ends)


# --------------------------------------------------------------------------- the real engine


class Watched(Engine):
    """The engine, and what happens at a word of it."""

    at: dict[tuple[str, int], Callable[[Engine], Any]] = {}

    def generate(self, request: Request, *, listener: Listener = lambda event: None, on_latents: Any = None) -> Clip:
        def listening(event: Event) -> None:
            if do := self.at.get((event.stage, event.done)):
                do(self)
            listener(event)

        return super().generate(request, listener=listening, on_latents=on_latents)


def watched(stage: str, done: int, do: Callable[[Engine], Any]) -> type[Engine]:
    over: list[bool] = []

    def once(engine: Engine) -> None:
        if not over:
            over.append(True)
            do(engine)

    return type("Engine", (Watched,), {"at": {(stage, done): once}})


def tensors() -> int:
    """Bytes of all tensors that live."""
    gc.collect()
    found = {id(each): each.nbytes for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)}
    return sum(found.values())


@pytest.mark.parametrize(
    ("stage", "done"), [("text", 0), ("denoise", 0), ("denoise", 1), ("decode", 0)], ids=lambda value: str(value)
)
def test_a_cancel_frees_the_memory_of_a_run_within_one_step(
    store: Store, data: Path, folder: Path, stage: str, done: int
) -> None:
    first = add(store, model=str(folder))
    with Worker(store, data, habits=Habits(beat_s=60), new_engine=Watched) as worker:
        worker.run(until_idle=True)
        before = tensors()
        job, after = add(store, model=str(folder)), add(store, Request.from_dict(first.request))
        engine = worker._models._engines[0]
        steps_of = lambda: [e.data["step"] for e in store.events_after(job_id=job.id) if e.kind == "step"]  # noqa: E731
        engine.at = {(stage, done): lambda engine: store.cancel(job.id)}
        claim = store.claim(worker.id)
        assert claim and claim.job.id == job.id
        worker._film(claim)
        assert store.get(job.id).state is State.CANCELLED
        assert tensors() <= before
        assert len(steps_of()) <= (4 if stage == "decode" else done + 1)
        engine.at = {}
        worker.run(until_idle=True)
    assert hash_of(store, after) == hash_of(store, first)


def test_a_cancel_while_loading_stops_before_the_next_component(store: Store, data: Path, folder: Path) -> None:
    job, after = add(store, model=str(folder)), add(store, model=str(folder))
    before = tensors()
    engine = watched("load", 0, lambda engine: store.cancel(job.id))
    with Worker(store, data, habits=Habits(beat_s=60), new_engine=engine) as worker:
        claim = store.claim(worker.id)
        assert claim
        worker._film(claim)
        assert store.get(job.id).state is State.CANCELLED
        assert tensors() <= before
        worker.run(until_idle=True)
    assert store.get(after.id).state is State.COMPLETED


def test_memory_that_runs_out_in_one_job_leaves_the_next_as_if_nothing_had_been(
    store: Store, data: Path, folder: Path
) -> None:
    request = small(model=str(folder), seed=7)

    def run_out(engine: Engine) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    failed, good = add(store, request), add(store, request)
    with Worker(store, data, new_engine=watched("denoise", 3, run_out)) as worker:
        worker.run(until_idle=True)
    error = store.get(failed.id).error
    assert error and error.code == "out_of_memory" and "frames" in error.remedy
    with Engine() as fresh:
        assert hash_of(store, good) == fresh.generate(request).report.frames_hash


def test_a_corrupt_model_folder_fails_its_jobs_and_no_others(
    store: Store, data: Path, folder: Path, tmp_path: Path
) -> None:
    corrupt = tiny_folder("wan2.1-1.3b", tmp_path / "corrupt")
    weights = next((corrupt / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    bad, good = add(store, model=str(corrupt)), add(store, model=str(folder))
    with Worker(store, data) as worker:
        worker.run(until_idle=True)
    error = store.get(bad.id).error
    assert error and error.code == "bad_input" and "transformer" in error.message
    assert store.get(good.id).state is State.COMPLETED


def test_frames_that_are_not_finite_fail_the_job(store: Store, data: Path, folder: Path, tmp_path: Path) -> None:
    spoilt = tiny_folder("wan2.1-1.3b", tmp_path / "spoilt")
    file = next((spoilt / "vae").glob("*.safetensors"))
    weights = safetensors.torch.load_file(file)
    weights["decoder.conv_out.bias"].fill_(float("nan"))
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    bad, good = add(store, model=str(spoilt)), add(store, model=str(folder))
    with Worker(store, data) as worker:
        worker.run(until_idle=True)
    error = store.get(bad.id).error
    assert error and error.code == "run_failed" and "frame" in error.message
    assert store.get(good.id).state is State.COMPLETED
    assert [path.name for path in (data / "videos").iterdir()] == [f"{good.id}.1"]
