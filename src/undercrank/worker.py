"""One process, one device group: take a job, film it, keep its files, tell how it goes; then the next.

What is told goes into the store, so that nobody has to listen: a job's events, its progress, the worker's own state.
A heart beats beside the work: it renews the lease, shows that the process lives and hears of cancels, also while a
stage takes long. A job ends in one of four ways: completed, failed with a reason, stopped because it was cancelled,
or handed back because the worker was told to leave. A worker that dies without a word is noticed by its silence.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from undercrank import families, shelf, video
from undercrank.engine import OVERTAKEN, Clip, Engine
from undercrank.jobs import Claim, Command, Job, JobError, Lease, LeaseLost, State, Store, StoreUnavailable, default_url
from undercrank.oneshot import remember
from undercrank.preview import Colours, Previewer
from undercrank.records import Cancelled, Loading, OutOfMemory, Report, Request, UndercrankError
from undercrank.settings import settings
from undercrank.trace import Event, Listener

T = TypeVar("T")

KEPT_RUNS = 5
"Rows that one process adds to the ledger for runs alike."
START_AGAIN = 75
"Exit status that asks for a new process: this one's device or engine can no longer be trusted (sysexits' TEMPFAIL)."


GRACE_S = 1.0
"A newer load that waits for longer than this is one that no other worker is free to take."

AGAIN_S = 1.0
"Between two tries to reach a store that is away."


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How a worker goes about it. Times in seconds."""

    resident: int = 1
    "Models held in memory at a time."
    warm: str | None = None
    "The model to load before anybody asks for it."
    device: str | None = None
    "Torch name of the device for jobs that name none."
    slot: int = 0
    "Which of the workers over this data folder: no two processes have one slot at a time."
    beat_s: float = 0.5
    idle_s: float = 0.05
    "Between two looks into an empty queue."
    told_s: float = 0.2
    "The least time between two events about loading or encoding; steps are all told."
    stuck_s: float = 3600.0
    "A job that has shown no progress for so long is stuck: the process gives up, and another takes the job."
    allow_pickle: bool = False
    local_files_only: bool = False


