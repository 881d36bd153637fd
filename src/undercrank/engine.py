"""The engine: move a rig to a plan, run it, tell what happened; and `accelerate`, the same around a pipeline at hand.

Levers are entered in ORDER, each on an ExitStack of its own, and left from the end only: to reach another plan
the engine pops to the longest common prefix and enters the rest. A failure half-way leaves the rig as it was.

A load is one block: weights read and placed, levers engaged, a first step made if asked. It is handed over when it is
whole, and unwound if it fails, is cancelled or is overtaken by a newer one. What was loaded before makes room just
before the first weight is read, and can be had back by `restore`.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch

import undercrank
from undercrank import families, frames, images, video
from undercrank.ledger import Ledger, read_ledger
from undercrank.load import PATIENCE_S, Loaded, Watch, asking, forget_frames, forgetting_frames, load
from undercrank.machine import this_machine
from undercrank.planner import (
    Live,
    case_of,
    check_wishes,
    fitting_after,
    gib,
    is_asked_for,
    make_plan,
    refuse_if_too_big,
)
from undercrank.quality import as_FCHW, faults
from undercrank.records import (
    BadInput,
    Cancelled,
    Device,
    Family,
    Fidelity,
    Lever,
    LeverRefused,
    Loading,
    LoadSpec,
    Machine,
    OutOfMemory,
    Plan,
    Receipt,
    Report,
    Request,
    RunFailed,
    Trace,
)
from undercrank.rig import Rig, registries
from undercrank.sources import which_model
from undercrank.trace import Event, Listener, Tracer, ignore
from undercrank.undo import appended, subclass, swap_attr, swap_class
from undercrank.words import as_fps
from undercrank.work import around_forwards

T = TypeVar("T")

OnLatents = Callable[[Rig, int, torch.Tensor], None]
"Given the rig, the index of the step that has ended and the latents after it; must not make the device wait."

LIVE_FINGERPRINT = "not taken: the pipeline came loaded"


@dataclass(kw_only=True)
class Clip:
    """A film and its story. `frames_FHWC` is uint8, as decoded, before any encoding."""

    frames_FHWC: np.ndarray
    fps: Fraction
    report: Report
    encoded: video.Encoded | None = None
    "Encoded already, while it was decoded; the file's bytes are the same without."

    def recipe(self) -> dict[str, Any]:
        """All that it takes to make it again, as it travels inside the file."""
        return self.report.to_dict()

    def save(self, path: str | Path, *, listener: Listener = ignore) -> Path:
        """Write an mp4 that browsers play in the right colours, with the recipe inside."""
        return self._write(functools.partial(video.write_mp4, encoded=self.encoded), path, listener)

    def save_master(self, path: str | Path, *, listener: Listener = ignore) -> Path:
        """Write a lossless ffv1 Matroska file: every pixel as decoded."""
        return self._write(video.write_master, path, listener)

    def _write(self, write: Callable[..., Path], path: str | Path, listener: Listener) -> Path:
        total = len(self.frames_FHWC)

        def on_frame(done: int) -> None:
            listener(Event(stage="encode", done=done, total=total, unit="frames"))

        title = self.report.request.prompt[:200]
        return write(path, self.frames_FHWC, fps=self.fps, recipe=self.recipe(), title=title, on_frame=on_frame)


class Engine:
    """One pipeline, the levers that are on, and its runs. Use it as a context manager, or `close()` it."""

    def __init__(
        self,
        *,
        machine: Machine | None = None,
        ledger: Ledger | None = None,
        pipe: Any = None,
        allow_pickle: bool = False,
        local_files_only: bool = False,
        encode_ahead: bool = False,
        hold_both: bool = False,
    ) -> None:
        """pipe: a pipeline that is already loaded; the engine then makes clips with it and loads nothing.

        encode_ahead: clips will be saved, so frames are encoded while later ones are decoded.
        hold_both: a model stays loaded until the next one is ready, so that a load that ends badly costs nothing; there
        must be memory for two.
        """
        self.encode_ahead = encode_ahead
        self.allow_pickle, self.local_files_only, self.hold_both = allow_pickle, local_files_only, hold_both
        self.machine = machine or this_machine()
        self.ledger = read_ledger() if ledger is None else ledger
        self.rig: Rig | None = None
        self.live: Live | None = None
        "Facts of a pipeline that came loaded; None: the engine loads by itself."
        self._loaded: Loaded | None = None
        self._spec: LoadSpec | None = None
        self._load_stack = ExitStack()
        self._load_cost = (0.0, 0)
        self._held: list[Held] = []
        self._refused: dict[Lever, str] = {}
        "Levers that `auto` chose and that refused to be entered on what is loaded, and why."
        self._plan: Plan | None = None
        "Of what is loaded."
        self._owed: Plan | None = None
        "Of what made room for a load that ended badly."
        self._at_work: Rig | None = None
        "The rig that is being made ready and is not handed over yet."
        self._turns: list[_Turn] = []
        self._taking_turns = threading.Lock()
        self._cancel_reason: str | None = None
        self._found_on: list[str] = []
        self._parameters = 0
        self._busy = threading.Lock()
        self._closed = False
        if pipe is not None:
            self._adopt(pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------------- plan, move, generate

    def plan(self, request: Request, *, listener: Listener = ignore, needs_picture: bool = True) -> Plan:
        """Decide everything, read nothing but the model's index. Raises as `make_plan`.

        A model that is named by its repository is downloaded for that, unless it is here: `listener` hears of it.
        """
        if self.live is not None:
            return self.plan_live(request, needs_picture=needs_picture)
        with _telling(listener) as told:
            family, load = which_model(
                request,
                allow_pickle=self.allow_pickle,
                local_files_only=self.local_files_only,
                progress=Watch(told, self.check_cancelled).downloaded,
            )
        return make_plan(
            request,
            family=family,
            machine=self.machine,
            ledger=self.ledger,
            load=load,
            needs_picture=needs_picture,
        )

    def plan_live(self, request: Request, *, strict: bool = True, needs_picture: bool = True) -> Plan:
        """Plan around the pipeline at hand. strict: check the request; else the pipeline's own checks hold."""
        assert self.rig is not None and self.live is not None
        family, live = self.rig.family, self.live
        load = LoadSpec(
            family=family.id, source="live", dtype=live.dtype, device=live.device.torch_name,
            parameters=self._parameters,
        )  # fmt: skip
        plan = make_plan(
            replace(request, model=family.id),
            family=family,
            machine=self.machine,
            ledger=self.ledger,
            load=load,
            live=live,
            strict=strict,
            needs_picture=needs_picture,
        )
        note = f"already on this pipeline, and kept: {', '.join(self._found_on)}"
        return replace(plan, notes=(*plan.notes, note)) if self._found_on else plan

    @property
    def model(self) -> str | None:
        """What is loaded, as the request named it; None: nothing."""
        return self._plan.request.model if self._plan else None

    @property
    def owes(self) -> str | None:
        """The model that `restore` would load again; None: nothing is owed."""
        return self._owed.request.model if self._owed else None

    def generate(self, request: Request, *, listener: Listener = ignore, on_latents: OnLatents | None = None) -> Clip:
        """Make one clip. Bad input is refused before a weight is read; a cancel stops within one step.

        on_latents: sees the latents after each step, in pipelines that show them.

        Raises BadInput, LeverRefused, OutOfMemory, NotFound, RunFailed, Cancelled. One clip at a time: a second
        thread is refused, since a pipeline has one scheduler and one set of levers.
        """
        with self._turn():
            return self._generate(request, listener, on_latents)

    def prepare(self, request: Request, *, listener: Listener = ignore, warm: bool = True) -> Plan:
        """Load the request's model and turn its levers on, so that `generate` begins at once. Raises as `generate`.

        warm: also make the first step or two of its film, in which levers compile and record what they need. A model
        that animates a picture is given a grey one where the request has none.
        A newer `prepare` or `generate` overtakes this one, which then raises Cancelled.
        """
        with self._turn(gives_way=True):
            plan = self.plan(request, listener=listener, needs_picture=False)
            with self._in_memory(plan, listener, warm=warm) as plan:
                return plan

    def restore(self, *, listener: Listener = ignore) -> bool:
        """Load again what made room for a load that then ended badly. False: nothing is owed. Raises as `prepare`.

        What cannot be loaded again is owed no longer; after a cancel it still is.
        """
        with self._turn(gives_way=True):
            if (owed := self._owed) is None:
                return False
            try:
                with self._in_memory(owed, listener):
                    return True
            except Cancelled:
                raise
            except BaseException:
                self._owed = None
                raise

    @contextmanager
    def _turn(self, *, gives_way: bool = False) -> Iterator[None]:
        """One at a time. What only prepares gives way to whatever comes after it; a clip gives way to nothing."""
        turn = _Turn(gives_way=gives_way)
        with self._taking_turns:
            if self._closed:
                raise RunFailed("this engine was closed: make a new one")
            if not all(other.gives_way and other.thread != turn.thread for other in self._turns):
                raise RunFailed("this engine is making another clip: use one engine for each thread")
            for other in self._turns:
                self._stop(other, OVERTAKEN)
            self._turns.append(turn)
        try:
            while not self._busy.acquire(timeout=PATIENCE_S):
                turn.check()
            try:
                self._begin(turn)
                yield
            finally:
                self._busy.release()
        finally:
            with self._taking_turns:
                self._turns.remove(turn)

    def _begin(self, turn: _Turn) -> None:
        """What was cancelled before is over, unless it was this turn."""
        self._cancel_reason = None
        if self.rig is not None:
            self.rig.forget_cancel()
        turn.has_begun = True
        turn.check()
        if self._closed:  # between this turn's coming in and its beginning
            raise RunFailed("this engine was closed: make a new one")

    def _stop(self, turn: _Turn, reason: str) -> None:
        turn.reason = turn.reason or reason
        if turn.has_begun:
            self._cancel_reason = reason
            if (rig := self._at_work or self.rig) is not None:
                rig.cancel(reason)

    @contextmanager
    def _in_memory(self, plan: Plan, listener: Listener, *, warm: bool = False) -> Iterator[Plan]:
        """The plan's weights and levers, and the plan as it is then (`move_to`). Memory that runs out from here on is
        answered with a size that fits."""
        family = self.rig.family if self.rig and self.live else families.family(plan.load.family)
        device = self.live.device if self.live else self.machine.device(plan.load.device)
        if self._needs_load(plan):
            refuse_if_too_big(plan, family, self.machine, device)
        with _memory_errors(plan, family, self.machine, device):
            yield self.move_to(plan, listener, warm=warm)

    def _generate(self, request: Request, listener: Listener, on_latents: OnLatents | None) -> Clip:
        if request.seed is None:
            request = replace(request, seed=secrets.randbelow(2**31))
        plan = self.plan(request, listener=listener)
        picture = _picture(plan.request)
        with self._in_memory(plan, listener) as plan:
            rig = self.rig
            assert rig is not None
            notes = (*plan.notes, *_truncation(rig, plan.request), *(images.notes(picture) if picture else ()))
            inputs = call_inputs(rig, plan.request, picture)
            with self._encoding(plan.request) as encoder:
                film = functools.partial(_film, rig, plan.request, inputs, on_latents, encoder)
                frames_FHWC, trace, receipts = self.run(plan, film, listener)
            if encoder:
                trace = replace(trace, stage_s={**trace.stage_s, "encode": encoder.wait_s})
        report = Report(
            undercrank=undercrank.__version__,
            request=plan.request,
            machine=self.machine,
            model_fingerprint=self._loaded.fingerprint if self._loaded else LIVE_FINGERPRINT,
            plan=plan,
            receipts=receipts,
            trace=trace,
            frames_hash=video.frames_hash(frames_FHWC),
            notes=(
                *notes,
                *(f"look at the film: {fault}" for fault in faults(as_FCHW(frames_FHWC))),
                *(f"{r.lever}: {text}" for r in receipts for text in (*r.complaints, *r.remarks)),
            ),
        )
        assert plan.request.fps is not None
        encoded = encoder.encoded if encoder else None
        return Clip(frames_FHWC=frames_FHWC, fps=plan.request.fps, report=report, encoded=encoded)

    def _encoding(self, request: Request) -> AbstractContextManager[video.Encoder | None]:
        assert request.fps is not None
        return video.encoding(request.fps) if self.encode_ahead else nullcontext()

    def move_to(self, plan: Plan, listener: Listener = ignore, *, warm: bool = False) -> Plan:
        """Load if the load changed, else keep the longest common prefix of levers and enter the rest.

        Returns the plan as it is then: a lever that `auto` chose and that refuses, face to face with the pipeline, is
        left out with its reason.
        """
        if self._needs_load(plan):
            return self._load(plan, listener, warm=warm)
        assert self.rig is not None
        try:
            self._plan = self._engage(plan, self.rig, self._held, self._refused)
        except BaseException:
            self._pop_all()
            raise
        return self._plan

    def _engage(
        self,
        plan: Plan,
        rig: Rig,
        held: list[Held],
        refused: dict[Lever, str],
        tell: Callable[[str], None] = lambda name: None,
    ) -> Plan:
        """Leave what the plan has not, enter what it has. What refuses joins `refused`, and the rest is planned anew.
        Raises LeverRefused of what was asked for by name."""
        if any(lever in refused and not is_asked_for(lever, plan.request) for lever in plan.levers):
            plan = self._planned_again(plan, rig, refused)
        while not self._enter_all(plan, rig, held, refused, tell):
            plan = self._planned_again(plan, rig, refused)
        return plan

    def _enter_all(
        self, plan: Plan, rig: Rig, held: list[Held], refused: dict[Lever, str], tell: Callable[[str], None]
    ) -> bool:
        """Keep the longest common prefix of levers, enter the rest. False: one of them refused."""
        while [lever for lever, _, _ in held] != list(plan.levers[: len(held)]):
            _, stack, _ = held.pop()
            stack.close()
        for lever in plan.levers[len(held) :]:
            self.check_cancelled()
            tell(lever.name)
            try:
                held.append(_entered(lever, rig))
            except LeverRefused as refusal:
                if is_asked_for(lever, plan.request) or lever in refused:
                    raise
                refused[lever] = str(refusal).removeprefix(f"{lever.name}: ")
                return False
            refused.pop(lever, None)
        return True

    def _planned_again(self, plan: Plan, rig: Rig, refused: Mapping[Lever, str]) -> Plan:
        """The same request without what refused: others may be on that it kept off, and the record gives true reasons.

        Raises LeverRefused where that would ask for other weights than those that were read."""
        again = make_plan(
            plan.request,  # resolved already
            family=rig.family,
            machine=self.machine,
            ledger=self.ledger,
            load=replace(plan.load, formats=(), resident=True),
            live=self.live,
            strict=False,
            refused=refused,
        )
        if again.load != plan.load:
            raise LeverRefused("; ".join(f"{lever.name}: {why}" for lever, why in refused.items()))
        return replace(again, request=plan.request, notes=plan.notes)

    def run(
        self, plan: Plan, call: Callable[[], T], listener: Listener = ignore
    ) -> tuple[T, Trace, tuple[Receipt, ...]]:
        """Call the pipeline under the levers that are on, watch it, and ask each lever whether it took effect."""
        rig = self.rig
        assert rig is not None and [lever for lever, _, _ in self._held] == list(plan.levers)
        rig.engaged = tuple((lever.name, lever.to_json()) for lever in plan.levers)
        tracer = Tracer(rig, listener)
        with rig.call(), tracer.watching():
            if self._cancel_reason:
                rig.cancel(self._cancel_reason)
            result = call()
            rig.check_cancelled()
        trace = tracer.trace(*self._take_load_cost())
        receipts = tuple(_completed(receipt, lever, rig, trace) for lever, _, receipt in self._held)
        return result, trace, receipts

    def _take_load_cost(self) -> tuple[float, int]:
        """Seconds and bytes of the load, for the first clip after it; nothing for those that follow."""
        cost, self._load_cost = self._load_cost, (0.0, 0)
        return cost

    def cancel(self, reason: str = "cancelled") -> bool:
        """Stop within one step, or between two tensors of a load. Safe from a signal handler.

        True: the denoising loop is running and will stop at its next half step. False: a longer stage is under way,
        which only an exception ends at once.
        """
        self._cancel_reason = reason
        for turn in list(self._turns):
            self._stop(turn, reason)
        rig = self._at_work or self.rig
        if rig is None:
            return False
        rig.cancel(reason)
        return rig.running

    def close(self) -> None:
        """Leave every lever and free the weights. A closed engine makes no more clips.

        What another thread is doing with it is cancelled and waited for.
        """
        self._closed = True
        for turn in list(self._turns):
            self._stop(turn, "the engine was closed")
        here = threading.get_ident()
        if any(turn.thread == here and turn.has_begun for turn in self._turns):  # from within, by a listener
            self._leave()
            return
        with self._busy:
            self._leave()
            self._owed = None

    def _leave(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._unload)
            stack.callback(self._pop_all)

    # ----------------------------------------------------------------------- how

    def _adopt(self, pipe: Any) -> None:
        rig = Rig(pipe, family_of_pipeline(pipe), str(pipe._execution_device))
        self._load_stack.enter_context(rig.seams())
        self.rig, self.live = rig, live_pipeline(rig, self.machine)
        self._found_on = already_on(rig)  # now: later our own levers are there too
        self._parameters = _parameters_of(pipe)  # once, not at each call

    def adopt_again(self) -> None:
        """The pipeline at hand was given another scheduler, denoiser, dtype or device: start over with it."""
        assert self.rig is not None
        pipe = self.rig.pipe
        self._leave()
        self._adopt(pipe)

    def _needs_load(self, plan: Plan) -> bool:
        return self.live is None and (self.rig is None or self._spec != plan.load)

    def _load(self, plan: Plan, listener: Listener, *, warm: bool) -> Plan:
        """Everything as one block, handed over when it is whole; if it ends before, nothing of it is left."""
        with _telling(listener) as told, ExitStack() as stack:
            try:
                with forgetting_frames():  # before the weights are let go of: whoever holds the error would hold them
                    loaded, held, plan, refused = self._built(plan, stack, told, warm=warm)
            finally:
                self._at_work = None
            self._leave()  # nothing is there any more, unless both may be held
            self._load_stack = stack.pop_all()
        self._loaded, self.rig, self._held, self._refused = loaded, loaded.rig, held, refused
        self._spec, self._plan, self._owed = plan.load, plan, None
        self._load_cost = (loaded.load_s, loaded.load_bytes)
        told.state("ready")
        return plan

    def _built(
        self, plan: Plan, stack: ExitStack, told: _Told, *, warm: bool
    ) -> tuple[Loaded, list[Held], Plan, dict[Lever, str]]:
        """Read, place, engage and warm up, each part left through the stack. Also the plan as it is then, and what
        refused."""
        loaded = stack.enter_context(
            load(
                plan.load,
                families.family(plan.load.family),
                listener=told,
                check_cancelled=self.check_cancelled,
                make_room=self._make_room,
            )
        )
        rig = self._at_work = loaded.rig
        stack.enter_context(rig.seams())
        held: list[Held] = []
        refused: dict[Lever, str] = {}
        stack.callback(_leave_all, held)
        plan = self._engage(plan, rig, held, refused, functools.partial(told.state, "engaging"))
        if warm and not rig.family.traits & {"video_input", "control_input"}:
            self.check_cancelled()
            told.state("warming")
            _warm_up(rig, plan, self.check_cancelled)
        self.check_cancelled()
        return loaded, held, plan, refused

    def _make_room(self) -> None:
        """Two models are never in memory together unless asked; the host's memory counts as the device's does."""
        if not self.hold_both:
            self._owed = self._plan or self._owed
            self._leave()

    def _unload(self) -> None:
        self.rig = self._loaded = self._spec = self.live = self._plan = None
        self._refused = {}
        self._load_stack.close()
        self._load_stack = ExitStack()

    def check_cancelled(self) -> None:
        if self._cancel_reason:
            raise Cancelled(self._cancel_reason)

    def _pop_all(self) -> None:
        _leave_all(self._held)


