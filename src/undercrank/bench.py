"""A against B on the same seed, in both orders: every timed run, the ratio pair by pair, and what the film lost.

Whoever runs second is often a little slower (a warmer chip, a fuller cache), so the runs go A B B A: the order's
effect falls on both sides alike. The first run of each side is not timed: kernels are chosen and code is compiled
in it, and what it took beyond a timed run is told apart. With a `Lab`, further untimed runs of each side show its work,
the floor below its time, where the host waited, and which kernels the device ran.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from undercrank.figures import Look, Profile, Rates, host_step_us, kernel_table, step_floor_ms
from undercrank.ledger import HERE
from undercrank.metrics import fidelity_in_words
from undercrank.records import BadInput, FidelityReport, Measurement, Record, Report, Request


class Film(Protocol):
    """A clip, by what is compared of it."""

    frames_FHWC: np.ndarray
    report: Report


class Laboratory(Protocol):
    """`lab.Lab`; named here by what is used of it, since it needs torch and this module does not."""

    def look(self, request: Request) -> Any:
        """Something with a `look: Look`, and what `forward_error` compares."""

    def rates(self, looks: Iterable[Look]) -> Rates | None: ...

    def forward_error(self, a: Any, b: Any) -> float | None: ...


Make = Callable[[Request], Film]
Judge = Callable[[Film, Film], FidelityReport]


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
    host_us: float | None = None
    "Of a step; None where the host does the device's work."


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
    compile_s: dict[str, float] = field(default_factory=dict)
    "Of a side's first run, where it compiled something."
    stall_sites: dict[str, dict[str, int]] = field(default_factory=dict)
    "By side, then by file:line, in its last timed run."
    looks: dict[str, Look] = field(default_factory=dict)
    "By side, where a lab looked."
    rates: Rates | None = None
    "What the device showed in the same process; None without one."
    fidelity: FidelityReport | None = None
    "B's film beside A's, where a judge looked."
    forward_error: float | None = None
    "Relative distance of B's first forward to A's; 0.0: equal, bit for bit."

    def step_ms(self, side: str) -> float:
        """The median over the side's timed runs."""
        return _median(self.runs, side, "step_ms")

    def floor_ms(self, side: str) -> float | None:
        """The floor of one step of that side; None where it was not measured."""
        if self.rates is None or side not in self.looks:
            return None
        return step_floor_ms(self.looks[side], self.rates) or None

    def gpu_idle_share(self, side: str) -> float | None:
        """Of the timed runs' steps: their time against the time that the device was busy in the traced run."""
        profile = self.looks[side].profile if side in self.looks else None
        return None if profile is None else max(0.0, 1 - profile.busy_step_ms / self.step_ms(side))


def compare(
    make: Make,
    a: Request,
    b: Request,
    *,
    pairs: int = 2,
    lab: Laboratory | None = None,
    judge: Judge | None = None,
) -> tuple[Comparison, tuple[Measurement, ...]]:
    """Run A and B alternately, `pairs` times each. `make` renders a request (an Engine's `generate`).

    lab: looks at each side after the timed runs. judge: says how far B's film is from A's.

    Returns the comparison and, where B has exactly one lever that A has not, its row for the ledger.

    Raises BadInput where the two requests would not make the same clip but for their levers.
    """
    refuse_apples_and_pears(a, b)
    if pairs < 1:
        raise BadInput(f"{pairs} pairs: at least 1, and from 2 on both orders are seen", field="pairs")
    requests, films, first, last = {"A": a, "B": b}, {}, {}, {}
    for side in "AB":
        films[side] = make(requests[side])
        first[side] = timed(side, films[side])
    runs: tuple[Timed, ...] = ()
    for side in order_of(pairs):
        film = make(requests[side])
        runs, last[side] = (*runs, timed(side, film)), film.report.trace
    seen = {side: lab.look(requests[side]) for side in "AB"} if lab else {}
    looks = {side: each.look for side, each in seen.items()}
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
        fidelity=judge(films["A"], films["B"]) if judge else None,
        compile_s={side: ms / 1000 for side in "AB" if (ms := films[side].report.trace.counters.get("compile.ms", 0))},
        stall_sites={side: dict(trace.stall_sites) for side, trace in sorted(last.items())},
        looks=looks,
        rates=lab.rates(looks.values()) if lab else None,
        forward_error=lab.forward_error(seen["A"], seen["B"]) if lab else None,
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
        host_us=host_step_us(trace),
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
        distances=_distances(comparison) | _one_forward(comparison),
        floor=_floor(comparison),
        note=f"A: {comparison.a}; B: {comparison.b}; {comparison.verdict}{_floor_note(comparison)}",
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
        setting=next((lever.setting for lever in report.plan.levers if lever.name == measured.get("lever")), ""),
        **measured,
    )
    return replace(row, id=hashlib.sha256(row.to_json().encode()).hexdigest()[:12])


