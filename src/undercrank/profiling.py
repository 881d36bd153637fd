"""The denoising loop under CUDA's own tracing: when the host waited, when the device was idle, and for which kernels.

Tracing slows the host, so it has a run of its own, and no time is read from that run but the device's and the length
of the host's waits. What undercrank itself waits for, between stages and to keep the host near the device, is marked
by ranges named `undercrank.*` and left out.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from undercrank.figures import Kernel, Profile
from undercrank.rig import Rig
from undercrank.trace import WAIT
from undercrank.undo import appended
from undercrank.work import around_forwards

MOST_STEPS = 20
"A trace grows by some ten thousand events a step."

OURS = "undercrank."
BLOCKING = ("Synchronize", "cudaMemcpy", "cuMemcpy", "cudaMalloc", "cudaFree")
"CUDA calls in which the host may wait, by a part of their names."

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")


@contextmanager
def profiled(rig: Rig, most_steps: int = MOST_STEPS) -> Iterator[list[Profile]]:
    """The profile of the loop of the run in this block, once it has ended; nothing where there is no CUDA."""
    found: list[Profile] = []
    if not rig.device.startswith("cuda"):
        yield found
        return
    watch = _Watch(rig, most_steps, found)
    with ExitStack() as stack:
        stack.callback(watch.close)
        stack.enter_context(appended(rig.at_start, watch.start))
        stack.enter_context(appended(rig.at_step, watch.step))
        stack.enter_context(appended(rig.at_end, watch.end))
        yield found


class _Watch:
    """Starts the profiler with the loop and stops it with the loop, or after `most_steps`."""

    def __init__(self, rig: Rig, most_steps: int, found: list[Profile]) -> None:
        self._rig, self._most_steps, self._found = rig, most_steps, found
        self._profiler: Any = None

    def start(self, total: int) -> None:
        activity = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(activities=[activity.CPU, activity.CUDA])
        self._profiler.start()
        self._wait()

    def step(self, index: int) -> None:
        if index + 1 == min(self._most_steps, self._rig.total_steps):
            self._stop(index + 1)

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self._stop(self._rig.step_index)

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _wait(self) -> None:
        with torch.profiler.record_function(WAIT):
            torch.cuda.synchronize(torch.device(self._rig.device))

    def _stop(self, steps: int) -> None:
        if self._profiler is None:
            return
        self._wait()
        profiler = self._profiler
        self.close()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            self._found.append(profile_of(json.loads(path.read_bytes())["traceEvents"], steps))


# --------------------------------------------------------------------------- reading a trace


def profile_of(events: list[dict[str, Any]], steps: int) -> Profile:
    """Read a Chrome trace of torch's profiler. The loop lies between its first and its last `undercrank.wait`."""
    spans = [event for event in events if event.get("ph") == "X"]
    waits = [span for span in spans if span.get("cat") == "user_annotation" and span["name"] == WAIT]
    begun, ended = min(map(_end, waits)), max(map(_end, waits))
    on_device = [s for s in spans if s.get("cat") in DEVICE_WORK and _end(s) > begun and s["ts"] < ended]
    blocked_by = _blocked_by(spans, begun, ended)
    return Profile(
        steps=steps,
        loop_ms=(ended - begun) / 1000,
        busy_ms=_union([(max(s["ts"], begun), min(_end(s), ended)) for s in on_device]) / 1000,
        cpu_blocked_ms=sum(blocked_by.values()),
        blocked_by=blocked_by,
        kernels=_kernels(on_device),
    )


def _end(span: dict[str, Any]) -> float:
    return float(span["ts"] + span["dur"])


def _blocked_by(spans: list[dict[str, Any]], begun: float, ended: float) -> dict[str, float]:
    """Milliseconds by CUDA call, without our own waits; an asynchronous copy counts where its memory is not pinned."""
    ours = [(s["ts"], _end(s)) for s in spans if s.get("cat") == "user_annotation" and s["name"].startswith(OURS)]
    unpinned = {
        _correlation(s) for s in spans if s.get("cat") == "gpu_memcpy" and "pageable" in s["name"].lower()
    }  # fmt: skip
    blocked_by: dict[str, float] = defaultdict(float)
    for span in spans:
        name = span["name"]
        if span.get("cat") not in HOST_CALLS or not any(word in name for word in BLOCKING):
            continue
        if not begun <= span["ts"] < ended or any(start <= span["ts"] < end for start, end in ours):
            continue
        if "Async" in name and _correlation(span) not in unpinned:
            continue
        blocked_by[name] += span["dur"] / 1000
    return dict(blocked_by)


def _correlation(span: dict[str, Any]) -> Any:
    return span.get("args", {}).get("correlation")


def _union(intervals: list[tuple[float, float]]) -> float:
    """Length of what at least one interval covers."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _kernels(on_device: list[dict[str, Any]]) -> tuple[Kernel, ...]:
    ms: dict[str, list[float]] = defaultdict(list)
    for span in on_device:
        ms[span["name"]].append(span["dur"] / 1000)
    table = [Kernel(name=name, ms=sum(each), count=len(each)) for name, each in ms.items()]
    return tuple(sorted(table, key=lambda kernel: -kernel.ms))


# --------------------------------------------------------------------------- the host's own time


@contextmanager
def between_forwards(rig: Rig) -> Iterator[Between]:
    """Host time outside the denoiser in each step, and what the first forward made.

    The host waits for the device at the end of each forward, so that what follows meets an empty queue: its time is
    that of the host's own code and launches, and not of the work that was queued before.
    """
    seen = Between(rig)
    with around_forwards(rig, seen.forward), appended(rig.at_step, seen.step):
        yield seen


class Between:
    """host_us: of each step, from its first forward's entry on; first_output: of the first forward, float32, CPU."""

    def __init__(self, rig: Rig) -> None:
        self.host_us: list[float] = []
        self.first_output: torch.Tensor | None = None
        self._rig = rig
        self._left: float | None = None
        self._us = 0.0

    def forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._left is not None:
            self._us += (time.perf_counter() - self._left) * 1e6
        result = forward(*args, **kwargs)
        if self.first_output is None:
            first = result[0] if isinstance(result, tuple) else result.sample
            self.first_output = first.detach().to("cpu", torch.float32, copy=True)
        if self._rig.device.startswith("cuda"):
            torch.cuda.synchronize(torch.device(self._rig.device))
        self._left = time.perf_counter()
        return result

    def step(self, index: int) -> None:
        """The part of a step before its first forward is counted with the step before."""
        now = time.perf_counter()
        if self._left is not None:
            self._us += (now - self._left) * 1e6
            self.host_us.append(self._us)
        self._left, self._us = now, 0.0