OVERTAKEN = "a newer load took its place"

Held = tuple[Lever, ExitStack, Receipt]
"A lever that is on, how it is left, and what engaging it cost."


class _Turn:
    """One use of an engine, from its wait for the engine on."""

    def __init__(self, *, gives_way: bool) -> None:
        self.gives_way, self.thread = gives_way, threading.get_ident()
        self.has_begun = False
        self.reason: str | None = None
        "Why it shall end."

    def check(self) -> None:
        if self.reason is not None:
            raise Cancelled(self.reason)


class _Told:
    """A listener that remembers how far a load is, and tells the states that come after the last byte."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._last = Event(stage="load", done=0, total=0, unit="bytes", loading=Loading(state="queued"))
        self.has_begun = False

    def __call__(self, event: Event) -> None:
        self._last, self.has_begun = event, True
        self._listener(event)

    def state(self, state: str, component: str = "") -> None:
        self(replace(self._last, loading=Loading(state=state, component=component)))

    def ended(self, state: str) -> None:
        at = self._last.loading or Loading(state=state)
        with suppress(Cancelled):  # a listener that asks for what is just happening
            self(replace(self._last, loading=replace(at, state=state)))


@contextmanager
def _telling(listener: Listener) -> Iterator[_Told]:
    """A load that has begun and does not end well is told as failed, or as cancelled."""
    told = _Told(listener)
    try:
        yield told
    except BaseException as error:
        if told.has_begun:
            told.ended("failed" if isinstance(error, Exception) and not isinstance(error, Cancelled) else "cancelled")
        raise


def _entered(lever: Lever, rig: Rig) -> Held:
    stack, begun = ExitStack(), time.perf_counter()
    before = _allocated(rig.device)
    stack.enter_context(lever.engage(rig))
    receipt = Receipt(
        lever=lever.name,
        engage_ms=(time.perf_counter() - begun) * 1000,
        bytes=max(0, _allocated(rig.device) - before),
    )
    return lever, stack, receipt


def _leave_all(held: list[Held]) -> None:
    with ExitStack() as everything:  # each is left even when leaving another one fails
        for _, stack, _ in held:
            everything.push(stack)
        held.clear()


class _Enough(Exception):
    """No more steps are needed."""


def _warm_up(rig: Rig, plan: Plan, check_cancelled: Callable[[], None]) -> None:
    """Make the first step of the request's film, or two where the first only decides what the second records.

    A cancel is heard between two torch functions; where forwards are compiled or recorded, which nothing may look into
    meanwhile, at the next half step.
    """
    picture = _picture(plan.request)
    if picture is None and "image_input" in rig.family.traits:
        assert plan.request.width and plan.request.height
        picture = images.plain(plan.request.width, plan.request.height)
    inputs = call_inputs(rig, plan.request, picture)
    seals = any(lever.seals for lever in plan.levers)
    rig.engaged = tuple((lever.name, lever.to_json()) for lever in plan.levers)

    def enough(index: int) -> None:
        if index or not seals:
            raise _Enough

    with suppress(_Enough), rig.call(), appended(rig.at_step, enough):
        check_cancelled()
        with nullcontext() if seals else asking(check_cancelled):
            _film(rig, plan.request, inputs)


def _completed(receipt: Receipt, lever: Lever, rig: Rig, trace: Trace) -> Receipt:
    """With what the run showed: the lever's own check, its remarks, and the memory that it held."""
    return replace(
        receipt,
        complaints=tuple(lever.verify(rig, trace)),
        remarks=tuple(text for name, text in rig.remarks if name == lever.name),
        bytes=receipt.bytes + rig.counters.get(f"{lever.name}.bytes", 0),
    )