class Worker:
    """`with Worker(store, data) as worker: worker.run()`. One thread works; `leave()` may come from any."""

    def __init__(
        self,
        store: Store,
        data: Path,
        *,
        habits: Habits | None = None,
        new_engine: Callable[..., Any] = Engine,
    ) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._store, self._data, self._habits = store, data.resolve(), habits or Habits()
        self._models = Models(new_engine, self._habits)
        self._heart = Heart(self.id, store, self._habits, self._models)
        self._leaving = threading.Event()
        self._obeyed = False
        "Whether a command was the last thing that was done."
        self._runs: Counter[tuple[Any, ...]] = Counter()
        self._stack = ExitStack()

    def __enter__(self) -> Worker:
        with ExitStack() as stack:
            stack.callback(self._models.close)
            stack.enter_context(self._heart.beating())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def leave(self) -> None:
        """Stop within one step, and give the job at hand back."""
        self._leaving.set()
        self._heart.stop_work("the worker was told to leave")

    def run(self, *, until_idle: bool = False, stay: Callable[[], bool] = lambda: True) -> None:
        """Work until told to leave; until_idle: until there is nothing to do; stay: asked between two jobs."""
        while not self._leaving.is_set() and stay():
            try:
                if not self._next():
                    if until_idle:
                        return
                    self._leaving.wait(self._habits.idle_s)
            except StoreUnavailable as error:  # nothing is lost: what is asked for waits in the store
                _say(f"{error}")
                self._leaving.wait(AGAIN_S)

    def warm_up(self, model: str) -> None:
        """Hold this model before anybody asks for it. A model that cannot be loaded is said and left."""
        model = known.id if (known := families.find(model)) else model  # as jobs and commands name it
        with self._heart.at_work(model, None) as work:
            try:
                self._prepare(model, work, work.hear)
            except UndercrankError as error:
                _say(f"{model} could not be loaded ahead: {error}")

    def _next(self) -> bool:
        """Do one thing, if there is one to do. After a command a clip comes first: whoever asks for load after load
        must not keep everybody's clips waiting for ever."""
        ways = (self._film_next, self._obey_next) if self._obeyed else (self._obey_next, self._film_next)
        if any(way() for way in ways):
            return True
        if model := self._models.owed:
            self._restore(model)
            return True
        return False

    def _obey_next(self) -> bool:
        command = self._store.claim_command(self.id, holds=self._models.spoken_for)
        if command:
            self._obeyed = True
            self._obey(command)
        return command is not None

    def _film_next(self) -> bool:
        claim = self._store.claim(self.id)
        if claim:
            self._obeyed = False
            self._film(claim)
        return claim is not None

    # ----------------------------------------------------------------------- a job

    def _film(self, claim: Claim) -> None:
        """Make one clip and end its job, whatever happens."""
        lease, folder = claim.lease, shelf.attempt_folder(self._data, claim.lease)
        try:
            with self._heart.at_work(claim.job.model, lease) as work:
                try:
                    result = self._made(claim, work, folder)
                except LeaseLost:
                    raise
                except BaseException as error:
                    shutil.rmtree(folder, ignore_errors=True)
                    self._end_badly(lease, work, error)
                else:
                    self._insist(lambda: self._store.finish(lease, result))
        except LeaseLost as error:
            shutil.rmtree(folder, ignore_errors=True)
            _say(f"{error}: its work is thrown away")

    def _made(self, claim: Claim, work: Work, folder: Path) -> dict[str, Any]:
        request = self._request(claim)
        shelf.remove_earlier_attempts(self._data, claim.lease)
        folder.mkdir(parents=True, exist_ok=True)
        told = Telling(self._store, claim.lease, work, self._habits)
        previewer = Previewer(
            Colours.of(request.model, self._data),
            lambda step, picture_HWC: told.preview(step, folder / "live.jpg", picture_HWC),
            grid_THW=_grid_of(request),
        )
        engine = self._models.get(request.model, work)
        clip = engine.generate(request, listener=told, on_latents=previewer.see)
        work.check()
        clip = as_asked(clip, claim.job)
        files, report = write_files(clip, folder, master=bool(claim.job.options.get("master")), listener=told)
        (folder / "live.jpg").unlink(missing_ok=True)
        if (colours := previewer.learn(clip.frames_FHWC)) is not None:
            colours.keep(request.model, self._data)
        if self._is_news(report):
            remember(report)
        names = {variant: shelf.stored_name(self._data, file) for variant, file in files.items()}
        return {"files": names, "report": report.to_dict()}

    def _is_news(self, report: Report) -> bool:
        """Runs alike teach the next plan nothing more, and a server makes thousands: the ledger would grow for ever."""
        asked, load = report.request, report.plan.load
        levers = tuple(receipt.lever for receipt in report.receipts)
        size = (asked.width, asked.height, asked.num_frames, asked.num_inference_steps)
        alike = (load.family, load.dtype, load.device, *size, levers)
        self._runs[alike] += 1
        return self._runs[alike] <= KEPT_RUNS

    def _request(self, claim: Claim) -> Request:
        request = Request.from_dict(claim.job.request)
        image = None if request.image is None else str(self._data / request.image)
        return replace(request, seed=claim.job.seed, device=request.device or self._habits.device, image=image)

    def _end_badly(self, lease: Lease, work: Work, error: BaseException) -> None:
        """Say in the store why there is no clip, and leave nothing of it in memory."""
        lost, stopped = work.is_lost, isinstance(error, Cancelled)
        reason = job_error(error)
        if not stopped:
            _say(f"{lease.job_id} failed: {reason.message}")
        if reason.code == "internal_error":
            traceback.print_exception(error, file=sys.stderr)
        error.__traceback__ = None  # it holds the frames of the run, and they hold its tensors
        is_done_for = reason.code == "internal_error" and device_is_lost()
        if is_done_for:
            self._models.forget()
        else:
            self._models.recover(error, work.model)
        if lost:
            raise LeaseLost(f"{lease.job_id} is no longer ours (attempt {lease.attempt})")
        if stopped and work.is_cancelled:
            self._insist(lambda: self._store.stopped(lease))
        elif self._leaving.is_set() or not isinstance(error, Exception):
            self._insist(lambda: self._store.release(lease))
        else:
            self._insist(lambda: self._store.fail(lease, reason))
        if not isinstance(error, Exception):
            raise error
        if is_done_for:
            _say("the device answers no more: this process ends, so that a new one may begin")
            raise SystemExit(START_AGAIN)

    def _insist(self, write: Callable[[], T]) -> T:
        """The end of a job is worth waiting for: a store that is away now may be back before the lease is lost."""
        while True:
            try:
                return write()
            except StoreUnavailable as error:
                _say(f"{error}")
                time.sleep(AGAIN_S)

    # ----------------------------------------------------------------------- a command

    def _obey(self, command: Command) -> None:
        state, error = State.COMPLETED, None
        with suppress(LeaseLost):
            try:
                if command.action == "unload":
                    self._models.drop(command.model)
                else:
                    self._load(command)
            except LeaseLost:
                raise
            except Cancelled as cancelled:
                state = State.CANCELLED
                if str(cancelled) == OVERTAKEN:
                    error = JobError(code="overtaken", message=OVERTAKEN, remedy="load it again to have it back")
            except Exception as raised:
                state, error = State.FAILED, job_error(raised)
                self._models.recover(raised, command.model)
            self._insist(lambda: self._store.end_command(command.id, self.id, state, error))

    def _load(self, command: Command) -> None:
        with self._heart.at_work(command.model, None, command) as work:
            told_at, stage = 0.0, ""

            def told(event: Event) -> None:
                nonlocal told_at, stage
                work.hear(event)
                now = event.loading.state if event.loading else event.stage
                if now == stage and time.monotonic() - told_at < self._habits.told_s and event.done < event.total:
                    return
                told_at, stage = time.monotonic(), now
                percent = 100 * event.done // max(1, event.total)
                try:
                    if self._store.command_progress(command.id, self.id, stage=now, progress=percent):
                        work.cancel("cancelled")
                except StoreUnavailable as error:  # costs a word about the load, not the load
                    _say(f"{error}")

            told(Event(stage="load", done=0, total=1))
            work.check()
            self._prepare(command.model, work, told)

    def _prepare(self, model: str, work: Work, listener: Listener) -> None:
        engine = self._models.get(model, work)
        engine.prepare(Request(model=model, prompt="", device=self._habits.device), listener=listener)

    def _restore(self, model: str) -> None:
        """There is nothing else to do: have the model back that made room for a load that came to nothing. Whoever then
        comes and asks for another one is not kept waiting: this one stays owed."""
        with self._heart.at_work(model, None) as work:
            looked_at = time.monotonic()

            def told(event: Event) -> None:
                nonlocal looked_at
                work.hear(event)
                if time.monotonic() - looked_at >= self._habits.told_s:
                    looked_at = time.monotonic()
                    if self._is_wanted_elsewhere(model):
                        raise Cancelled("another model is asked for")

            try:
                self._models.restore(work, told)
            except Cancelled:
                pass  # that, or the worker is told to leave
            except Exception as error:
                _say(f"{model} could not be loaded again: {job_error(error).message}")
                self._models.recover(error, model)

    def _is_wanted_elsewhere(self, model: str) -> bool:
        """Is what this worker would do next for another model, or to be rid of this one?"""
        try:
            clip, command = self._store.first_in_line(), self._store.first_command(holds=self._models.spoken_for)
        except StoreUnavailable as error:  # costs a look, not the load
            _say(f"{error}")
            return False
        if clip is not None and (self._obeyed or command is None):
            return clip != model
        return command is not None and command != ("load", model)


