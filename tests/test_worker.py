"""The worker: what it tells, what it keeps, how a job ends, how models take turns. The engine is pretended."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.databases import postgres_server
from tests.pretended import PretendedEngine, small
from undercrank import worker as worker_module
from undercrank.jobs import Job, State, Store, StoreUnavailable
from undercrank.ledger import read_ledger
from undercrank.records import BadInput, Cancelled, LeverRefused, Loading, NotFound, OutOfMemory, Request, RunFailed
from undercrank.shelf import attempt_folder
from undercrank.trace import Event
from undercrank.video import frames_hash, probe, read_frames, read_recipe
from undercrank.worker import Habits, Worker, job_error, percent_of


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path}/jobs.db") as store:
        yield store


@pytest.fixture
def engine() -> type[PretendedEngine]:
    return type("Engine", (PretendedEngine,), {"alive": [], "born": [], "made": []})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


Run = Callable[..., None]


@pytest.fixture
def run(store: Store, data: Path, engine: type[PretendedEngine]) -> Run:
    """Work until there is nothing to do."""

    def run(**habits: Any) -> None:
        with Worker(store, data, habits=Habits(**habits), new_engine=engine) as worker:
            worker.run(until_idle=True)

    return run


def add(store: Store, prompt: str = "a red ball", *, model: str = "flipbook", options: Any = None, **more: Any) -> Job:
    request = small(prompt, model=model, **more)
    return store.enqueue(owner="ann", model=model, request=request.to_dict(), options=options)[0]


def at(stage: str, done: int, do: Callable[[PretendedEngine], None]) -> Any:
    """`during` of an engine: do this once, before that event is told."""
    over = []

    def during(engine: PretendedEngine, event: Event, request: Request) -> None:
        if (event.stage, event.done) == (stage, done) and not over:
            over.append(True)
            do(engine)

    return staticmethod(during)


def raising(error: BaseException) -> Callable[[PretendedEngine], None]:
    def do(engine: PretendedEngine) -> None:
        raise error

    return do


# --------------------------------------------------------------------------- a job that goes well


def test_a_job_becomes_files_that_its_row_names(store: Store, data: Path, run: Run) -> None:
    job = add(store, options={"master": True})
    run()
    done = store.get(job.id)
    assert done.state is State.COMPLETED and done.result is not None
    files = {variant: data / name for variant, name in done.result["files"].items()}
    assert set(files) == {"video", "master", "thumbnail", "preview", "report"}
    assert {file.name for file in (data / "videos" / f"{job.id}.1").iterdir()} == {f.name for f in files.values()}
    report = json.loads(files["report"].read_text())
    assert report == done.result["report"] and report["request"]["seed"] == job.seed
    assert report["trace"]["stage_s"]["encode"] > 0
    assert frames_hash(read_frames(files["master"])) == report["frames_hash"]
    assert probe(files["video"]).num_frames == 5 and read_recipe(files["video"])["request"]["seed"] == job.seed
    assert all(not Path(name).is_absolute() for name in done.result["files"].values())


def test_a_master_is_kept_only_on_request(store: Store, run: Run) -> None:
    job = add(store)
    run()
    assert "master" not in (store.get(job.id).result or {})["files"]


def test_each_stage_and_each_step_is_told(store: Store, run: Run) -> None:
    job = add(store)
    run()
    events = store.events_after(job_id=job.id)
    stages = [event.data["stage"] for event in events if event.kind == "stage"]
    assert stages == ["load", "text", "denoise", "decode", "encode"]
    assert [event.data["step"] for event in events if event.kind == "step"] == [1, 2, 3, 4]
    assert [event.kind for event in events if event.kind not in ("stage", "step", "progress")] == [
        "queued", "started", "completed",
    ]  # fmt: skip
    progress = [event.data["progress"] for event in events if "progress" in event.data]
    assert progress == sorted(progress) and progress[0] >= 0 and progress[-1] <= 100


def test_the_bar_is_filled_stage_by_stage() -> None:
    assert [percent_of(Event(stage=stage, done=0, total=1)) for stage in worker_module.SHARES] == [0, 5, 8, 90, 95]
    assert percent_of(Event(stage="denoise", done=2, total=4)) == 49
    assert percent_of(Event(stage="load", done=0, total=0)) == 0


def test_the_times_of_a_run_are_remembered(store: Store, run: Run) -> None:
    add(store)
    run()
    assert [row.family for row in read_ledger().rows if row.source == "measured here"] == ["flipbook"]


def test_runs_alike_are_remembered_a_few_times_only(store: Store, run: Run) -> None:
    """A server makes thousands: its ledger must not grow with each."""
    for _ in range(worker_module.KEPT_RUNS + 2):
        add(store)
    add(store, num_inference_steps=7)
    run()
    steps = [row.num_inference_steps for row in read_ledger().rows if row.source == "measured here"]
    assert steps == [4] * worker_module.KEPT_RUNS + [7]


def test_the_device_of_the_worker_is_for_jobs_that_name_none(store: Store, run: Run) -> None:
    jobs = [add(store), add(store, device="cpu")]
    run(device="cpu")
    assert [(store.get(job.id).result or {})["report"]["plan"]["load"]["device"] for job in jobs] == ["cpu", "cpu"]


# --------------------------------------------------------------------------- a job that does not


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (RunFailed("non-finite latents at step 2 of 4: try another dtype"), "run_failed", "non-finite"),
        (BadInput("no such size", field="width"), "bad_input", "no such size"),
        (LeverRefused("no cuda here"), "lever_refused", "no cuda"),
        (NotFound("there is no folder x"), "missing", "x"),
        (OutOfMemory("memory ran out on cpu: 32x32 with 5 frames fits"), "out_of_memory", "memory ran out on cpu"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full", "disk is full"),
        (OSError(errno.EACCES, "Permission denied"), "write_failed", "Permission denied"),
        (ZeroDivisionError("division by zero"), "internal_error", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_failure_is_told_with_its_code_and_a_remedy_and_the_next_job_is_made(
    store: Store, data: Path, run: Run, engine: type[PretendedEngine], error: Exception, code: str, says: str
) -> None:
    engine.during = at("denoise", 3, raising(error))
    failed, good = add(store), add(store)
    run()
    job = store.get(failed.id)
    assert job.state is State.FAILED and job.attempts == 1 and job.error is not None
    assert (job.error.code, says in job.error.message, bool(job.error.remedy)) == (code, True, True)
    assert store.get(good.id).state is State.COMPLETED
    assert [folder.name for folder in (data / "videos").iterdir()] == [f"{good.id}.1"]


def test_out_of_memory_says_what_fits(store: Store, run: Run, engine: type[PretendedEngine]) -> None:
    engine.during = at("denoise", 1, raising(OutOfMemory("memory ran out on cpu: 32x32 with 5 frames fits")))
    job = add(store)
    run()
    error = store.get(job.id).error
    assert error and (error.message, error.remedy) == ("memory ran out on cpu", "32x32 with 5 frames fits")


@pytest.mark.parametrize(
    ("error", "loads"),
    [(OutOfMemory("memory ran out: x"), 2), (ZeroDivisionError("x"), 2), (RunFailed("non-finite: x"), 1)],
)
def test_after_a_failure_that_leaves_doubt_the_next_job_begins_with_fresh_weights(
    store: Store, run: Run, engine: type[PretendedEngine], error: Exception, loads: int
) -> None:
    engine.during = at("denoise", 1, raising(error))
    add(store), add(store)
    run()
    assert len(engine.born) == loads and store.counts()[State.COMPLETED] == 1


def test_a_device_that_is_lost_costs_one_job_and_the_process(
    store: Store, data: Path, engine: type[PretendedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "device_is_lost", lambda: True)
    monkeypatch.setattr(engine, "close", lambda self: pytest.fail("touched the device"))
    engine.during = at("denoise", 2, raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
    failed, other = add(store), add(store)
    with pytest.raises(SystemExit) as stop, Worker(store, data, new_engine=engine) as worker:
        worker.run()
    assert stop.value.code == worker_module.START_AGAIN
    error = store.get(failed.id).error
    assert error and error.code == "internal_error" and "illegal" in error.message
    assert store.get(other.id).state is State.QUEUED


def test_without_a_gpu_no_device_is_lost() -> None:
    if not torch.cuda.is_initialized():
        assert worker_module.device_is_lost() is False


def test_a_request_that_cannot_be_read_fails_and_harms_nobody(store: Store, run: Run) -> None:
    bad = store.enqueue(owner="ann", model="flipbook", request={"promt": "x"})[0]
    good = add(store)
    run()
    error = store.get(bad.id).error
    assert error and error.code == "bad_input" and "promt" in error.message
    assert store.get(good.id).state is State.COMPLETED


def test_an_error_without_words_has_a_message() -> None:
    assert job_error(KeyError()).message == "KeyError: "


# --------------------------------------------------------------------------- cancel, loss, leave


@pytest.mark.parametrize(
    ("stage", "done"), [("load", 0), ("load", 100), ("text", 0), ("denoise", 0), ("denoise", 2), ("decode", 0)]
)
def test_a_cancel_in_any_stage_is_heard_at_its_next_word(
    store: Store, data: Path, run: Run, engine: type[PretendedEngine], stage: str, done: int
) -> None:
    job, other = add(store, "first"), add(store, "second")
    told: list[tuple[str, int]] = []
    cancel = at(stage, done, lambda _: store.cancel(job.id))

    def during(it: PretendedEngine, event: Event, request: Request) -> None:
        if request.prompt == "first":
            told.append((event.stage, event.done))
            cancel.__func__(it, event, request)

    engine.during = staticmethod(during)
    run(beat_s=60.0, told_s=0.0)  # the heart is not needed for it
    assert store.get(job.id).state is State.CANCELLED
    assert told[-1] == (stage, done), "it went on"
    assert store.get(other.id).state is State.COMPLETED
    assert not list((data / "videos").glob(f"{job.id}*"))


def test_a_cancel_while_the_film_is_encoded_leaves_no_file(
    store: Store, data: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add(store)
    tell = worker_module.Telling.__call__

    def cancelling(self: Any, event: Event) -> None:
        if (event.stage, event.done) == ("encode", 1):
            store.cancel(job.id)
        tell(self, event)

    monkeypatch.setattr(worker_module.Telling, "__call__", cancelling)
    run(told_s=0.0)
    assert store.get(job.id).state is State.CANCELLED
    assert not list((data / "videos").iterdir())


def test_the_heart_hears_of_a_cancel_while_a_stage_says_nothing(
    store: Store, run: Run, engine: type[PretendedEngine]
) -> None:
    job = add(store)

    def wait_for_the_heart(it: PretendedEngine) -> None:
        store.cancel(job.id)
        deadline = time.monotonic() + 10
        while it._reason is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert it._reason == "cancelled"

    engine.during = at("decode", 0, wait_for_the_heart)
    run(beat_s=0.05)
    assert store.get(job.id).state is State.CANCELLED


def test_a_job_that_was_given_to_another_is_dropped_at_once(
    store: Store, data: Path, run: Run, engine: type[PretendedEngine]
) -> None:
    job = add(store)
    stolen: list[Any] = []

    def steal(it: PretendedEngine) -> None:
        (worker,) = store.workers()
        store.worker_lost(worker.id)
        stolen.append(store.claim("thief"))

    told: list[int] = []

    def during(it: PretendedEngine, event: Event, request: Request) -> None:
        told.append(event.done)
        steals.__func__(it, event, request)

    steals, engine.during = at("denoise", 2, steal), staticmethod(during)
    run(beat_s=60.0)
    assert told[-1] == 2, "it went on"
    seen = store.get(job.id)
    assert (seen.state, seen.worker, seen.attempts) == (State.IN_PROGRESS, "thief", 2)
    assert not list((data / "videos").iterdir())
    assert store.finish(stolen[0].lease, {}).state is State.COMPLETED


def test_a_worker_that_lost_its_job_while_writing_does_not_finish_it(
    store: Store, data: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add(store)
    write = worker_module.write_files

    def slow(*args: Any, **options: Any) -> Any:
        done = write(*args, **options)
        (worker,) = store.workers()
        store.worker_lost(worker.id)
        claim = store.claim("other")
        assert claim is not None
        other = attempt_folder(data, claim.lease)
        other.mkdir()
        (other / "video.mp4").write_text("the other's")
        return done

    monkeypatch.setattr(worker_module, "write_files", slow)
    run(beat_s=60.0)
    assert store.get(job.id).worker == "other"
    assert [file.read_text() for file in (data / "videos").rglob("*.mp4")] == ["the other's"]


def test_a_worker_that_is_told_to_leave_hands_its_job_back(
    store: Store, data: Path, engine: type[PretendedEngine]
) -> None:
    job = add(store)
    with Worker(store, data, new_engine=engine) as worker:
        engine.during = at("denoise", 2, lambda _: worker.leave())
        worker.run()
    seen = store.get(job.id)
    assert (seen.state, seen.attempts) == (State.QUEUED, 0)
    assert store.workers() == () and engine.alive == [] and not list((data / "videos").iterdir())


def test_a_stop_from_the_keyboard_hands_the_job_back_and_goes_on_upwards(
    store: Store, data: Path, engine: type[PretendedEngine]
) -> None:
    job = add(store)
    engine.during = at("denoise", 2, raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), Worker(store, data, new_engine=engine) as worker:
        worker.run()
    assert store.get(job.id).state is State.QUEUED


def test_a_worker_that_is_to_stay_only_as_long_as_its_parent_ends_the_job_at_hand_first(
    store: Store, data: Path, engine: type[PretendedEngine]
) -> None:
    jobs = [add(store), add(store)]
    answers = iter([True, False])
    with Worker(store, data, new_engine=engine) as worker:
        worker.run(stay=lambda: next(answers))
    assert [store.get(job.id).state for job in jobs] == [State.COMPLETED, State.QUEUED]


def test_a_process_that_is_stuck_ends_itself(
    store: Store, data: Path, engine: type[PretendedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store)
    ended = threading.Event()

    def end(status: int) -> None:
        if status == worker_module.START_AGAIN:
            ended.set()

    monkeypatch.setattr(os, "_exit", end)
    engine.during = at("denoise", 2, lambda _: ended.wait(10))
    with Worker(store, data, habits=Habits(beat_s=0.02, stuck_s=0.2), new_engine=engine) as worker:
        worker.run(until_idle=True)
    assert ended.is_set()


# --------------------------------------------------------------------------- the store is away


def test_a_store_that_is_away_costs_events_and_not_the_film(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = add(store)
    event, finish, refused = store.event, store.finish, []

    def away(*args: Any, **more: Any) -> Any:
        if args[1] == "step":
            raise StoreUnavailable("the job store does not answer")
        return event(*args, **more)

    def at_the_third_time(*args: Any) -> Any:
        refused.append(True)
        if len(refused) < 3:
            raise StoreUnavailable("the job store does not answer")
        return finish(*args)

    monkeypatch.setattr(store, "event", away)
    monkeypatch.setattr(store, "finish", at_the_third_time)
    monkeypatch.setattr(worker_module, "AGAIN_S", 0.01)
    run()
    assert store.get(job.id).state is State.COMPLETED and len(refused) == 3
    assert "step" not in [each.kind for each in store.events_after(job_id=job.id)]
    assert "a red ball" not in capsys.readouterr().err, "a prompt in the log"


def test_a_store_that_is_away_costs_words_about_a_load_and_not_the_load(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, asked = store.command("load", "flipbook", owner="ann"), []

    def away(*args: Any, **more: Any) -> Any:
        asked.append(args)
        raise StoreUnavailable("the job store does not answer")

    monkeypatch.setattr(store, "command_progress", away)
    run()
    assert asked and store.get_command(command.id).state is State.COMPLETED


def test_a_stop_that_came_before_there_was_anything_to_stop_is_heard_at_the_next_word() -> None:
    work = worker_module.Work("flipbook", None, None)
    work.stop("the worker was told to leave")
    with pytest.raises(Cancelled, match="told to leave"):
        work.hear(Event(stage="load", done=0, total=1))


# --------------------------------------------------------------------------- models take turns


def test_models_take_turns_in_one_worker(store: Store, run: Run, engine: type[PretendedEngine]) -> None:
    jobs = [add(store, model=model) for model in ("flipbook", "wan2.1-1.3b", "flipbook")]
    most: list[int] = []
    engine.during = staticmethod(lambda *_: most.append(len(engine.alive)))
    run()
    assert {store.get(job.id).state for job in jobs} == {State.COMPLETED} and max(most) == 1


def test_as_many_models_stay_as_the_worker_may_hold_and_the_longest_unused_goes(
    store: Store, data: Path, engine: type[PretendedEngine]
) -> None:
    with Worker(store, data, habits=Habits(resident=2), new_engine=engine) as worker:
        for model in ("flipbook", "wan2.1-1.3b", "flipbook", "wan2.1-14b"):
            add(store, model=model, width=32, height=32)
            worker.run(until_idle=True)
        assert worker._models.names == ("flipbook", "wan2.1-14b")
    assert engine.alive == []


def test_a_model_is_loaded_and_unloaded_by_command(store: Store, data: Path, engine: type[PretendedEngine]) -> None:
    with Worker(store, data, habits=Habits(beat_s=0.02), new_engine=engine) as worker:
        command = store.command("load", "flipbook", owner="ann")
        worker.run(until_idle=True)
        done = store.get_command(command.id)
        assert (done.state, done.progress, done.stage) == (State.COMPLETED, 100, "load")
        deadline = time.monotonic() + 10
        while store.workers()[0].models != ("flipbook",) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert store.workers()[0].models == ("flipbook",)
        job = add(store)
        worker.run(until_idle=True)
        assert "load" not in [event.data.get("stage") for event in store.events_after(job_id=job.id)]
        command = store.command("unload", "flipbook", owner="ann")
        worker.run(until_idle=True)
        assert store.get_command(command.id).state is State.COMPLETED and engine.alive == []


def test_a_model_is_there_before_anybody_asks_for_it(
    store: Store, data: Path, engine: type[PretendedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    with Worker(store, data, new_engine=engine) as worker:
        worker.warm_up("flipbook")
        assert worker._models.names == ("flipbook",)
        engine.during = at("load", 0, raising(NotFound("it is not on this machine")))
        worker.warm_up("wan2.1-1.3b")
        assert "wan2.1-1.3b could not be loaded ahead: it is not on this machine" in capsys.readouterr().err
        job = add(store)
        worker.run(until_idle=True)
    assert store.get(job.id).state is State.COMPLETED


def test_a_load_is_cancelled_by_command(store: Store, run: Run, engine: type[PretendedEngine]) -> None:
    command = store.command("load", "flipbook", owner="ann")
    engine.during = at("load", 0, lambda _: store.cancel_command(command.id))
    run()
    assert store.get_command(command.id).state is State.CANCELLED


def test_a_load_that_fails_says_why(store: Store, run: Run, engine: type[PretendedEngine]) -> None:
    command = store.command("load", "flipbook", owner="ann")
    engine.during = at("load", 0, raising(NotFound("flipbook is not on this machine")))
    run()
    failed = store.get_command(command.id)
    assert failed.state is State.FAILED and failed.error and failed.error.code == "missing"


def test_a_load_that_says_nothing_is_cancelled_by_the_heart(
    store: Store, data: Path, engine: type[PretendedEngine]
) -> None:
    command = store.command("load", "flipbook", owner="ann")

    def wait_for_the_heart(it: PretendedEngine) -> None:
        store.cancel_command(command.id)
        deadline = time.monotonic() + 10
        while it._reason is None and time.monotonic() < deadline:
            time.sleep(0.005)
        assert it._reason == "cancelled"

    engine.during = at("load", 0, wait_for_the_heart)
    with Worker(store, data, habits=Habits(beat_s=0.01), new_engine=engine) as worker:
        worker.run(until_idle=True)
    assert store.get_command(command.id).state is State.CANCELLED


@pytest.mark.parametrize(("resident", "overtakes"), [(1, True), (2, False)])
def test_a_newer_load_that_nobody_else_takes_overtakes_an_older_one_unless_both_can_be_held(
    store: Store,
    data: Path,
    engine: type[PretendedEngine],
    monkeypatch: pytest.MonkeyPatch,
    resident: int,
    overtakes: bool,
) -> None:
    monkeypatch.setattr(worker_module, "GRACE_S", 0.05)
    older = store.command("load", "flipbook", owner="ann")
    newer: list[int] = []

    def ask_for_another(it: PretendedEngine) -> None:
        newer.append(store.command("load", "wan2.1-1.3b", owner="ann").id)
        deadline = time.monotonic() + (10 if overtakes else 0.3)
        while it._reason is None and time.monotonic() < deadline:
            time.sleep(0.005)

    engine.during = at("load", 0, ask_for_another)
    with Worker(store, data, habits=Habits(beat_s=0.01, resident=resident), new_engine=engine) as worker:
        worker.run(until_idle=True)
        assert worker._models.names == (("wan2.1-1.3b",) if overtakes else ("flipbook", "wan2.1-1.3b"))
    first, second = store.get_command(older.id), store.get_command(newer[0])
    assert second.state is State.COMPLETED
    if overtakes:
        assert first.state is State.CANCELLED and first.error and first.error.code == "overtaken"
    else:
        assert first.state is State.COMPLETED


def test_a_model_that_made_room_for_a_load_that_failed_is_loaded_again_when_there_is_nothing_else_to_do(
    store: Store, data: Path, engine: type[PretendedEngine]
) -> None:
    with Worker(store, data, new_engine=engine) as worker:
        worker.warm_up("flipbook")
        command = store.command("load", "wan2.1-1.3b", owner="ann")
        engine.during = at("load", 0, raising(OutOfMemory("memory ran out: x")))
        worker._next()
        assert store.get_command(command.id).state is State.FAILED
        assert (worker._models.names, worker._models.owed) == ((), "flipbook")
        job = add(store, model="wan2.1-14b")
        worker.run(until_idle=True)
        assert store.get(job.id).state is State.COMPLETED
        assert (worker._models.names, worker._models.owed) == (("wan2.1-14b",), None), "something else came first"
        store.command("load", "wan2.1-1.3b", owner="ann")
        engine.during = at("load", 0, raising(ZeroDivisionError("x")))
        worker.run(until_idle=True)
        assert worker._models.names == ("wan2.1-14b",)
    assert len(engine.born) == 1 and engine.alive == []


def give_back(store: Store, data: Path, engine: type[PretendedEngine], ask: Callable[[Worker], Any]) -> Any:
    """flipbook made room for a load that failed. In the middle of its coming back somebody asks for something. What was
    loaded from then on, as (model, percent), what is in memory at the end, and what is owed."""
    loads: list[tuple[str, int]] = []
    with Worker(store, data, habits=Habits(told_s=0.0), new_engine=engine) as worker:

        def during(it: PretendedEngine, event: Event, request: Request) -> None:
            if event.stage != "load":
                return
            loads.append((request.model, event.done))
            if loads == [("wan2.1-1.3b", 0)]:
                raise NotFound("it is not on this machine")
            if loads[1:] == [("flipbook", 0)]:
                ask(worker)

        worker.warm_up("flipbook")
        store.command("load", "wan2.1-1.3b", owner="ann")
        engine.during = staticmethod(during)
        worker.run(until_idle=True)
        return loads[2:], worker._models.names, worker._models.owed


def whole(model: str) -> list[tuple[str, int]]:
    return [(model, 0), (model, 100)]


@pytest.mark.parametrize(
    ("asked", "then", "held"),
    [
        (["clip of wan2.1-14b"], whole("wan2.1-14b"), ("wan2.1-14b",)),
        (["clip of flipbook"], [("flipbook", 100)], ("flipbook",)),
        (["load of wan2.1-14b"], whole("wan2.1-14b"), ("wan2.1-14b",)),
        (["load of flipbook"], [("flipbook", 100)], ("flipbook",)),
        (["unload of flipbook"], [], ()),
        # After a command a clip comes first, so that its model is what decides.
        (["load of wan2.1-14b", "clip of flipbook"], [("flipbook", 100), *whole("wan2.1-14b")], ("wan2.1-14b",)),
    ],
)
def test_giving_a_model_back_gives_way_to_whoever_comes_next_and_wants_another(
    store: Store, data: Path, engine: type[PretendedEngine], asked: list[str], then: Any, held: tuple[str, ...]
) -> None:
    def ask(worker: Worker) -> None:
        for what, _, model in (each.partition(" of ") for each in asked):
            add(store, model=model) if what == "clip" else store.command(what, model, owner="ann")

    assert give_back(store, data, engine, ask) == (then, held, None)
    assert all(job.state is State.COMPLETED for job in store.list(owner="ann").jobs)


def test_a_model_is_given_back_while_the_store_is_away(
    store: Store, data: Path, engine: type[PretendedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = store.first_in_line
    away = [True]

    def look() -> str | None:
        if away:
            raise StoreUnavailable("it is away")
        return looks()

    def ask(worker: Worker) -> None:
        monkeypatch.setattr(worker._store, "first_in_line", look)
        threading.Timer(0.2, away.clear).start()

    assert give_back(store, data, engine, ask) == ([("flipbook", 100)], ("flipbook",), None)


def test_a_worker_that_is_told_to_leave_stops_giving_a_model_back(
    store: Store, data: Path, engine: type[PretendedEngine]
) -> None:
    assert give_back(store, data, engine, lambda worker: worker.leave()) == ([], (), "flipbook")


def test_a_model_is_held_ahead_by_the_name_that_jobs_give_it(
    store: Store, data: Path, engine: type[PretendedEngine]
) -> None:
    with Worker(store, data, new_engine=engine) as worker:
        worker.warm_up("Wan-AI/Wan2.1-T2V-14B-Diffusers")
        assert worker._models.names == ("wan2.1-14b",)


def test_clips_and_commands_take_turns(store: Store, data: Path, engine: type[PretendedEngine]) -> None:
    jobs = [add(store) for _ in range(2)]
    commands = [store.command("load", model, owner="ann") for model in ("flipbook", "wan2.1-1.3b", "flipbook")]

    def done() -> tuple[int, int]:
        films = sum(store.get(job.id).state is State.COMPLETED for job in jobs)
        return films, sum(store.get_command(command.id).state is State.COMPLETED for command in commands)

    seen = []
    with Worker(store, data, new_engine=engine) as worker:
        while worker._next():
            seen.append(done())
    assert seen == [(0, 1), (1, 1), (1, 2), (2, 2), (2, 3)]


def test_a_model_that_cannot_be_loaded_again_is_said_and_left(
    store: Store, data: Path, engine: type[PretendedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(it: PretendedEngine, event: Event, request: Request) -> None:
        if event.stage == "load":
            if it.owes and request.model == it.owes:
                it.owes = None  # as the engine does
            raise NotFound("it is not on this machine")

    with Worker(store, data, new_engine=engine) as worker:
        worker.warm_up("flipbook")
        store.command("load", "wan2.1-1.3b", owner="ann")
        engine.during = staticmethod(fails)
        worker.run(until_idle=True)
        assert worker._models.names == ()
    assert "flipbook could not be loaded again: it is not on this machine" in capsys.readouterr().err


def test_how_far_a_load_is_stands_in_the_workers_row(store: Store, data: Path, engine: type[PretendedEngine]) -> None:
    seen: list[Any] = []
    how_far = Loading(state="placing", component="vae", bytes_done=1, bytes_total=2)

    def load(self: PretendedEngine, model: str, tell: Any) -> None:
        self.listener(Event(stage="load", done=1, total=2, loading=how_far))
        deadline = time.monotonic() + 10
        while not (seen and seen[-1]) and time.monotonic() < deadline:
            seen.append(store.workers()[0].loading)
            time.sleep(0.01)
        self.model = model

    def prepare(self: PretendedEngine, request: Request, *, listener: Any) -> None:
        self.listener = listener
        load(self, request.model, None)

    engine.prepare = prepare  # type: ignore[method-assign]
    with Worker(store, data, habits=Habits(beat_s=0.01), new_engine=engine) as worker:
        command = store.command("load", "flipbook", owner="ann")
        worker.run(until_idle=True)
        assert seen[-1] == {"model": "flipbook", **how_far.to_dict()}
        assert store.get_command(command.id).stage == "placing"
        deadline = time.monotonic() + 10
        while store.workers()[0].loading and time.monotonic() < deadline:
            time.sleep(0.01)
        assert store.workers()[0].loading is None


# --------------------------------------------------------------------------- over PostgreSQL


def test_a_job_is_made_over_postgresql_too(data: Path, engine: type[PretendedEngine]) -> None:
    with postgres_server() as url, Store.open(url) as store:
        jobs = [add(store), add(store, "second")]
        engine.during = at("denoise", 2, lambda _: store.cancel(jobs[0].id))
        with Worker(store, data, habits=Habits(beat_s=0.05), new_engine=engine) as worker:
            worker.run(until_idle=True)
        assert [store.get(job.id).state for job in jobs] == [State.CANCELLED, State.COMPLETED]
        assert store.workers() == ()