# --------------------------------------------------------------------------- one call of a loaded pipeline


def call_inputs(rig: Rig, request: Request, picture: Any = None) -> dict[str, Any]:
    """The keyword arguments of `pipe(...)`. A setting that the pipeline does not take is refused, not dropped."""
    takes = set(inspect.signature(type(rig.pipe).__call__).parameters)
    generator = torch.Generator("cpu").manual_seed(int(request.seed or 0))  # the same noise on every device
    inputs: dict[str, Any] = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "width": request.width,
        "height": request.height,
        "num_frames": request.num_frames,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "generator": generator,
        "output_type": "pt",
    }
    optional = {
        "image": picture,
        "guidance_scale_2": request.guidance_scale_2,
        "max_sequence_length": rig.family.max_sequence_length,
        "frame_rate": float(request.fps or rig.family.fps),
        "use_dynamic_cfg": True if "dynamic_cfg" in rig.family.traits else None,
    }
    inputs |= {key: value for key, value in optional.items() if key in takes and value is not None}
    held_elsewhere = {"guidance_scale"} if hasattr(rig.pipe, "guider") else set()
    if "size_from_image" in rig.family.traits:
        held_elsewhere |= {"width", "height"}
    for name in sorted(set(inputs) - takes - held_elsewhere):
        if name == "negative_prompt" and not request.negative_prompt:
            continue
        raise BadInput(f"{rig.family.title} takes no {name}: leave it out", field=name)
    return {key: value for key, value in inputs.items() if key in takes}


