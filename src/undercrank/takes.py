"""One film with what was seen on the way, and how far one such take is from another.

A take holds the frames, the latents after each step, and what the denoiser made in the first step: so that a lever is
judged inside one forward, along the run and at its end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from undercrank.engine import Engine
from undercrank.metrics import METRICS
from undercrank.quality import as_FCHW, compare_frames, compare_latents, distance_of, relative_error
from undercrank.records import Distance, FidelityReport, Report, Request
from undercrank.rig import Rig
from undercrank.undo import appended
from undercrank.work import around_forwards


@dataclass(frozen=True, kw_only=True)
class Take:
    """A film, F 3 H W uint8, and its story. latents: after each step; forwards: of the first step, in call order."""

    request: Request
    report: Report
    frames_FCHW: torch.Tensor
    latents: tuple[torch.Tensor, ...] = ()
    forwards: tuple[torch.Tensor, ...] = ()

    @property
    def loop_s(self) -> float:
        return self.report.trace.stage_s["denoise"]

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(x).all()) for x in self.latents)


@dataclass(kw_only=True)
class Seen:
    """What a witness saw, on the CPU."""

    latents: list[torch.Tensor] = field(default_factory=list)
    forwards: list[torch.Tensor] = field(default_factory=list)

    def remember(self, rig: Rig, index: int, latents: torch.Tensor) -> None:
        """For `Engine.generate(on_latents=...)`."""
        self.latents.append(latents.detach().clone())


def take(engine: Engine, request: Request) -> Take:
    """Make the film and remember what was seen. Raises the errors of `Engine.generate`."""
    engine.move_to(engine.plan(request))
    assert engine.rig is not None
    with witness(engine.rig) as seen:
        clip = engine.generate(request, on_latents=seen.remember)
    return Take(
        request=request,
        report=clip.report,
        frames_FCHW=as_FCHW(clip.frames_FHWC),
        latents=tuple(each.cpu() for each in seen.latents),
        forwards=tuple(each.cpu() for each in seen.forwards),
    )


@contextmanager
def witness(rig: Rig) -> Iterator[Seen]:
    """Remember the first step's forwards of the run in this block. Makes nobody wait for the device."""
    seen = Seen()
    first: list[torch.Tensor] = []

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if rig.running and rig.step_index == 0:
            first.append(result[0] if isinstance(result, tuple) else result.sample)
        return result

    def step(index: int) -> None:
        if index == 0:  # only now: a forward on another device may be finished as late as this
            seen.forwards += [each.detach().clone() for each in first]
            first.clear()

    with ExitStack() as stack:
        stack.enter_context(around_forwards(rig, forward))
        stack.enter_context(appended(rig.at_step, step))
        yield seen


# --------------------------------------------------------------------------- one take against another


def compare_takes(
    reference: Take, other: Take, *, names: Iterable[str] | None = None, device: str = "cpu"
) -> FidelityReport:
    """How far `other` is from `reference`: its first forward, its latents along the run, its frames.

    identical: all that was seen is, bit for bit; the same numbers in another dtype are not.
    """
    frames = compare_frames(reference.frames_FCHW, other.frames_FCHW, names=names, device=device)
    before: tuple[Distance, ...] = ()
    identical = frames.identical
    if reference.latents and len(reference.latents) == len(other.latents):
        along = compare_latents(reference.latents, other.latents)
        before, identical = along.distances, identical and along.identical
    return replace(
        frames,
        a=in_words(reference.request),
        b=in_words(other.request),
        identical=identical,
        distances=(*_first_forward(reference, other), *before, *frames.distances),
    )


def _first_forward(reference: Take, other: Take) -> tuple[Distance, ...]:
    """Branch by branch, where both runs called the denoiser equally often in their first step."""
    pairs = list(zip(reference.forwards, other.forwards, strict=False))
    if not pairs or len(reference.forwards) != len(other.forwards) or any(x.shape != y.shape for x, y in pairs):
        return ()
    curve = [relative_error(x, y) for x, y in pairs]
    return (distance_of("one_forward", max(curve), curve),)


def together(reports: Sequence[FidelityReport]) -> tuple[Distance, ...]:
    """Of several films: the median of each distance, the furthest film, and the value of each film as the curve.

    A distance that one of the films lacks is left out of its median, and the note says of how many it is.
    """
    found = []
    for name in dict.fromkeys(d.metric for report in reports for d in report.distances):
        each = [d for report in reports for d in report.distances if d.metric == name]
        values = [d.value for d in each if d.value is not None]
        notes = list(dict.fromkeys(d.note for d in each if d.note))
        if 0 < len(values) < len(reports):
            notes.append(f"of {len(values)} of {len(reports)} films")
        found.append(distance_of(name, statistics.median(values) if values else None, values, "; ".join(notes)))
    return tuple(found)


def in_words(request: Request) -> str:
    """ "seed 1: a red ring moves left; host_sync=off" """
    wishes = ", ".join(f"{knob}={value}" for knob, value in request.wishes) or "every lever auto"
    return f"{request.prompt[:60]}, seed {request.seed}, {request.num_inference_steps} steps, {request.dtype}; {wishes}"


def spread(distance: Distance) -> tuple[float, float] | None:
    """Nearest and furthest film of a distance over several."""
    if not distance.curve:
        return None
    metric, values = METRICS[distance.metric], list(distance.curve)
    return metric.nearest(values), metric.furthest(values)