# --------------------------------------------------------------------------- models that take turns


class Models:
    """The engines of the models in memory, the longest unused first. One engine holds one model."""

    def __init__(self, new_engine: Callable[..., Any], habits: Habits) -> None:
        self._new_engine, self._habits = new_engine, habits
        self._engines: list[Any] = []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(model for engine in list(self._engines) if (model := engine.model) is not None)

    @property
    def spoken_for(self) -> tuple[str, ...]:
        """Those in memory, and the one that is owed: it can be unloaded too, before it is back."""
        return (*self.names, *([self.owed] if self.owed else []))

    @property
    def owed(self) -> str | None:
        """A model that made room for a load that then ended badly."""
        return next((model for engine in self._engines if (model := engine.owes) is not None), None)

    def get(self, model: str, work: Work) -> Any:
        """The engine for this model: that which holds it, else an empty one, else a new one, else the longest unused,
        whose model makes room once the new one's weights are about to be read."""
        engine = self._holding(model) or self._holding(None)
        if engine is None and len(self._engines) < self._habits.resident:
            engine = self._new_engine(
                allow_pickle=self._habits.allow_pickle,
                local_files_only=self._habits.local_files_only,
                encode_ahead=True,
            )
            self._engines.append(engine)
        engine = engine or self._engines[0]
        self._engines.remove(engine)
        self._engines.append(engine)
        work.stops(engine.cancel)
        return engine

    def _holding(self, model: str | None) -> Any:
        return next((engine for engine in self._engines if engine.model == model), None)

    def restore(self, work: Work, listener: Listener) -> None:
        for engine in self._engines:
            if engine.owes is not None:
                work.stops(engine.cancel)
                engine.restore(listener=listener)

    def drop(self, model: str) -> None:
        owing = next((engine for engine in self._engines if engine.owes == model), None)
        engine = self._holding(model) or owing
        if engine is not None:
            self._engines.remove(engine)
            engine.close()
        gc.collect()

    def recover(self, error: BaseException, model: str) -> None:
        """After a failure: what memory ran out for, or nobody foresaw, begins anew with fresh weights. A load that
        failed has left nothing to doubt, unless other models held the memory that it lacked."""
        foreseen = isinstance(error, UndercrankError | OSError) and not isinstance(error, OutOfMemory)
        if not foreseen and (model in self.names or len(self._engines) > 1):
            self.close()
        gc.collect()

    def forget(self) -> None:
        """Not even freed: on a device that is lost, that would fail too."""
        self._engines = []

    def close(self) -> None:
        while self._engines:
            self._engines.pop(0).close()
        gc.collect()