def _film(
    rig: Rig,
    request: Request,
    inputs: Mapping[str, Any],
    on_latents: OnLatents | None = None,
    encoder: video.Encoder | None = None,
) -> np.ndarray:
    """Run the pipeline and return its frames, F H W 3 in uint8. Raises RunFailed where numbers are not finite."""
    ahead = frames.Ahead(rig, encoder) if encoder else None
    finite = _Finite(rig)

    def remember(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        finite.see(index, None, tensors["latents"])
        if on_latents is not None:
            on_latents(rig, index, tensors["latents"])
        return {}

    watched = {"callback_on_step_end": remember} if _takes_callback(rig.pipe) else {}
    with ExitStack() as stack:
        for block in (_guided(rig, request), _shifted(rig, request), finite.watching(), torch.no_grad()):
            stack.enter_context(block)
        if ahead:
            stack.enter_context(ahead.watching())
        film = _frames_of(rig.pipe(**inputs, **watched))
        if ahead:
            ahead.check(film)
    finite.check()
    return frames.from_device(film)


class _Finite:
    """Are the denoiser's outputs and the latents of a run finite? Flags stay on the device until the run is over."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._made: list[tuple[str, Any]] = []
        self._flags: list[tuple[int, str | None, torch.Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        with around_forwards(self._rig, self._forward), appended(self._rig.at_step, self._step):
            yield

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if self._rig.running:
            self._made.append((self._rig.branch or f"call {len(self._made) + 1}", output))
        return output

    def _step(self, index: int) -> None:
        """Only now: a forward on another device may be finished as late as this."""
        for branch, output in self._made:
            for tensor in [output] if isinstance(output, torch.Tensor) else tuple(output):
                self.see(index, branch, output[tensor] if isinstance(tensor, str) else tensor)
        self._made.clear()

    def see(self, step: int, branch: str | None, tensor: torch.Tensor) -> None:
        self._flags.append((step, branch, torch.isfinite(tensor).all()))

    def check(self) -> None:
        """Raise RunFailed naming the first step and branch; the branch is unknown where only the latents overflowed."""
        bad = [(step, branch) for step, branch, is_finite in self._flags if not bool(is_finite)]
        if not bad:
            return
        step, branch = min(bad, key=lambda where: (where[0], where[1] is None))
        raise RunFailed(
            f"non-finite latents at step {step + 1}"
            + (f", branch {branch}" if branch else "")
            + ": the run overflowed; "
            "try another dtype (--dtype bfloat16 or float32), fewer levers or less guidance"
        )


def _takes_callback(pipe: Any) -> bool:
    return "callback_on_step_end" in inspect.signature(type(pipe).__call__).parameters


def _frames_of(output: Any) -> Any:
    """The one clip of the batch, from `.frames` or a tuple (video, audio)."""
    films = output.frames if hasattr(output, "frames") else output[0]
    return films[0]


@contextmanager
def _guided(rig: Rig, request: Request) -> Iterator[None]:
    """Pipelines with a guider hold the guidance scale in it: give the run a guider of the asked scale."""
    guider = getattr(rig.pipe, "guider", None)
    if guider is None:
        yield
        return
    with swap_attr(rig.pipe, "guider", guider.new(guidance_scale=request.guidance_scale)):
        yield


@contextmanager
def _shifted(rig: Rig, request: Request) -> Iterator[None]:
    """The asked shift of the noise schedule, for this run. Flow-matching Euler keeps it beside its configuration."""
    scheduler = rig.pipe.scheduler
    if request.flow_shift is None:
        yield
    elif "flow_shift" in scheduler.config:
        config = type(scheduler.config)({**scheduler.config, "flow_shift": request.flow_shift})
        with swap_attr(scheduler, "_internal_dict", config):
            yield
    elif hasattr(scheduler, "_shift") and not scheduler.config.use_dynamic_shifting:
        with swap_attr(scheduler, "_shift", request.flow_shift):
            yield
    else:
        raise BadInput(f"{type(scheduler).__name__} has no shift to set: leave flow_shift out", field="flow_shift")


def _picture(request: Request) -> Any:
    """The conditioning picture, upright, RGB, covering the frame. Raises BadImage before anything loads."""
    if request.image is None:
        return None
    assert request.width and request.height
    return images.fit(images.open_image(request.image), request.width, request.height)


def _truncation(rig: Rig, request: Request) -> tuple[str, ...]:
    """What the text encoder will not see of the prompt, in words."""
    limit, tokenizer = rig.family.max_sequence_length, getattr(rig.pipe, "tokenizer", None)
    if limit is None or tokenizer is None:
        return ()
    notes = []
    for name in ("prompt", "negative_prompt"):
        ids = tokenizer(getattr(request, name) or "", truncation=False, verbose=False)["input_ids"]
        if len(ids) > limit:
            lost = tokenizer.decode(ids[limit - 1 :][:12], skip_special_tokens=True).strip()
            notes.append(
                f"{name}: {len(ids)} tokens, the model reads {limit}; {len(ids) - limit} dropped, from {lost!r} on"
            )
    return tuple(notes)


@contextmanager
def _memory_errors(plan: Plan, family: Family, machine: Machine, device: Device) -> Iterator[None]:
    """Memory that ran out, as an answer: what was expected, what was taken, what would fit.

    What the failed run computed is freed at once: else the error's own traceback would hold it.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        name, expected = device.torch_name, plan.expected.peak_bytes
        taken = _peak(name)
        forget_frames(error)
        if taken is not None:
            torch.cuda.empty_cache()
        dense = case_of(plan.request, family, machine, device, plan.load)
        advice = fitting_after(expected or 0, dense, plan.levers)
        story = f"the plan expected {gib(expected)}, the run had taken {gib(taken)} when it failed"
        raise OutOfMemory(f"memory ran out on {name}: {story}; {advice}") from error


def _peak(device: str) -> int | None:
    """Bytes that this process has held at most since the run began; None: this device does not count them."""
    return torch.cuda.max_memory_allocated(torch.device(device)) if device.startswith("cuda") else None


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated(torch.device(device)) if device.startswith("cuda") else 0


# --------------------------------------------------------------------------- generate, in one line


def generate(prompt: str, *, listener: Listener = ignore, **settings: Any) -> Clip:
    """Make one clip: `undercrank.generate("a red ball rolls left").save("ball.mp4")`.

    settings: the fields of `Request` (model, width, height, num_frames, seed, fidelity, ...) and levers by knob.
    """
    known = set(Request.__dataclass_fields__)
    wishes = tuple((knob, str(value)) for knob, value in settings.items() if knob not in known)
    wishes = (*settings.pop("wishes", ()), *wishes)
    fields = {name: value for name, value in settings.items() if name in known}
    if fields.get("fps") is not None:
        fields["fps"] = as_fps(fields["fps"])
    with Engine() as engine:
        return engine.generate(Request(prompt=prompt, wishes=wishes, **fields), listener=listener)


# --------------------------------------------------------------------------- accelerate


@dataclass(kw_only=True)
class Run:
    """What `accelerate` yields: the plan, receipts and trace of the newest call of the pipeline."""

    fidelity: Fidelity
    wishes: tuple[tuple[str, str], ...]
    allow_denied: bool = False
    plan: Plan | None = None
    trace: Trace | None = None
    receipts: tuple[Receipt, ...] = ()
    calls: int = 0
    rig: Rig = field(repr=False)
    listener: Listener = field(default=ignore, repr=False)


@contextmanager
def accelerate(
    pipe: Any,
    fidelity: str | Fidelity = Fidelity.FAITHFUL,
    *,
    listener: Listener = ignore,
    allow_denied: bool = False,
    **levers: str | float,
) -> Iterator[Run]:
    """Run a diffusers pipeline faster: `with undercrank.accelerate(pipe) as run: pipe(...)`.

    The pipeline is called as always; each call is planned from its own arguments. On leaving, the pipeline is
    what the same calls on the stock pipeline would have left. Blocks nest: the inner one's words hold inside it.

    levers: knob=value ("auto", "off", "on" or a setting, which may be a number). allow_denied: also a setting that
    measured rows deny. Raises BadInput for an unknown knob, LeverRefused (at the call) for a lever that cannot be
    honoured.
    """
    if not all(hasattr(pipe, name) for name in ("progress_bar", "components", "scheduler", "_execution_device")):
        raise BadInput(f"accelerate takes a loaded diffusers pipeline, not {type(pipe).__name__}", field="pipe")
    word, wishes = Fidelity.of(fidelity), tuple((knob, str(value)) for knob, value in levers.items())
    check_wishes(wishes)  # an unknown knob is refused here, not at the first call
    with ExitStack() as stack:
        with _HOLDING:
            hold = _HELD.get(pipe) or stack.enter_context(_Hold(pipe))
        run = Run(fidelity=word, wishes=wishes, allow_denied=allow_denied, rig=hold.rig, listener=listener)
        stack.enter_context(hold.within(run))
        yield run


class _Hold:
    """One engine per pipeline, from the outermost `accelerate` on to its end."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.runs: list[Run] = []
        self._lock = threading.RLock()
        self._stack = ExitStack()

    def __enter__(self) -> _Hold:
        with ExitStack() as stack:
            self.engine = stack.enter_context(Engine(pipe=self.pipe))
            self._adopted = self._parts()
            stack.callback(_HELD.pop, self.pipe, None)
            _HELD[self.pipe] = self
            stack.enter_context(swap_class(self.pipe, _called_through(type(self.pipe), self)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def rig(self) -> Rig:
        assert self.engine.rig is not None
        return self.engine.rig

    def _parts(self) -> tuple[Any, ...]:
        """What a plan and its levers were made for: the user may give the pipeline another one inside the block."""
        denoisers = self.engine.rig.primaries if self.engine.rig else []
        dtypes = tuple(str(getattr(module, "dtype", "")) for module in denoisers)
        return id(self.pipe.scheduler), tuple(map(id, denoisers)), dtypes, str(self.pipe._execution_device)

    def _ask_others_to_step_aside(self) -> None:
        """Levers of another pipeline that shares our scheduler or denoisers would lie under or over ours, and could
        then not be left in order. They are entered again at that pipeline's next call."""
        ours = self._shared_ids()
        for other in list(_HELD.values()):
            if other is not self and not other.rig.called and ours & other._shared_ids():
                other.engine._pop_all()

    def _shared_ids(self) -> set[int]:
        return {id(part) for part in (self.rig.scheduler, *self.rig.primaries)}

    def _adopt_again_if_changed(self) -> None:
        if self._parts() != self._adopted:
            self.engine.adopt_again()
            self._adopted = self._parts()

    @contextmanager
    def within(self, run: Run) -> Iterator[None]:
        self.runs.append(run)
        try:
            yield
        finally:
            if self.runs[-1] is not run:
                raise RuntimeError(
                    "accelerate blocks of one pipeline were left in the wrong order: leave the inner first"
                )
            self.runs.pop()
            if self.runs and (plan := self.runs[-1].plan) is not None:
                self.engine.move_to(plan)

    def call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One `pipe(...)`: plan from its arguments, move there, run, remember. Threads take turns."""
        with self._lock:
            return self._call(original, args, kwargs)

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.runs[-1]
        if self.rig.called:  # a pipeline that calls itself is one run
            return original(self.pipe, *args, **kwargs)
        self._adopt_again_if_changed()
        self._ask_others_to_step_aside()
        run.rig = self.rig
        asked = _request_of(_arguments(original, self.pipe, args, kwargs), self.rig.family, run)
        plan = self.engine.plan_live(asked, strict=False)
        run.plan = plan = self.engine.move_to(plan)
        result, run.trace, run.receipts = self.engine.run(
            plan, lambda: original(self.pipe, *args, **kwargs), run.listener
        )
        run.calls += 1
        return result


_HOLDING = threading.Lock()
_HELD: weakref.WeakKeyDictionary[Any, _Hold] = weakref.WeakKeyDictionary()
"The pipelines inside an `accelerate` block: a nested block finds the outer one's engine here."


def _called_through(cls: type, hold: _Hold) -> type:
    """A subclass whose call goes through the engine; same name, same signature, same module."""
    original = cls.__call__

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not hold.pipe or not hold.runs:  # a copy made inside the block, or one that outlived it
            return original(self, *args, **kwargs)
        return hold.call(original, args, kwargs)

    return subclass(cls, __call__=__call__)


def _arguments(
    original: Callable[..., Any], pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The call's arguments by name, defaults included."""
    bound = inspect.signature(original).bind(pipe, *args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _request_of(arguments: Mapping[str, Any], family: Family, run: Run) -> Request:
    """The shape of a call as a Request; what is no number there (None, a schedule) is the family's default."""

    def number(name: str, fallback: Any) -> Any:
        value = arguments.get(name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return fallback
        return int(float(value)) if isinstance(fallback, int) else float(value)

    schedule = next((v for v in (arguments.get("timesteps"), arguments.get("sigmas")) if v is not None), None)
    prompt = arguments.get("prompt")
    return Request(
        prompt=prompt if isinstance(prompt, str) else "",
        model=family.id,
        width=number("width", family.width),
        height=number("height", family.height),
        num_frames=number("num_frames", family.num_frames),
        num_inference_steps=number("num_inference_steps", family.num_inference_steps)
        if schedule is None
        else len(schedule),
        guidance_scale=number("guidance_scale", family.guidance_scale),
        fidelity=run.fidelity,
        wishes=run.wishes,
        allow_denied=run.allow_denied,
    )


def family_of_pipeline(pipe: Any) -> Family:
    """The row of a pipeline at hand; a plain row where its class is not in the table."""
    name = type(pipe).__name__
    repo = str(getattr(pipe, "name_or_path", None) or pipe.config.get("_name_or_path") or "")
    known = families.of_pipeline(name, repo)
    return known or replace(
        families.FAMILIES[0],
        id=f"unknown:{name}",
        title=name,
        repo=repo,
        pipeline=name,
        traits=frozenset(),
        note="",
        # What is not known is unknown, and not what another model has.
        max_sequence_length=None,
        trained_sizes=(),
        max_trained_frames=None,
        branches="unknown",
        branch_names=(),
        transformer_params=0,
        text_encoder_params=0,
        vae_params=0,
        transformer_width=0,
    )


def _parameters_of(pipe: Any) -> int:
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return sum(weight.numel() for module in modules for weight in module.parameters())


def already_on(rig: Rig) -> list[str]:
    """What the user has put on the pipeline: it is kept, and a plan says so."""
    found = []
    parts = [part for denoiser in rig.denoisers for part in denoiser.modules()]
    if any(getattr(part, "_compiled_call_impl", None) is not None for part in parts):
        found.append("torch.compile")
    if any(getattr(denoiser, "is_cache_enabled", False) for denoiser in rig.denoisers):
        found.append("a step cache of diffusers")
    is_hooked = any(hasattr(part, "_hf_hook") for part in parts)
    by_groups = any(each.get_hook("group_offloading") for denoiser in rig.denoisers for each in registries(denoiser))
    if is_hooked or by_groups or getattr(rig.pipe, "hf_device_map", None):
        found.append("offloading or a device map")
    if any(getattr(denoiser, "peft_config", None) for denoiser in rig.denoisers):
        found.append("LoRA")
    return found


def live_pipeline(rig: Rig, machine: Machine) -> Live:
    """What is decided already: the device, the dtype and the scheduler of a pipeline at hand."""
    return Live(device=_device_of(rig.device, machine), dtype=_dtype_of(rig), scheduler=type(rig.scheduler).__name__)


def _device_of(name: str, machine: Machine) -> Device:
    """The machine's device of that name; a logical or foreign device by its kind alone."""
    found = next((d for d in machine.devices if name in (d.torch_name, d.kind)), None)
    kind, _, index = name.partition(":")
    return found or Device(kind=kind, index=int(index or 0), name=kind)


def _dtype_of(rig: Rig) -> str:
    dtype = str(getattr(rig.denoisers[0], "dtype", "float32")).removeprefix("torch.")
    return dtype if dtype in ("float32", "bfloat16", "float16") else "float32"