def levers_apart(a: Film, b: Film) -> list[str]:
    """Levers that were on in B and not in A, by what was really planned."""
    on_in_a = {lever.name for lever in a.report.plan.levers}
    return [lever.name for lever in b.report.plan.levers if lever.name not in on_in_a]


def in_words(comparison: Comparison) -> str:
    """Every timed run, then what they say, then what the untimed ones showed."""
    lines = [f"A: {comparison.a}", f"B: {comparison.b}"]
    for number, run in enumerate(comparison.runs, start=1):
        lines.append(f"  run {number} {run.side}: {_run_in_words(run, comparison.floor_ms(run.side))}")
    lines.append("  pairs (A's loop over B's): " + ", ".join(f"{ratio:.3f}" for ratio in comparison.ratios))
    lines.append(
        "  medians: "
        + ", ".join(
            f"{side} loop {_median(comparison.runs, side, 'denoise_s'):.3f} s, {comparison.step_ms(side):.1f} ms a step"
            for side in "AB"
        )
    )
    lines.append(
        "  first runs, beyond a timed one: " + ", ".join(f"{s} {t:.1f} s" for s, t in comparison.warm_up_s.items())
    )
    if comparison.compile_s:
        compiling = ", ".join(f"{side} {seconds:.1f} s" for side, seconds in comparison.compile_s.items())
        lines.append(f"  of that, compiling: {compiling}")
    for side, sites in comparison.stall_sites.items():
        lines += [f"  stalls of {side}: {count} at {site}" for site, count in sorted(sites.items())]
    lines += [line for side in comparison.looks for line in _look_in_words(comparison, side)]
    lines += _rates_in_words(comparison.rates) if comparison.rates else []
    lines.append(comparison.verdict)
    lines.append(_film_in_words(comparison))
    lines += fidelity_in_words(comparison.fidelity)[1:] if comparison.fidelity and not comparison.same_frames else []
    return "\n".join(lines)


def _run_in_words(run: Timed, floor_ms: float | None) -> str:
    words = [
        f"loop {run.denoise_s:.3f} s",
        f"{run.step_ms:.1f} ms a step",
        *([f"{run.step_ms / floor_ms:.3f}x its floor"] if floor_ms else []),
        f"all {run.total_s:.3f} s",
        "stalls " + ("not counted here" if run.stalls is None else str(run.stalls)),
        *([f"host {run.host_us / 1000:.1f} ms a step"] if run.host_us is not None else []),
        f"peak {(run.peak_bytes or 0) / 2**30:.2f} GiB",
    ]
    return ", ".join(words)


def _look_in_words(comparison: Comparison, side: str) -> list[str]:
    look, floor_ms = comparison.looks[side], comparison.floor_ms(side)
    lines = []
    for number, work in enumerate(look.works, start=1):
        lines.append(
            f"  {side}, forward {number} of a step: matrix products {work.gemm_flops / 1e12:.4g}, attention "
            f"{work.attention_flops / 1e12:.4g}, convolutions {work.conv_flops / 1e12:.4g} x 10^12 operations"
        )
    if floor_ms is not None:
        lines.append(f"  {side}, floor of a step: {floor_ms:.1f} ms; {comparison.step_ms(side) / floor_ms:.3f}x")
    if look.host_us:
        median = statistics.median(look.host_us[1:] or look.host_us)
        share = median / 10 / comparison.step_ms(side)
        lines.append(f"  {side}, host outside the denoiser: {median:.0f} us a step ({share:.2f} % of it)")
    if look.profile is not None:
        lines += _profile_in_words(comparison, side, look.profile)
    return lines


