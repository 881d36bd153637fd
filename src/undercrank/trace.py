"""What really happened in a run: seconds per stage, step times, stalls, calls per branch, peak bytes.

On a GPU the times come from events that the device itself stamps between steps and that are read after the loop,
so measuring makes nobody wait. Stalls are those that CUDA itself reports (`set_sync_debug_mode`), with their lines.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from undercrank.records import Loading, Trace
from undercrank.rig import Rig
from undercrank.undo import appended, swap_attr

RUN_AHEAD_STEPS = 2
"How far the host may queue work before the device: bounds the delay of a cancel, leaves the device no gap."


WAIT = "undercrank.wait"
"Name, in a profile, of the stretches in which the host waits because we want it to."


@dataclass(frozen=True, kw_only=True)
class Event:
    """Progress of one stage: load (bytes), text, denoise (steps), decode, encode (frames)."""

    stage: str
    done: int
    total: int
    unit: str = ""
    step_ms: float | None = None
    eta_s: float | None = None
    loading: Loading | None = None
    "Of the stage load: its state, which of the parts, and the bytes of that."


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """A listener for those who only want the result."""


class Tracer:
    """Watches one call of the pipeline through the rig's seams. `trace()` is complete after `watching()`."""

    def __init__(self, rig: Rig, listener: Listener = ignore) -> None:
        self._rig, self._listener = rig, listener
        self._clock = _DeviceClock(rig.device) if rig.device.startswith("cuda") else _HostClock()
        self._entered = self._started = self._ended = self._left = 0.0
        self._stalls: Counter[str] = Counter()
        self._counts_stalls = rig.device.startswith("cuda")
        self._loop: ExitStack | None = None
        self._host_us: list[float] = []
        self._resumed = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(appended(self._rig.at_start, self._start))
            stack.enter_context(appended(self._rig.at_step, self._step))
            stack.enter_context(appended(self._rig.at_end, self._end))
            self._clock.reset_peak()
            self._entered = time.perf_counter()
            self._listener(Event(stage="text", done=0, total=1))
            try:
                yield
            finally:
                self._left = time.perf_counter()

    def _start(self, total: int) -> None:
        self._clock.wait()
        self._started = time.perf_counter()
        self._clock.stamp()
        self._listener(Event(stage="text", done=1, total=1))
        self._listener(Event(stage="denoise", done=0, total=total, unit="steps"))
        if self._counts_stalls:
            self._loop = ExitStack()
            self._loop.enter_context(cuda_stalls(self._stalls))
        self._resumed = time.perf_counter()

    def _step(self, index: int) -> None:
        self._host_us.append((time.perf_counter() - self._resumed) * 1e6)
        self._clock.stamp()
        self._clock.hold_back(RUN_AHEAD_STEPS)
        done, total = index + 1, self._rig.total_steps
        step_ms = self._clock.recent_ms()
        eta_s = None if step_ms is None else step_ms * (total - done) / 1000
        self._listener(Event(stage="denoise", done=done, total=total, unit="steps", step_ms=step_ms, eta_s=eta_s))
        self._resumed = time.perf_counter()

    def _end(self, error: BaseException | None) -> None:
        if self._loop is not None:
            self._loop.close()
        self._clock.wait()
        self._ended = time.perf_counter()
        if error is None:
            self._listener(Event(stage="decode", done=0, total=1))

    def trace(self, load_s: float = 0.0, load_bytes: int = 0) -> Trace:
        text_s = (self._started or self._left) - self._entered
        denoise_s = max(0.0, self._ended - self._started)
        decode_s = self._left - self._ended if self._ended else 0.0
        steps = self._clock.steps_ms()
        return Trace(
            stage_s={"load": load_s, "text": text_s, "denoise": denoise_s, "decode": decode_s},
            step_ms=steps,
            stalls=sum(self._stalls.values()) if self._counts_stalls else None,
            stall_sites=dict(self._stalls),
            calls=dict(self._rig.branch_calls),
            computed_steps=len(steps) - self._rig.skipped_steps,
            skipped_steps=self._rig.skipped_steps,
            schedules={key: "".join("01"[done] for done in run) for key, run in self._rig.executed.items()},
            peak_bytes=self._clock.peak_bytes(),
            load_bytes=load_bytes,
            cpu_threads=torch.get_num_threads(),
            host_us=tuple(self._host_us) if self._counts_stalls else (),
            counters=dict(self._rig.counters),
        )


class _HostClock:
    """A device that works while the host waits: the CPU."""

    def __init__(self) -> None:
        self._stamps: list[float] = []

    def stamp(self) -> None:
        self._stamps.append(time.perf_counter())

    def wait(self) -> None: ...

    def hold_back(self, steps: int) -> None: ...

    def reset_peak(self) -> None: ...

    def recent_ms(self) -> float | None:
        return None if len(self._stamps) < 2 else (self._stamps[-1] - self._stamps[-2]) * 1000

    def steps_ms(self) -> tuple[float, ...]:
        pairs = zip(self._stamps, self._stamps[1:], strict=False)
        return tuple((late - early) * 1000 for early, late in pairs)

    def peak_bytes(self) -> int:
        """The process's peak resident memory: on a CPU there is no per-run figure."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class _DeviceClock:
    """A CUDA device: events stamped in its own stream, read when they have passed."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._events: list[Any] = []

    def stamp(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def wait(self) -> None:
        with torch.profiler.record_function(WAIT):
            torch.cuda.synchronize(self._device)

    def hold_back(self, steps: int) -> None:
        if len(self._events) > steps:
            with torch.profiler.record_function("undercrank.hold_back"):
                self._events[-1 - steps].synchronize()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def recent_ms(self) -> float | None:
        """Of the newest pair that the device has certainly passed."""
        passed = self._events[: len(self._events) - RUN_AHEAD_STEPS]
        return None if len(passed) < 2 else passed[-2].elapsed_time(passed[-1])

    def steps_ms(self) -> tuple[float, ...]:
        pairs = zip(self._events, self._events[1:], strict=False)
        return tuple(early.elapsed_time(late) for early, late in pairs)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


_SYNC_WARNING = "called a synchronizing CUDA operation"
_PROTOTYPE_WARNING = "Synchronization debug mode is a prototype feature"


@contextmanager
def cuda_stalls(counts: Counter[str]) -> Iterator[None]:
    """Count, by "file:line", the operations in this block for which CUDA made the host wait."""
    before = torch.cuda.get_sync_debug_mode()
    shown = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
        if _SYNC_WARNING in str(message):
            counts[f"{_short(filename)}:{lineno}"] += 1
        else:
            shown(message, category, filename, lineno, *rest, **more)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_SYNC_WARNING)
        warnings.filterwarnings("ignore", message=_PROTOTYPE_WARNING)
        with swap_attr(warnings, "showwarning", show):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)


def _short(filename: str) -> str:
    return filename.rsplit(f"{os.sep}site-packages{os.sep}", 1)[-1]
