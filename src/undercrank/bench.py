"""A against B on the same seed, in both orders: every timed run, the ratio pair by pair, and what the film lost.

Whoever runs second is often a little slower (a warmer chip, a fuller cache), so the runs go A B B A: the order's
effect falls on both sides alike. The first run of each side is not timed: kernels are chosen and code is compiled
in it, and what it took beyond a timed run is told apart.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from undercrank.ledger import HERE
from undercrank.records import BadInput, Measurement, Record, Report, Request


class Film(Protocol):
    """A clip, by what is compared of it."""

    frames_FHWC: np.ndarray
    report: Report


Make = Callable[[Request], Film]


@dataclass(frozen=True, kw_only=True)
class Timed(Record):
    """One run. side: A or B; denoise_s: the loop; total_s: all but loading."""

    side: str
    denoise_s: float
    total_s: float
    step_ms: float
    stalls: int | None
    peak_bytes: int | None
    frames_hash: str


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """What the runs say. ratio: seconds of A's loop over B's; above 1, B is faster."""

    a: str
    b: str
    runs: tuple[Timed, ...]
    warm_up_s: dict[str, float]
    "What the first run of a side took beyond a timed one: choosing kernels, compiling."
    ratios: tuple[float, ...]
    "Of each neighbouring pair, in the order of the runs."
    ratio: float
    noise: float
    "The larger half-range of either side, relative to its median."
    verdict: str
    same_frames: bool
    repeats_itself: bool
    "Each side made the same frames in each of its runs."
    max_abs: int
    psnr_db: float | None
    "None where the frames are equal."


def compare(make: Make, a: Request, b: Request, *, pairs: int = 2) -> tuple[Comparison, tuple[Measurement, ...]]:
    """Run A and B alternately, `pairs` times each. `make` renders a request (an Engine's `generate`).

    Returns the comparison and, where B has exactly one lever that A has not, its row for the ledger.

    Raises BadInput where the two requests would not make the same clip but for their levers.
    """
    refuse_apples_and_pears(a, b)
    if pairs < 1:
        raise BadInput(f"{pairs} pairs: at least 1, and from 2 on both orders are seen", field="pairs")
    requests, films, first = {"A": a, "B": b}, {}, {}
    for side in "AB":
        films[side] = make(requests[side])
        first[side] = timed(side, films[side])
    runs = tuple(timed(side, make(requests[side])) for side in order_of(pairs))
    ratios = pair_ratios(runs)
    noise = max(_half_range([run.denoise_s for run in runs if run.side == side]) for side in "AB")
    max_abs, psnr_db = distance(films["A"].frames_FHWC, films["B"].frames_FHWC)
    comparison = Comparison(
        a=wishes_in_words(a),
        b=wishes_in_words(b),
        runs=runs,
        warm_up_s={side: max(0.0, first[side].total_s - _median(runs, side, "total_s")) for side in "AB"},
        ratios=ratios,
        ratio=statistics.median(ratios),
        noise=noise,
        verdict=verdict(ratios, noise),
        same_frames=max_abs == 0,
        repeats_itself=all(len({r.frames_hash for r in (first[s], *runs) if r.side == s}) == 1 for s in "AB"),
        max_abs=max_abs,
        psnr_db=psnr_db,
    )
    apart = levers_apart(films["A"], films["B"])
    return comparison, (as_row(comparison, films["B"], apart[0]),) if len(apart) == 1 else ()


def order_of(pairs: int) -> str:
    """A B, then B A, and so on: "ABBA" for two pairs."""
    return "".join("AB" if index % 2 == 0 else "BA" for index in range(pairs))


def timed(side: str, film: Film) -> Timed:
    trace = film.report.trace
    assert film.report.frames_hash is not None
    return Timed(
        side=side,
        denoise_s=trace.stage_s["denoise"],
        total_s=sum(seconds for stage, seconds in trace.stage_s.items() if stage != "load"),
        step_ms=statistics.median(trace.step_ms),
        stalls=trace.stalls,
        peak_bytes=trace.peak_bytes,
        frames_hash=film.report.frames_hash,
    )


def pair_ratios(runs: tuple[Timed, ...]) -> tuple[float, ...]:
    """A's seconds over B's, for each two neighbours of different sides."""
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return tuple((x.denoise_s / y.denoise_s) if x.side == "A" else (y.denoise_s / x.denoise_s) for x, y in pairs)


def verdict(ratios: tuple[float, ...], noise: float) -> str:
    """A sentence. A difference counts when every pair agrees on its sign and it is larger than the noise."""
    ratio = statistics.median(ratios)
    signs = {ratio > 1 for ratio in ratios}
    if len(signs) > 1 or abs(ratio - 1) <= noise:
        return f"no difference: {ratio:.3f}x is inside the noise ({noise:.1%}), or the pairs disagree"
    faster, by = ("B", ratio) if ratio > 1 else ("A", 1 / ratio)
    return f"{faster} is faster: {by:.3f}x, in every pair (noise {noise:.1%})"


def distance(a_FHWC: np.ndarray, b_FHWC: np.ndarray) -> tuple[int, float | None]:
    """Largest difference of a value (of 255) and PSNR in dB over the clip; None where nothing differs."""
    difference = np.abs(a_FHWC.astype(np.int16) - b_FHWC.astype(np.int16))
    mean_square = float(np.mean(np.square(difference, dtype=np.float64)))
    return int(difference.max()), None if mean_square == 0 else 10 * math.log10(255**2 / mean_square)


def refuse_apples_and_pears(a: Request, b: Request) -> None:
    """Two requests that differ in more than levers and fidelity make two different films."""
    names = [
        name for name in a.to_dict() if name not in ("wishes", "fidelity") and getattr(a, name) != getattr(b, name)
    ]
    if names:
        raise BadInput(f"A and B differ in {', '.join(names)}: only levers and fidelity may", field=names[0])
    if a.seed is None:
        raise BadInput("give a seed: A and B must start from the same noise", field="seed")


def wishes_in_words(request: Request) -> str:
    words = [f"{knob}={value}" for knob, value in request.wishes] or ["every lever auto"]
    return f"{', '.join(words)} (fidelity {request.fidelity.value})"


def as_row(comparison: Comparison, film: Film, lever: str) -> Measurement:
    """The ledger row of a lever that B has and A has not."""
    runs = [run for run in comparison.runs if run.side == "B"]
    return row_of(
        film.report,
        lever=lever,
        n=len(runs),
        step_ms=statistics.median(run.step_ms for run in runs),
        spread_ms=(max(r.step_ms for r in runs) - min(r.step_ms for r in runs)) / 2,
        total_s=statistics.median(run.total_s for run in runs),
        peak_bytes=runs[0].peak_bytes,
        gain=comparison.ratio,
        distances={"max_abs": float(comparison.max_abs), **_psnr(comparison)},
        note=f"A: {comparison.a}; B: {comparison.b}; {comparison.verdict}",
    )


def row_of(report: Report, **measured: Any) -> Measurement:
    """A row of what was measured in runs like this one: the report says on what, `measured` says what."""
    request = report.request
    assert request.width and request.height and request.num_frames and request.num_inference_steps
    row = Measurement(
        id="",
        family=report.plan.load.family,
        source=HERE,
        machine=report.machine.name,
        device=report.machine.device(report.plan.load.device).name,
        versions=report.machine.packages,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        num_inference_steps=request.num_inference_steps,
        dtype=report.plan.load.dtype,
        **measured,
    )
    return replace(row, id=hashlib.sha256(row.to_json().encode()).hexdigest()[:12])


def levers_apart(a: Film, b: Film) -> list[str]:
    """Levers that were on in B and not in A, by what was really planned."""
    on_in_a = {lever.name for lever in a.report.plan.levers}
    return [lever.name for lever in b.report.plan.levers if lever.name not in on_in_a]


def in_words(comparison: Comparison) -> str:
    """Every timed run, then what they say."""
    lines = [f"A: {comparison.a}", f"B: {comparison.b}"]
    for number, run in enumerate(comparison.runs, start=1):
        stalls = "not counted here" if run.stalls is None else str(run.stalls)
        lines.append(
            f"  run {number} {run.side}: loop {run.denoise_s:.3f} s, {run.step_ms:.1f} ms a step, "
            f"all {run.total_s:.3f} s, stalls {stalls}, peak {(run.peak_bytes or 0) / 2**30:.2f} GiB"
        )
    lines.append("  pairs (A's loop over B's): " + ", ".join(f"{ratio:.3f}" for ratio in comparison.ratios))
    lines.append(
        "  first runs, beyond a timed one: " + ", ".join(f"{s} {t:.1f} s" for s, t in comparison.warm_up_s.items())
    )
    lines.append(comparison.verdict)
    lines.append(_film_in_words(comparison))
    return "\n".join(lines)


def _film_in_words(comparison: Comparison) -> str:
    if not comparison.repeats_itself:
        return "a side did not repeat its own frames: this machine or lever is not deterministic"
    if comparison.same_frames:
        return "the same frames, bit for bit"
    return f"frames differ: at most {comparison.max_abs} of 255, PSNR {comparison.psnr_db:.1f} dB"


def _psnr(comparison: Comparison) -> dict[str, Any]:
    return {} if comparison.psnr_db is None else {"psnr_db": comparison.psnr_db}


def _median(runs: tuple[Timed, ...], side: str, name: str) -> float:
    return statistics.median(getattr(run, name) for run in runs if run.side == side)


def _half_range(values: list[float]) -> float:
    return (max(values) - min(values)) / 2 / statistics.median(values)