def _profile_in_words(comparison: Comparison, side: str, profile: Profile) -> list[str]:
    idle = comparison.gpu_idle_share(side)
    blocked = ", ".join(f"{call} {ms:.2f}" for call, ms in sorted(profile.blocked_by.items(), key=lambda x: -x[1]))
    return [
        f"  {side}, traced over {profile.steps} steps: CPU blocked {profile.cpu_blocked_ms:.2f} ms"
        + (f" ({blocked})" if blocked else ""),
        f"  {side}, GPU idle: {idle:.1%} of a timed step",
        *(f"    {share:6.1%} {ms:10.2f} ms  {name[:90]}" for name, ms, share in kernel_table(profile, top=6)),
    ]


def _rates_in_words(rates: Rates) -> list[str]:
    rows = [
        f"    {rate.kernel} {rate.shape}: {rate.tflops:.1f} ({rate.low:.1f} to {rate.high:.1f}, n {rate.n})"
        for rate in (*rates.gemm, *rates.attention)
    ]
    refused = [f"    {what}: does not serve here: {why}" for what, why in rates.refused.items()]
    return [f"  rates of {rates.device} in {rates.dtype}, 10^12 operations a second:", *rows, *refused]


def _film_in_words(comparison: Comparison) -> str:
    if not comparison.repeats_itself:
        return "a side did not repeat its own frames: this machine or lever is not deterministic"
    if comparison.same_frames:
        frames = "the same frames, bit for bit"
    else:
        frames = f"frames differ: at most {comparison.max_abs} of 255, PSNR {comparison.psnr_db:.1f} dB"
    return frames + _forward_in_words(comparison.forward_error)


def _forward_in_words(error: float | None) -> str:
    if error is None:
        return ""
    return "; the first forward is equal" if error == 0 else f"; the first forward differs by {error:.2e}, relative"


def _psnr(comparison: Comparison) -> dict[str, Any]:
    return {} if comparison.psnr_db is None else {"psnr_db": comparison.psnr_db}


def _distances(comparison: Comparison) -> dict[str, float]:
    """Everything that the judge measured; without one, what was counted here."""
    if comparison.fidelity is None:
        return {"max_abs": float(comparison.max_abs), **_psnr(comparison)}
    return {each.metric: each.value for each in comparison.fidelity.distances if each.value is not None}


def _floor(comparison: Comparison) -> dict[str, float]:
    """The floor that stood beside the distances; None was known: nothing."""
    distances = comparison.fidelity.distances if comparison.fidelity else ()
    return {each.metric: next(iter(each.floor.values())) for each in distances if each.floor}


def _one_forward(comparison: Comparison) -> dict[str, float]:
    return {} if comparison.forward_error is None else {"one_forward": comparison.forward_error}


def _floor_note(comparison: Comparison) -> str:
    """Facts of the runs that have no column of their own, for whoever reads the row."""
    notes = [f"{side} compiled for {seconds:.1f} s" for side, seconds in comparison.compile_s.items()]
    for side in comparison.looks:
        if (floor := comparison.floor_ms(side)) is not None:
            notes.append(f"{side} {comparison.step_ms(side) / floor:.3f}x its floor of {floor:.1f} ms a step")
        if (profile := comparison.looks[side].profile) is not None:
            notes.append(f"{side} CPU blocked {profile.cpu_blocked_ms:.2f} ms in {profile.steps} steps")
    return "".join(f"; {note}" for note in notes)


def _median(runs: tuple[Timed, ...], side: str, name: str) -> float:
    return statistics.median(getattr(run, name) for run in runs if run.side == side)


def _half_range(values: list[float]) -> float:
    return (max(values) - min(values)) / 2 / statistics.median(values)
