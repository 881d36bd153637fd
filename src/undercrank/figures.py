"""The arithmetic of a forward and how fast a device does it: records, and what follows from them.

The floor of a forward is its work at the best rates that this device showed in the same run: multiplications of
matrices at the rate of matrix products, attention at the rate of the best attention kernel. Reading and writing
memory, and everything between the two, is counted as free, so no forward that does this work can be faster.
Counting and measuring are in `work` and `profiling`; here is no torch.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from undercrank.records import Record, Trace


@dataclass(frozen=True, kw_only=True)
class Gemm(Record):
    """`batch` products of an M x K by a K x N matrix, done `count` times."""

    batch: int
    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Of one; a multiplication and an addition are two."""
        return 2 * self.batch * self.m * self.n * self.k

    def in_words(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{batch}{self.m} x {self.n} x {self.k}"


@dataclass(frozen=True, kw_only=True)
class Attention(Record):
    """B clips, H heads, L queries, S keys, D values a head, done `count` times."""

    b: int
    h: int
    l: int  # noqa: E741  (the field's own letter)
    s: int
    d: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Of one, every pair counted: what a mask hides is computed by the kernels that take a mask."""
        return 4 * self.b * self.h * self.l * self.s * self.d

    def in_words(self) -> str:
        return f"B{self.b} H{self.h} L{self.l} S{self.s} D{self.d}"


@dataclass(frozen=True, kw_only=True)
class Work(Record):
    """What was multiplied in one call, by kind; heaviest shapes first."""

    gemms: tuple[Gemm, ...] = ()
    attentions: tuple[Attention, ...] = ()
    conv_flops: int = 0

    @property
    def gemm_flops(self) -> int:
        return sum(gemm.flops * gemm.count for gemm in self.gemms)

    @property
    def attention_flops(self) -> int:
        return sum(attention.flops * attention.count for attention in self.attentions)


@dataclass(frozen=True, kw_only=True)
class Rate(Record):
    """How fast one kernel ran at one shape, over n samples."""

    kernel: str
    shape: str
    tflops: float
    "10^12 operations a second, the median."
    low: float
    high: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Rates(Record):
    """What a device showed, in the run's dtype, at the shapes of the work."""

    device: str
    dtype: str
    gemm: tuple[Rate, ...]
    attention: tuple[Rate, ...]
    refused: dict[str, str] = field(default_factory=dict)
    "Attention kernels that do not serve here, and why."

    @property
    def gemm_tflops(self) -> float:
        """The best of all shapes, the large square among them: a floor takes nothing slower."""
        return max((rate.tflops for rate in self.gemm), default=0.0)

    @property
    def attention_tflops(self) -> float:
        return max((rate.tflops for rate in self.attention), default=0.0)


def floor_ms(work: Work, rates: Rates) -> float:
    """Milliseconds below which this device cannot do the work. Convolutions count at the rate of matrix products."""
    parts = ((work.gemm_flops + work.conv_flops, rates.gemm_tflops), (work.attention_flops, rates.attention_tflops))
    return sum(flops / tflops / 1e9 for flops, tflops in parts if flops)


@dataclass(frozen=True, kw_only=True)
class Kernel(Record):
    """One row of the table of kernels: how long all its runs took together."""

    name: str
    ms: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Profile(Record):
    """The denoising loop as CUDA's own tracing saw it, in a run of its own: tracing costs host time."""

    steps: int
    loop_ms: float
    busy_ms: float
    "The device did something: the union of all kernels and copies."
    cpu_blocked_ms: float
    "The host waited inside a CUDA call: synchronising, copying from or to memory that is not pinned, allocating."
    blocked_by: dict[str, float] = field(default_factory=dict)
    "Milliseconds by CUDA call."
    kernels: tuple[Kernel, ...] = ()
    "Longest first."

    @property
    def gpu_idle_share(self) -> float:
        return max(0.0, 1 - self.busy_ms / self.loop_ms) if self.loop_ms else 0.0

    @property
    def busy_step_ms(self) -> float:
        return self.busy_ms / max(1, self.steps)


def kernel_table(profile: Profile, top: int = 12) -> list[tuple[str, float, float]]:
    """(kernel, ms, share of all kernels' time), longest first: where the time goes."""
    total = sum(kernel.ms for kernel in profile.kernels)
    return [(kernel.name, kernel.ms, kernel.ms / total) for kernel in profile.kernels[:top]]


@dataclass(frozen=True, kw_only=True)
class Look(Record):
    """What the untimed runs of one side showed."""

    works: tuple[Work, ...] = ()
    "Of each forward of the first step, as it was really called."
    profile: Profile | None = None
    "None where there is no CUDA."
    host_us: tuple[float, ...] = ()
    "Of each step: host time outside the denoiser, while the device had nothing to do."


def step_floor_ms(look: Look, rates: Rates) -> float:
    """Of a step in which every forward is computed."""
    return sum(floor_ms(work, rates) for work in look.works)


def host_step_us(trace: Trace) -> float | None:
    """Host microseconds of a step, the median of all but the first; None where the host does the device's work.

    What the host spent held back on purpose is not in it. Where more work is queued than a device's queue takes,
    waiting for room is in it: then read `Look.host_us`, which is taken with an empty queue.
    """
    return statistics.median(trace.host_us[1:] or trace.host_us) if trace.host_us else None
