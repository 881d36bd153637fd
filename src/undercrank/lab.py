"""What `bench` learns about a side in runs that it does not time: work, waits, idle time, kernels, host time.

Each look has a run of its own, since looking costs time: the work is counted in the first step, without compiled
code; the host is timed over some steps with the device's queue kept empty; and CUDA traces a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from undercrank.engine import Engine
from undercrank.figures import Look, Rates, Work
from undercrank.levers import knobs
from undercrank.profiling import MOST_STEPS, between_forwards, profiled
from undercrank.records import Cancelled, Request
from undercrank.rig import Rig
from undercrank.undo import appended
from undercrank.work import first_step, rates

SAME_WORK = ("compile", "cuda_graph", "attention")
"Levers that change how a forward is computed and not what it multiplies; off while it is counted, so that it shows."

Watch = Callable[[Rig], AbstractContextManager[Any]]
STEPS: dict[Watch, int] = {first_step: 1, between_forwards: 8, profiled: MOST_STEPS}
"How many steps each of them needs."


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A look, and what the first forward made, to compare the sides by."""

    look: Look
    first_output: torch.Tensor | None


class Lab:
    """Looks into the runs of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def look(self, request: Request) -> Seen:
        """Raises the errors of `Engine.generate`."""
        works = self._works(request)
        between = self._during(request, between_forwards)
        profile = self._during(request, profiled)
        return Seen(
            look=Look(works=tuple(works), host_us=tuple(between.host_us), profile=profile[0] if profile else None),
            first_output=between.first_output,
        )

    def rates(self, looks: Iterable[Look]) -> Rates | None:
        """How fast the device is at the shapes of all sides; None without one."""
        assert self._engine.rig is not None
        device, denoiser = self._engine.rig.device, self._engine.rig.denoisers[0]
        if not device.startswith("cuda"):
            return None
        torch.cuda.empty_cache()  # the shapes' own tensors beside a model that is loaded
        return rates(_together(looks), device, str(denoiser.dtype).removeprefix("torch."))

    def forward_error(self, a: Seen, b: Seen) -> float | None:
        """Relative distance of B's first forward to A's, over the whole output; exactly 0.0 where `torch.equal`."""
        if a.first_output is None or b.first_output is None:
            return None
        if torch.equal(a.first_output, b.first_output):
            return 0.0
        return float((a.first_output - b.first_output).norm() / a.first_output.norm())

    def _works(self, request: Request) -> list[Work]:
        off = tuple((knob, "off") for knob in SAME_WORK if knob in knobs())
        wishes = tuple(wish for wish in request.wishes if wish[0] not in SAME_WORK)
        return self._during(replace(request, wishes=(*wishes, *off)), first_step)

    def _during(self, request: Request, watch: Watch) -> Any:
        self._engine.move_to(self._engine.plan(request))
        assert self._engine.rig is not None
        return watched(self._engine.rig, watch, lambda: self._engine.generate(request))


def watched(rig: Rig, watch: Watch, call: Callable[[], Any]) -> Any:
    """Call the pipeline of the rig, whose levers are on, inside a watch; cancel it once the watch has seen enough."""

    def enough(index: int) -> None:
        if index + 1 == min(STEPS[watch], rig.total_steps):
            rig.cancel("enough was seen")

    with watch(rig) as seen, appended(rig.at_step, enough), suppress(Cancelled):
        call()
    return seen


def _together(looks: Iterable[Look]) -> Work:
    """The shapes of several forwards as one work."""
    works = [work for look in looks for work in look.works]
    gemms = tuple(dict.fromkeys(gemm for work in works for gemm in work.gemms))
    attentions = tuple(dict.fromkeys(attention for work in works for attention in work.attentions))
    return Work(gemms=_heaviest_first(gemms), attentions=_heaviest_first(attentions))


def _heaviest_first(shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(shapes, key=lambda shape: -shape.flops * shape.count))