# --------------------------------------------------------------------------- the heart


class Work:
    """What is being done now, and whether it shall go on. Shared by the working thread and the heart."""

    def __init__(self, model: str, lease: Lease | None, command: Command | None) -> None:
        self.model, self.lease, self.command = model, lease, command
        self.loading: Loading | None = None
        self.is_cancelled = self.is_lost = False
        self.moved_at = time.monotonic()
        self._stop: Callable[[str], Any] | None = None
        self._reason: str | None = None

    def stops(self, stop: Callable[[str], Any]) -> None:
        """How to stop it from now on."""
        self._stop = stop
        self.check()

    def hear(self, event: Event) -> None:
        """It goes on, if it shall: a stop may have come before there was anything to stop."""
        self.moved_at, self.loading = time.monotonic(), event.loading
        self.check()

    def cancel(self, reason: str) -> None:
        """Somebody asked for it."""
        self.is_cancelled = True
        self.stop(reason)

    def lose(self) -> None:
        """The lease has gone to somebody else."""
        self.is_lost = True
        self.stop("the lease was lost")

    def stop(self, reason: str) -> None:
        self._reason = reason
        if self._stop is not None:
            self._stop(reason)

    def check(self) -> None:
        """Raises Cancelled."""
        if self._reason is not None:
            raise Cancelled(self._reason)


class Heart:
    """Beats in a thread of its own beside the work."""

    def __init__(self, worker: str, store: Store, habits: Habits, models: Models) -> None:
        self._worker, self._store, self._habits, self._models = worker, store, habits, models
        self._work: Work | None = None
        self._model: str | None = None
        self._over = threading.Event()

    @contextmanager
    def beating(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._beat()
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            with suppress(StoreUnavailable):
                self._store.worker_lost(self._worker)

    @contextmanager
    def at_work(self, model: str, lease: Lease | None, command: Command | None = None) -> Iterator[Work]:
        self._work, self._model = Work(model, lease, command), model
        try:
            yield self._work
        finally:
            self._work = None

    def stop_work(self, reason: str) -> None:
        if (work := self._work) is not None:
            work.stop(reason)

    def _run(self) -> None:
        while not self._over.wait(self._habits.beat_s):
            with suppress(StoreUnavailable):  # the next beat tries again
                self._beat()
            work = self._work
            if work is not None and work.lease and time.monotonic() - work.moved_at > self._habits.stuck_s:
                _say(f"{work.lease.job_id}: no progress for {self._habits.stuck_s:.0f} s, this process is stuck")
                os._exit(START_AGAIN)

    def _beat(self) -> None:
        work = self._work
        if work is not None and work.lease is not None:
            try:
                if self._store.renew(work.lease):
                    work.cancel("cancelled")
            except LeaseLost:
                if self._work is work:  # else it has just ended
                    work.lose()
        if work is not None and work.command is not None:
            self._ask(work, work.command)
        self._store.beat(
            self._worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=self._habits.device or "auto",
            state=self._state(work),
            models=self._models.names,
            job_id=work.lease.job_id if work is not None and work.lease else None,
            loading={"model": work.model, **work.loading.to_dict()} if work is not None and work.loading else None,
        )

    def _ask(self, work: Work, command: Command) -> None:
        """Shall a load by command go on? One that cannot be held beside a newer one gives way to it."""
        gives_way = GRACE_S if self._habits.resident == 1 else None
        try:
            why = self._store.why_end(command.id, self._worker, gives_way_after_s=gives_way)
        except LeaseLost:
            return  # it has just ended
        if why == "cancelled":
            work.cancel("cancelled")
        elif why is not None:
            work.stop(OVERTAKEN)

    def _state(self, work: Work | None) -> str:
        if work is None:
            return "idle"
        return "busy" if work.lease and self._model in self._models.names else "loading"


# --------------------------------------------------------------------------- telling


class Telling:
    """A listener of the engine that puts what it hears into the store, and learns there of a cancel."""

    def __init__(self, store: Store, lease: Lease, work: Work, habits: Habits) -> None:
        self._store, self._lease, self._work, self._habits = store, lease, work, habits
        self._stage: str | None = None
        self._told_at = 0.0

    def __call__(self, event: Event) -> None:
        self._work.hear(event)
        is_new_stage = event.stage != self._stage
        if event.stage == "denoise" and event.done:
            self._tell("step", {"step": event.done, "total": event.total, "step_ms": event.step_ms}, event)
        elif is_new_stage or self._is_time(event):
            data = {"stage": event.stage, "done": event.done, "total": event.total, "unit": event.unit}
            if event.loading is not None:
                data |= {"state": event.loading.state, "component": event.loading.component}
            self._tell("stage" if is_new_stage else "progress", data, event)
        self._stage = event.stage
        self._work.check()

    def preview(self, step: int, file: Path, picture_HWC: Any) -> None:
        """Put a new picture on the shelf. It is a courtesy: a disk that is full costs a preview, not yet the film."""
        try:
            video.write_picture(file, picture_HWC)
        except OSError as error:
            _say(f"no preview: {error}")
            return
        self._store_if_it_answers("preview", {"step": step}, {})

    def _is_time(self, event: Event) -> bool:
        return event.stage in ("load", "encode") and time.monotonic() - self._told_at >= self._habits.told_s

    def _tell(self, kind: str, data: dict[str, Any], event: Event) -> None:
        self._told_at = time.monotonic()
        percent = percent_of(event)
        shown = {"stage": event.stage, "progress": percent, "eta_s": event.eta_s}
        self._store_if_it_answers(kind, {**data, "progress": percent, "eta_s": event.eta_s}, shown)

    def _store_if_it_answers(self, kind: str, data: dict[str, Any], shown: dict[str, Any]) -> None:
        """Progress is a courtesy: a store that is away costs an event, not the film. A lost lease ends it."""
        try:
            if self._store.event(self._lease, kind, data, **shown):
                self._work.cancel("cancelled")
        except StoreUnavailable as error:
            _say(f"{error}")
        except LeaseLost:
            self._work.lose()


SHARES = {"load": (0, 5), "text": (5, 8), "denoise": (8, 90), "decode": (90, 95), "encode": (95, 100)}
"Per cent of a job's bar that belong to each stage, from and to; a bar, not a forecast: that is `eta_s`."


def _grid_of(request: Request) -> tuple[int, int, int] | None:
    """Latent frames, rows and columns, where the request says them."""
    family = families.find(request.model)
    if family is None or not (request.num_frames and request.height and request.width):
        return None
    frames = (request.num_frames - 1) // family.temporal_stride + 1
    return frames, request.height // family.spatial_stride, request.width // family.spatial_stride


def percent_of(event: Event) -> int:
    first, last = SHARES[event.stage]
    return first + (last - first) * event.done // max(1, event.total)


# --------------------------------------------------------------------------- files


def as_asked(clip: Clip, job: Job) -> Clip:
    """Its story with the picture named as the job names it, since the server's folders are nobody's business, and with
    what was done to the picture when it came in."""
    report, image = clip.report, job.request.get("image")
    plan = replace(report.plan, request=replace(report.plan.request, image=image))
    notes = (*report.notes, *job.options.get("picture_notes", ()))
    report = replace(report, request=replace(report.request, image=image), plan=plan, notes=notes)
    return replace(clip, report=report)


def write_files(
    clip: Clip, folder: Path, *, master: bool, listener: Callable[[Event], None]
) -> tuple[dict[str, Path], Report]:
    """All that is kept of a clip, by variant, and its report with the time this took. Raises OSError.

    Each file is whole and on the disk when this returns.
    """
    begun = time.perf_counter()
    files = {"video": clip.save(folder / "video.mp4", listener=listener)}
    if master:
        files["master"] = clip.save_master(folder / "master.mkv", listener=listener)
    files["thumbnail"] = video.write_thumbnail(folder / "thumbnail.png", clip.frames_FHWC)
    files["preview"] = video.write_webp(folder / "preview.webp", clip.frames_FHWC, fps=clip.fps)
    stage_s = clip.report.trace.stage_s
    stage_s = {**stage_s, "encode": stage_s.get("encode", 0.0) + time.perf_counter() - begun}
    report = replace(clip.report, trace=replace(clip.report.trace, stage_s=stage_s))
    files["report"] = folder / "report.json"
    with video.appears_whole(files["report"]) as part:
        part.write_text(report.to_json(indent=2) + "\n", encoding="utf-8")
    return files, report


# --------------------------------------------------------------------------- errors


REMEDIES = {
    "bad_input": "change it and ask again",
    "lever_refused": "leave that lever to the planner, or turn it off",
    "missing": "whoever runs the server can install or download it",
    "run_failed": "another seed, dtype or guidance may help; the report of the server's log says more",
    "disk_full": "make room in the data folder of the server, then ask again",
    "write_failed": "look at the data folder of the server: its disk, its permissions",
    "internal_error": "this is a fault of the program: its log has the details",
}


def job_error(error: BaseException) -> JobError:
    """Why a job failed, as a client reads it: the code is that of the error's class."""
    if isinstance(error, OutOfMemory):  # its message ends with what would fit
        message, _, remedy = str(error).partition(": ")
        return JobError(code=error.code, message=message, remedy=remedy or "ask for fewer pixels or frames")
    code, message = _code_and_message(error)
    return JobError(code=code, message=message, remedy=REMEDIES.get(code, ""))


def _code_and_message(error: BaseException) -> tuple[str, str]:
    if isinstance(error, UndercrankError):
        return error.code, str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "disk_full", f"the disk is full: {error.strerror}"
    if isinstance(error, OSError):
        return "write_failed", f"a file could not be read or written: {error.strerror or error}"
    first = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
    return "internal_error", f"{type(error).__name__}: {first}"


def device_is_lost() -> bool:
    """After an illegal access everything fails on a GPU, for as long as the process lives."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


# --------------------------------------------------------------------------- a process


def work_for_ever(url: str | None, data: Path, habits: Habits, *, parent: int | None = None) -> None:
    """The whole life of a worker process: until SIGTERM or SIGINT, or, between two jobs, until its parent is gone.

    url: the job store; None: UNDERCRANK_DB, or the one in the data folder.
    """
    data.mkdir(parents=True, exist_ok=True)
    url = url or settings().db or default_url(data)
    leave = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: leave.set())
    with _slot(data, habits.slot, leave) as is_ours:
        if not is_ours:
            return
        with Store.open(url) as store, Worker(store, data, habits=habits) as worker:

            def leave_when_told() -> None:
                leave.wait()
                worker.leave()

            threading.Thread(target=leave_when_told, name="leave", daemon=True).start()
            if habits.warm is not None:
                worker.warm_up(habits.warm)
            worker.run(stay=lambda: parent is None or os.getppid() == parent)


@contextmanager
def _slot(data: Path, slot: int, leave: threading.Event) -> Iterator[bool]:
    """Wait for whoever has this slot: a worker that outlived its server may still be filming. False: told to leave."""
    with open(data / f"worker-{slot}.lock", "w") as file:
        while not (is_ours := _locked(file)) and not leave.is_set():
            leave.wait(0.2)
        yield is_ours


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _say(text: str) -> None:
    """One line in the worker's log. Never a prompt."""
    print(f"worker {os.getpid()}: {text}", file=sys.stderr, flush=True)
